"""The chat page: what is served, and in headless Chromium what a person meets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser_page
from scripted_engine import ScriptedEngine, WritingEngine
from scripted_service import byte_tokenizer, model_tokenizer

import outrider_gateway.page as page_package
from outrider_gateway.page import FILES

ANSWERED = "document.querySelector('.answer .markdown')?.textContent.length > 20"
DONE = "document.getElementById('stop').disabled && document.querySelector('.answer') !== null"
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
# The server's answer while it loads a model, once.
_LOADING = """
const real = window.fetch;
const loading = JSON.stringify({ error: { message: "the model is being loaded" } });
let asked = 0;
window.fetch = async (...of) =>
  asked++ ? real(...of) : new Response(loading, { status: 503, headers: { "retry-after": "0.2" } });
"""
LONG = {"max_context": 4096}
HOSTILE = """## Title

**bold** <img src=x onerror="document.title='bad'"> <script>document.title='bad'</script>

- [good](https://example.com/)
- [bad](javascript:document.title='bad')

| a |
|---|
| <style>*{display:none}</style> |
| ![x](https://example.com/track.png) |

```python
print("<b>hi</b>")
```
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
        assert "require-trusted-types-for 'script'" in policy
        if "vendor" not in path:
            addresses = set(re.findall(r"https?://[^\s\"']+", answer.text)) - {"http://www.w3.org/2000/svg"}
            assert addresses == set()


async def test_every_script_is_served(gateway: Any) -> None:
    """A module that is imported and not served would leave the page without a script."""
    served = {path.removeprefix("/page/") for path in FILES}
    for path in (path for path in FILES if path.endswith(".js")):
        folder = path.removeprefix("/page/").rpartition("/")[0]
        for name in re.findall(r'^import .* from "\./(.*)";$', (await gateway.http.get(path)).text, re.MULTILINE):
            assert f"{folder}/{name}".removeprefix("/") in served


async def test_libraries_are_the_versions_of_their_table(gateway: Any) -> None:
    table = (Path(page_package.__file__).parent / "vendor" / "README.md").read_text()
    for name, package in (("marked", "marked"), ("purify", "dompurify")):
        (version,) = re.findall(rf"`{package}` ([\d.]+)", table)
        banner = (await gateway.http.get(f"/page/vendor/{name}.js")).text[:400]
        assert re.search(rf"{package} v?{re.escape(version)}\b", banner, re.IGNORECASE)


async def test_page_can_be_left_out(gateways: Any) -> None:
    async with gateways(page=False) as gateway:
        assert (await gateway.http.get("/")).status_code == 404


def _writing(text: str, tick: float = 0.001) -> WritingEngine:
    return WritingEngine([3 + byte for byte in text.encode()], tick)


def _text(token_ids: Sequence[int]) -> str:
    return byte_tokenizer().decode(token_ids, skip_special_tokens=True)


class TestInBrowser:
    pytestmark = in_browser

    async def test_loads_and_streams(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways(ScriptedEngine(tick=0.02)) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.getElementById('served').textContent === 'drafter trie'")
            assert await page.look("document.activeElement.id") == "message"
            assert not await page.look("document.getElementById('prediction').disabled")
            await page.look("document.getElementById('tokens').value = 60")
            await page.look(_KEEP_FIGURES)
            await page.write("hello")
            await page.press("Enter")
            await page.until("document.querySelector('.answer .markdown')?.textContent.length > 5")
            assert not await page.look("document.getElementById('stop').disabled")
            assert await page.look("document.querySelector('.answer .pieces').textContent.length") < 60
            await page.until(DONE)
            assert len(await page.look("document.querySelector('.answer .pieces').textContent")) == 60
            assert await page.look("document.querySelector('#row-on td').textContent") != "\u2013"
            figures = await page.look("figures")
            assert figures and not [said for said in figures if "NaN" in said or "Infinity" in said]
            assert page.complaints == []
            assert all(address.startswith(gateway.url) for address in page.requests)
            assert await page.look("document.querySelector('#model').selectedOptions[0].text") == "counter"

    async def test_escape_cancels(self, gateways: Any, tmp_path: Path) -> None:
        engine = ScriptedEngine(tick=0.02)
        async with gateways(engine) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.until("document.activeElement.id === 'message'")
            for stopped_by in ("key", "button"):
                before = len(engine.cancelled)
                await page.write("hello")
                await page.press("Enter")
                await page.until(
                    f"document.querySelectorAll('.answer').length > {before} && "
                    "[...document.querySelectorAll('.answer .markdown')].at(-1).textContent.length > 3"
                )
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
            # It can be mended and sent again.
            assert await page.look("document.getElementById('message').value") == ("long " * 100).strip()
            assert await page.look("document.querySelectorAll('.turn').length") == 0
            await page.look("document.getElementById('message').value = ''")
            await page.write("short")
            await page.press("Enter")
            await page.until(ANSWERED)
            assert await page.look("document.getElementById('error').hidden")
            await page.until(DONE)
            # The answer that is there still shows by whom its tokens were made.
            made = "document.querySelectorAll('.pieces .own, .pieces .drafted').length"
            before = await page.look(made)
            await page.write("long " * 100)
            await page.press("Enter")
            await page.until("!document.getElementById('error').hidden")
            assert await page.look(made) == before > 0
            assert await page.look("document.querySelectorAll('.turn').length") == 2

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
            await page.look("document.getElementById('drafts-view').click()")
            await page.look("document.querySelector('input[value=both]').click()")
            await page.look("document.getElementById('message').focus()")
            await page.write("say something")
            await page.press("Enter")
            await page.until("document.getElementById('compared').textContent === 'Both answers are the same.'")
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
            for button in ("drafts-view", "settings-view"):
                await page.look(f"document.getElementById('{button}').click()")
            await page.look("document.getElementById('message').focus()")
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
            for button in ("drafts-view", "settings-view"):
                await page.look(f"document.getElementById('{button}').click()")
            reached = []
            for _ in range(14):
                await page.press("Tab")
                reached.append(await page.look("document.activeElement.id || document.activeElement.value || ''"))
                outlined = await page.look("getComputedStyle(document.activeElement).outlineStyle")
                assert outlined == "solid" or not reached[-1]
            wanted = {"send", "on", "drafts-view", "settings-view", "delete", "system", "tokens", "temperature", "key"}
            assert wanted <= set(reached), reached
            await page.look("document.querySelector('input[value=on]').focus()")
            await page.press("ArrowDown")
            assert await page.look("document.querySelector('input[name=drafts]:checked').value") == "off"

    async def test_drafts_are_one_click_away(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways() as gateway, browser_page(tmp_path) as page:
            await self._ask(page, gateway, "hello")
            assert await self._visible(page, ".answer .markdown") and not await self._visible(page, ".answer .pieces")
            assert not await self._visible(page, "#figures")
            await page.look("document.getElementById('drafts-view').click()")
            assert await self._visible(page, ".answer .pieces") and not await self._visible(page, ".answer .markdown")
            assert await self._visible(page, "#figures")

    async def test_answers_are_markdown_without_what_could_harm(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways(_writing(HOSTILE), served=LONG) as gateway, browser_page(tmp_path) as page:
            await self._ask(page, gateway, "hello")
            assert await page.look("document.querySelector('.markdown h2').textContent") == "Title"
            assert await page.look("document.querySelector('.markdown strong').textContent") == "bold"
            assert await page.look("document.querySelectorAll('.markdown li').length") == 2
            assert await page.look("document.querySelectorAll('.markdown td').length") == 2
            codes = "[...document.querySelectorAll('.markdown .code')].map((code) => code.innerText.split(/\\n+/))"
            assert await page.look(codes) == [["python", "Copy code", 'print("<b>hi</b>")']]
            links = "[...document.querySelectorAll('.markdown a')].map((a) => [a.textContent, a.getAttribute('href')])"
            assert await page.look(links) == [["good", "https://example.com/"], ["bad", None]]
            assert await page.look("document.querySelector('.markdown a').rel") == "noopener noreferrer nofollow"
            harmful = ":is(img, script, style, iframe, form, input, svg, [onerror], [style])"
            assert await page.look(f"document.querySelectorAll('#log {harmful}').length") == 0
            assert "<img src=x onerror=" in await page.look("document.querySelector('.markdown').textContent")
            assert await page.look("document.title") == "Outrider chat"
            assert page.complaints == [] and all(address.startswith(gateway.url) for address in page.requests)

    async def test_calls_and_reasoning_are_shown_as_such(self, gateways: Any, tmp_path: Path) -> None:
        tokenizer = model_tokenizer()
        tokenizer.chat_template += '{# <tool_call> "arguments" </think> tools #}'
        call = '<tool_call>\n{"name": "add", "arguments": {"x": [1, "<b>"]}}\n</tool_call>'
        engine = _writing(f"<think>hm</think>Look:\n{call}")
        async with gateways(engine, served={**LONG, "tokenizer": tokenizer}) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.look("document.getElementById('tools').value = '[{\"type\": \"function\", "
                            "\"function\": {\"name\": \"add\"}}]'")  # fmt: skip
            await self._ask(page, gateway, "hello", opened=True)
            shown = await page.look("document.querySelector('.calls .code').innerText.split(/\\n+/)")
            assert shown == ["calls add", "Copy code", "{", '  "x": [', "    1,", '    "<b>"', "  ]", "}"]
            assert await page.look("document.querySelector('.reasoning .text').textContent") == "hm"
            assert (await page.look("document.querySelector('.markdown').textContent")).strip() == "Look:"
            await self._ask(page, gateway, "and", opened=True, answers=2)
            # The calls are a part of the conversation, each with a result.
            assert "[tool]not run" in _text(engine.requests[-1].token_ids)
            assert page.complaints == []

    async def test_an_answer_of_json_is_shown_as_such(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways(_writing('{"a": 1}'), served=LONG) as gateway, browser_page(tmp_path) as page:
            await self._ask(page, gateway, "hello")
            assert await page.look("document.querySelector('.markdown pre').textContent") == '{\n  "a": 1\n}'

    async def test_code_is_copied(self, gateways: Any, tmp_path: Path) -> None:
        async with gateways(_writing("```\na = 1\n```\n")) as gateway, browser_page(tmp_path) as page:
            await self._ask(page, gateway, "hello")
            await page.look("navigator.clipboard.writeText = async (text) => void (window.copied = text)")
            await page.look("document.querySelector('.code button').click()")
            assert await page.until("window.copied") == "a = 1"
            await page.until("document.querySelector('.code button').textContent === 'Copied'")

    async def test_conversation_is_kept_until_it_is_deleted(self, gateways: Any, tmp_path: Path) -> None:
        engine = _writing("an **answer**")
        async with gateways(engine) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.look("document.getElementById('system').value = 'be short'")
            await page.look("document.getElementById('system').dispatchEvent(new Event('change'))")
            await self._ask(page, gateway, "first", opened=True)
            await page.open(gateway.url + "/?again")
            await page.until("document.querySelector('.answer strong')?.textContent === 'answer'")
            assert await page.look("document.getElementById('system').value") == "be short"
            await self._ask(page, gateway, "second", opened=True, answers=2)
            prompt = _text(engine.requests[-1].token_ids)
            assert prompt == "[system]be short[user]first[assistant]an **answer**[user]second[assistant]"
            await page.look("document.getElementById('delete').click()")
            assert await page.look("document.querySelectorAll('.turn').length") == 0
            await page.open(gateway.url + "/?later")
            await page.until("document.activeElement.id === 'message'")
            assert await page.look("document.querySelectorAll('.turn').length") == 0

    async def test_deleted_while_it_is_answered(self, gateways: Any, tmp_path: Path) -> None:
        engine = ScriptedEngine(tick=0.02)
        async with gateways(engine) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            await page.write("hello")
            await page.press("Enter")
            await page.until("document.querySelector('.answer .markdown')?.textContent.length > 3")
            await page.look("document.getElementById('delete').click()")
            await page.until("document.getElementById('stop').disabled")
            assert await page.look("document.querySelectorAll('.turn').length") == 0
            assert await page.look("JSON.parse(localStorage['outrider.conversation']).messages") == []
            assert await page.look("document.getElementById('error').hidden")

    async def test_regenerates_and_edits(self, gateways: Any, tmp_path: Path) -> None:
        engine = _writing("fine")
        async with gateways(engine) as gateway, browser_page(tmp_path) as page:
            await self._ask(page, gateway, "one")
            await self._ask(page, gateway, "two", opened=True, answers=2)
            await self._click(page, ".answer", 0, "Regenerate")
            await page.until(f"{DONE} && document.querySelectorAll('.turn').length === 2")
            assert _text(engine.requests[-1].token_ids) == "[user]one[assistant]"
            await self._click(page, ".question", 0, "Edit")
            assert await page.look("document.getElementById('message').value") == "one"
            # Left as it was.
            await page.press("Escape")
            assert await page.look("document.getElementById('message').value") == ""
            await self._click(page, ".question", 0, "Edit")
            await page.write("!")
            await page.press("Enter")
            await page.until(f"{DONE} && document.querySelectorAll('.turn').length === 2")
            await gateway.idle()
            assert _text(engine.requests[-1].token_ids) == "[user]one![assistant]"

    async def test_shows_that_it_works_before_the_first_token(self, gateways: Any, tmp_path: Path) -> None:
        engine = ScriptedEngine()
        async with gateways(engine) as gateway, browser_page(tmp_path) as page:
            await page.open(gateway.url)
            engine.paused.set()
            await page.write("hello")
            await page.press("Enter")
            await page.until("document.querySelector('.answer .working')?.checkVisibility()")
            engine.paused.clear()
            await page.until(ANSWERED)
            assert await page.look("document.querySelector('.working')") is None

    async def test_does_not_jump_while_one_reads_back(self, gateways: Any, tmp_path: Path) -> None:
        engine = _writing("line\n\n" * 120, tick=0.005)
        async with gateways(engine, served=LONG) as gateway, browser_page(tmp_path, "600,500") as page:
            await page.open(gateway.url)
            await page.write("hello")
            await page.press("Enter")
            log = "document.getElementById('log')"
            # The end is followed while it is in sight.
            await page.until(f"{log}.scrollTop > 100")
            engine.paused.set()
            # Again, where text that was under way has brought the end back before the page saw it.
            await page.until(f"({log}.scrollTop = 10, !document.getElementById('newest').hidden)")
            height = await page.look(f"{log}.scrollHeight")
            engine.paused.clear()
            await page.until(f"{log}.scrollHeight > {height} + 200")
            assert await page.look(f"{log}.scrollTop") == 10
            await page.look("document.getElementById('newest').click()")
            await page.until(f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 2")

    async def test_asks_for_a_thousand_tokens(self, gateways: Any, tmp_path: Path) -> None:
        engine = _writing("fine")
        async with gateways(engine, served=LONG) as gateway, browser_page(tmp_path) as page:
            await self._ask(page, gateway, "hello")
            assert engine.requests[0].max_tokens == 1024

    async def test_waits_for_a_model_that_is_being_loaded(self, gateway: Any, tmp_path: Path) -> None:
        async with browser_page(tmp_path) as page:
            await page.call("Page.addScriptToEvaluateOnNewDocument", source=_LOADING)
            await page.open(gateway.url)
            await page.until("document.getElementById('served').textContent === 'the model is being loaded'")
            await page.until("document.getElementById('served').textContent === 'drafter trie'")

    async def _ask(self, page: Any, gateway: Any, text: str, *, opened: bool = False, answers: int = 1) -> None:
        """Send a message, and wait for the end of its answer."""
        if not opened:
            await page.open(gateway.url)
        await page.until("document.getElementById('served').textContent === 'drafter trie'")
        await page.look("document.getElementById('message').focus()")
        await page.write(text)
        await page.press("Enter")
        await page.until(f"{DONE} && document.querySelectorAll('.answer').length === {answers}")

    async def _click(self, page: Any, turn: str, index: int, label: str) -> None:
        found = f"[...document.querySelectorAll('{turn}')][{index}].querySelectorAll('button')"
        await page.look(f"[...{found}].find((button) => button.textContent === '{label}').click()")

    async def _visible(self, page: Any, selector: str) -> bool:
        return bool(await page.look(f"document.querySelector('{selector}').checkVisibility()"))
