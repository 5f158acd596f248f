"""A client of `/v1/completions` that adds little to what it measures: one connection an answer, read as it comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class HttpAnswer:
    """An answer. Seconds are from when it was asked for."""

    tokens: int = 0
    text: str = ""
    first: float = 0.0
    seconds: float = 0.0
    # Between two events with text.
    gaps: list[float] = field(default_factory=list)
    # Of a form: it cannot be read, or lacks fields.
    broken: bool = False

    @property
    def seconds_a_token(self) -> float:
        """Of those behind the first."""
        return (self.seconds - self.first) / max(1, self.tokens - 1)


class CompletionsClient:
    """Asks a server for greedy completions of token ids."""

    def __init__(self, url: str, model: str) -> None:
        """`url`: http://HOST:PORT of any server that streams `/v1/completions` and counts tokens in `usage`."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path, self._model = parts.path.rstrip("/") + "/v1/completions", model

    async def ask(self, prompt: Sequence[int], max_tokens: int, schema: Mapping[str, Any] | None = None) -> HttpAnswer:
        """An answer of exactly `max_tokens`, or a form by a JSON Schema that ends within them, which may be broken.
        Raises `RuntimeError` with what the server said where it refuses, or ends an answer by an error, and for fewer
        or more tokens: no figure may be made of that."""
        wanted: dict[str, Any] = {"ignore_eos": True}
        if schema is not None:
            form = {"name": "form", "schema": schema, "strict": True}
            wanted = {"response_format": {"type": "json_schema", "json_schema": form}}
        body = json.dumps(
            {
                "model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}, **wanted,
            }
        ).encode()  # fmt: skip
        answer, asked = HttpAnswer(), time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            writer.write(
                f"POST {self._path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            last = 0.0
            async for event in _events(reader):
                now = time.perf_counter() - asked
                if event.get("error"):
                    raise RuntimeError(f"the server ended an answer: {event['error']}")
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                text = event["choices"][0].get("text") if event.get("choices") else ""
                if not text:
                    continue
                answer.text += text
                if answer.first:
                    answer.gaps.append(now - last)
                else:
                    answer.first = now
                last = now
        finally:
            writer.close()
        answer.seconds = time.perf_counter() - asked
        if schema is not None:
            answer.broken = not _is_form(answer.text, schema)
        elif answer.tokens != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {answer.tokens}")
        return answer


def _is_form(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a text has all fields of a form."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and list(found) == schema["required"]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises `RuntimeError` where the answer is no stream of them."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = head.split(" ", 2)[1]
    if status != "200":
        raise RuntimeError(f"the server answered {status}: {(await reader.read(2000)).decode(errors='replace')}")
    chunked, pending = "transfer-encoding: chunked" in head, b""
    while data := await (_chunk(reader) if chunked else reader.read(65536)):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a body; empty at its end."""
    size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:-2]
