"""The chat page: what is served, and in headless Chromium what a person meets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser_page
from scripted_engine import ScriptedEngine

ANSWERED = "document.querySelector('.answer .text')?.textContent.length > 20"
FILES = ("/", "/page/chat.css", "/page/chat.js", "/page/stream.js", "/page/tree.js", "/page/icon.svg")
in_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

# The contrast of every kind of text on the page, as WCAG 2 computes it.
_CONTRASTS = """
(() => {
  const part = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = (rgb) => 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2]);
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = colour(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const nodes = [...document.querySelectorAll("body *")].filter(
    (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())
      || ["TEXTAREA", "INPUT"].includes(node.tagName));
  return nodes.map((node) => {
    const [a, b] = [light(colour(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    return [node.tagName + "." + node.className + "#" + node.id, (a + 0.05) / (b + 0.05)];
  });
})()
"""
# What the row of figures has said, from here on.
_KEEP_FIGURES = """
window.figures = [];
new MutationObserver(() => figures.push(document.getElementById("row-on").textContent))
  .observe(document.getElementById("row-on"), { childList: true, subtree: true, characterData: true });
"""
_UNLABELLED = """
[...document.querySelectorAll("input, textarea, button")]
  .filter((node) => !(node.labels?.length || node.textContent.trim() || node.ariaLabel)).map((node) => node.outerHTML)
"""


async def test_files_ask_nobody_else(gateway: Any) -> None:
    for path in FILES:
        answer = await gateway.http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        # A new version of the gateway shows its own page.
        assert answer.headers["cache-control"] == "no-cache"
        addresses = set(re.findall(r"https?://[^\s\"']+", answer.text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set()


async def test_page_can_be_left_out(gateways: Any) -> None:
    async with gateways(page=False) as gateway:
        assert (await gateway.http.get("/")).status_code == 404


class TestInBrowser:
    pytestmark = in_browser

    async def test_loads_and_streams(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways(ScriptedEngine(tick=0.02)) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.getElementById('served').textContent === 'counter, drafter trie'")
            assert await page.look("document.activeElement.id") == "message"
            assert not await page.look("document.getElementById('prediction').disabled")
            await page.look("document.getElementById('tokens').value = 60")
            await page.look(_KEEP_FIGURES)
            await page.write("hello")
            await page.press("Enter")
            await page.until("document.querySelector('.answer .text')?.textContent.length > 5")
            assert not await page.look("document.getElementById('stop').disabled")
            assert await page.look("document.querySelector('.answer .text').textContent.length") < 60
            await page.until("document.getElementById('stop').disabled")
            assert len(await page.look("document.querySelector('.answer .text').textContent")) == 60
            assert await page.look("document.querySelector('#row-on td').textContent") != "\u2013"
            figures = await page.look("figures")
            assert figures and not [said for said in figures if "NaN" in said or "Infinity" in said]
            assert page.complaints == []
            assert all(address.startswith(gateway.url) for address in page.requests)

    async def test_escape_cancels(self, gateways: Any, tmp_path: Path) -> None:
        engine = ScriptedEngine(tick=0.02)
        async with gateways(engine) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.activeElement.id === 'message'")
            for stopped_by in ("key", "button"):
                before = len(engine.cancelled)
                await page.write("hello")
                await page.press("Enter")
                await page.until("[...document.querySelectorAll('.answer .text')].at(-1)?.textContent.length > 3")
                if stopped_by == "key":
                    await page.press("Escape")
                else:
                    await page.look("document.getElementById('stop').click()")
                await page.until("document.getElementById('stop').disabled")
                await gateway.idle()
                assert len(engine.cancelled) == before + 1
            assert await page.look("document.querySelectorAll('.ended').length") == 2
            assert await page.look("document.getElementById('error').hidden")

    async def test_shows_an_error_and_goes_on(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways() as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.activeElement.id === 'message'")
            await page.write("long " * 100)
            await page.press("Enter")
            shown = await page.until(
                "!document.getElementById('error').hidden && document.getElementById('error').textContent"
            )
            assert "longer than the context" in shown
            await page.write("short")
            await page.press("Enter")
            await page.until(ANSWERED)
            assert await page.look("document.getElementById('error').hidden")

    async def test_what_is_said_is_text(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways() as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.activeElement.id === 'message'")
            await page.write("<img src=x onerror=document.title='bad'><b>x</b>")
            await page.press("Enter")
            await page.until(ANSWERED)
            assert await page.look("document.querySelectorAll('#log img').length") == 0
            assert await page.look("document.title") == "Outrider chat"

    async def test_both_ways_side_by_side_with_a_real_model(self, real: Any, tmp_path: Path) -> None:
        async with browser_page(tmp_path) as page:
            await page.open(real.url)
            await page.until("document.activeElement.id === 'message'")
            await page.look("document.querySelector('input[value=both]').click()")
            await page.look("document.getElementById('message').focus()")
            await page.write("say something")
            await page.press("Enter")
            await page.until("document.getElementById('compared').textContent === 'Both said the same.'")
            rows = await page.look(
                "['on', 'off'].map((row) => [...document.querySelectorAll(`#row-${row} td`)].map((c) => c.textContent))"
            )
            (_, accepted, _), (_, alone, _) = rows
            assert float(accepted) > 1 and float(alone) == 1
            assert await page.look("document.querySelectorAll('.both .drafted').length") > 0
            assert await page.look("document.querySelectorAll('#steps span').length") > 0
            assert "accepted in" in await page.look("document.getElementById('steps-text').textContent")
            await self._tree_is_drawn(page)
            assert page.complaints == []

    async def _tree_is_drawn(self, page: Any) -> None:
        """The last step that had drafts: a node for each row and the model's own token, the same in words."""
        said = await page.look("document.getElementById('tree-text').textContent")
        found = re.match(r"step \d+: (\d+) tokens drafted, (\d+) accepted; it said", said)
        assert found is not None, said
        rows, accepted = int(found[1]), int(found[2])
        count = "document.querySelectorAll('#tree .node.{}').length"
        kinds = {kind: await page.look(count.format(kind)) for kind in ("root", "drafted", "left", "own")}
        # The answer may have ended before a token of the model's own.
        assert kinds.pop("own") <= 1
        assert kinds == {"root": 1, "drafted": accepted, "left": rows - accepted}
        nodes = await page.look("document.querySelectorAll('#tree .node').length")
        assert await page.look("document.querySelectorAll('#tree path').length") == nodes - 1
        # No node hides another.
        boxes = await page.look(
            "[...document.querySelectorAll('#tree .node')].map((node) => "
            "{ const box = node.getBoundingClientRect(); return [box.left, box.right, box.top, box.bottom]; })"
        )
        for at, (left, right, top, bottom) in enumerate(boxes):
            for other in boxes[at + 1 :]:
                assert right <= other[0] or left >= other[1] or bottom <= other[2] or top >= other[3]

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    async def test_contrast_and_labels(self, gateways: Any, tmp_path: Path, scheme: str) -> None:
        async with gateways() as gateway, browser_page(tmp_path) as page:
            await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            await page.open(gateway.url)
            await page.until("document.activeElement.id === 'message'")
            await page.write("hello")
            await page.press("Enter")
            await page.until(ANSWERED)
            await page.look(
                "document.getElementById('error').hidden = false, document.getElementById('error').textContent = 'x'"
            )
            contrasts = await page.look(_CONTRASTS)
            assert len(contrasts) > 20
            assert {name: ratio for name, ratio in contrasts if ratio < 4.5} == {}
            assert await page.look(_UNLABELLED) == []

    async def test_everything_is_reached_by_keyboard(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways() as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.activeElement.id === 'message'")
            reached = []
            for _ in range(10):
                await page.press("Tab")
                reached.append(await page.look("document.activeElement.id || document.activeElement.value || ''"))
                outlined = await page.look("getComputedStyle(document.activeElement).outlineStyle")
                assert outlined == "solid" or not reached[-1]
            assert [name for name in reached if name][:6] == ["send", "forget", "on", "tokens", "temperature", "key"]
            await page.look("document.querySelector('input[value=on]').focus()")
            await page.press("ArrowDown")
            assert await page.look("document.querySelector('input[name=drafts]:checked').value") == "off"
