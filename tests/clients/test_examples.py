"""The examples of clients/README.md and of clients/python, run as they stand against a real server."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from waits import HUNG_SECONDS

_ROOT = Path(__file__).parents[2]
_ADDRESS = "127.0.0.1:50051"


def _readme_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (_ROOT / "clients/README.md").read_text(), re.DOTALL)


async def _run(source: str, address: str) -> str:
    assert _ADDRESS in source
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        source.replace(_ADDRESS, address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert process.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.parametrize(
    "source",
    [*_readme_examples(), (_ROOT / "clients/python/generate.py").read_text()],
    ids=["asynchronous", "synchronous", "generate"],
)
async def test_ten_lines_stream_an_answer(running: Any, source: str) -> None:
    assert (await _run(source, running.address)).startswith("one two three four")


async def test_client_that_drafts_for_itself(running: Any) -> None:
    out = await _run((_ROOT / "clients/python/verify.py").read_text(), running.address)
    # The first guess is what followed 100 where it stood before.
    assert out.splitlines() == ["step 0: 5 guesses kept", "step 1: 0 guesses kept", "step 2: 0 guesses kept"]


async def _example(name: str, address: str) -> list[str]:
    return (await _run((_ROOT / "clients/python" / f"{name}.py").read_text(), address)).splitlines()


async def test_chat_keeps_the_conversation(running: Any) -> None:
    out = await _example("chat", running.address)
    assert [line for line in out if line.startswith("> ")] == ["> What is a bridge?", "> Which is the longest?"]
    (_, *_), (second, *_) = running.target.requests
    said = [(message.role, message.content) for message in second.chat.messages]
    assert [role for role, _ in said] == ["user", "assistant", "user"]
    assert said[1][1] == out[1]


async def test_seeded_sampling(running: Any) -> None:
    assert (await _example("sampling", running.address))[-1] == "the same without drafts: True"
    requests = [request for request, _, _ in running.target.requests]
    assert [request.sampling.seed for request in requests] == [7, 7]
    assert [request.speculation.enabled for request in requests] == [True, False]


async def test_errors(running: Any) -> None:
    answered, unreachable, *others = await _example("errors", running.address)
    assert answered == "answered with 8 tokens"
    assert unreachable.startswith("cannot reach 127.0.0.1:1: ")
    assert others == [
        "at fault: input",
        "not a request: messages[0].content: expected a string or a list of text parts, got NoneType",
        "refused: UNKNOWN_MODEL",
    ]


def test_every_example_is_run() -> None:
    tested = "".join(Path(__file__).with_name(name).read_text() for name in ("test_examples.py", "test_protocol.py"))
    assert [path.stem for path in (_ROOT / "clients/python").glob("*.py") if path.stem not in tested] == []
