"""Pages of other origins: off unless the operator lists them, and then with streams, errors and bearer tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser_page
from scripted_engine import ScriptedEngine
from tcp_server import answering

from outrider.serving import Authenticator, Caller
from outrider.settings import SettingsError
from outrider_gateway.config import GatewayConfig

TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
DOCS = Path(__file__).parents[2] / "docs/gateway.md"
LISTED, OTHER = "https://chat.example", "https://other.example"
# What OpenAI's package sends from a page, which a browser asks about first.
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def allowed(answer: Any) -> str | None:
    """The origin whose pages may read the answer."""
    found: str | None = answer.headers.get("access-control-allow-origin")
    return found


async def ask_first(gateway: Any, origin: str, **more: str) -> Any:
    return await gateway.http.options("/v1/completions", headers={"origin": origin, **PREFLIGHT, **more})


async def test_off_by_default(gateway: Any) -> None:
    refused = await ask_first(gateway, LISTED)
    assert refused.status_code == 405
    answer = await gateway.http.post("/v1/completions", json=TEXT, headers={"origin": LISTED})
    for one in (refused, answer):
        assert not [name for name in one.headers if name.startswith("access-control")]


async def test_listed_origins_may_call_and_read(gateways: Any) -> None:
    async with gateways(allow_origin=f"http://localhost:3000, {LISTED}") as gateway:
        for origin in (LISTED, "http://localhost:3000"):
            may = await ask_first(gateway, origin)
            assert (may.status_code, allowed(may)) == (200, origin)
            assert may.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
            assert "POST" in may.headers["access-control-allow-methods"]
            # A cache must not give one origin what was said to another.
            assert "Origin" in may.headers["vary"]
            # No cookie is ever looked at.
            assert "access-control-allow-credentials" not in may.headers
        for body in (TEXT, {**TEXT, "stream": True}, {**TEXT, "temperature": -1}):
            answer = await gateway.http.post("/v1/completions", json=body, headers={"origin": LISTED})
            assert allowed(answer) == LISTED
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_other_origins_are_refused(gateways: Any) -> None:
    async with gateways(allow_origin=LISTED) as gateway:
        for origin in (OTHER, "null", f"{LISTED}.evil.example", LISTED.replace("https", "http")):
            refused = await ask_first(gateway, origin)
            assert (refused.status_code, allowed(refused)) == (400, None)
            # A browser that does not ask first is told by the answer that its page may not read it.
            answer = await gateway.http.post("/v1/completions", json=TEXT, headers={"origin": origin})
            assert allowed(answer) is None
        # What a page can send without asking is refused as it is.
        plain = {"origin": OTHER, "content-type": "text/plain"}
        assert (await gateway.http.post("/v1/completions", content=json.dumps(TEXT), headers=plain)).status_code == 415


async def test_any_origin(gateways: Any) -> None:
    private = {"access-control-request-private-network": "true"}
    async with gateways(allow_origin="*") as gateway:
        may = await ask_first(gateway, OTHER)
        assert (may.status_code, allowed(may)) == (200, "*")
        # From the internet into a reader's own network only who is listed.
        assert (await ask_first(gateway, OTHER, **private)).status_code == 400
    async with gateways(allow_origin=OTHER) as gateway:
        may = await ask_first(gateway, OTHER, **private)
        assert may.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://Chat.example", "*,https://a.b"])
def test_origins_that_cannot_be(origin: str) -> None:
    with pytest.raises(SettingsError, match="--allow-origin"):
        GatewayConfig(allow_origin=origin)


# Streams an answer as a page of its own would; the text and how many reads brought it, or what went wrong.
_CALL = """
(async () => {
  try {
    const answer = await fetch("%s/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json", authorization: "Bearer %s", "x-stainless-lang": "js" },
      body: JSON.stringify({ prompt: "a", max_tokens: 40, temperature: 0, stream: true }),
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", reads = 0;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return { status: answer.status, id: answer.headers.get("x-request-id"), text, reads };
      text += value;
      reads += 1;
    }
  } catch (error) {
    return { error: error.name };
  }
})()
"""


@contextlib.asynccontextmanager
async def page_elsewhere(pages: list[str]) -> AsyncIterator[str]:
    """The origin of a page, which is the last of `pages` when it is asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n" + pages[-1].encode())
        await writer.drain()

    async with answering(serve) as address:
        yield f"http://{address}"


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_a_browser_streams_with_a_bearer_token(gateways: Any, tmp_path: Path) -> None:
    token = "sixteen-letters!"
    serving = {"authenticator": Authenticator({token: Caller("acme")})}
    engine = ScriptedEngine(tick=0.01)
    async with page_elsewhere([""]) as origin, browser_page(tmp_path) as page:
        await page.open(origin)
        async with gateways(engine, serving=serving, token=token, allow_origin=origin) as gateway:
            said = await page.look(_CALL % (gateway.url, token))
            assert said["status"] == 200 and said["id"] and said["text"].endswith("data: [DONE]\n\n")
            # As it is written, not all at its end.
            assert said["reads"] > 3
            assert engine.requests[-1].tenant == "acme"
            wrong = await page.look(_CALL % (gateway.url, "wrong"))
            assert wrong["status"] == 401 and "invalid_api_key" in wrong["text"]
        async with gateways(serving=serving, token=token, allow_origin=LISTED) as gateway:
            assert await page.look(_CALL % (gateway.url, token)) == {"error": "TypeError"}
            assert gateway.targets[0].engine.requests == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_the_pages_example(gateways: Any, tmp_path: Path) -> None:
    """That of docs/gateway.md, from another origin."""
    found = re.search(r"```html\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None and len(found[1].splitlines()) <= 10
    pages = [""]
    async with page_elsewhere(pages) as origin, gateways(allow_origin=origin) as gateway:
        pages.append(found[1].replace("127.0.0.1:8000", gateway.server.address))
        async with browser_page(tmp_path) as page:
            await page.open(origin)
            await page.until("document.body.innerText.includes('[DONE]')")
            assert gateway.targets[0].engine.requests[-1].max_tokens == 32
