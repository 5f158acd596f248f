"""A page in headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from waits import HUNG_SECONDS
from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowDown": 40}


class Page:
    """One tab. `requests` are the addresses that it asked for, `complaints` what its console was told."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        return await asyncio.wait_for(self._waiting[number], HUNG_SECONDS)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def look(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until the expression is true, and return its value."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HUNG_SECONDS):
                while not (value := await self.look(expression)):
                    await asyncio.sleep(0.02)
                return value
        raise AssertionError(f"never true: {expression}; the page says {await self.look('document.body.innerText')}")

    async def press(self, key: str, modifiers: int = 0) -> None:
        """A key, down and up."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if key == " " else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    async def write(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def picture(self) -> bytes:
        """A PNG of what is shown."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for text in self._connection:
            message = json.loads(text)
            if (number := message.get("id")) is not None:
                waiting = self._waiting.pop(number)
                if "error" in message:
                    waiting.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    waiting.set_result(message["result"])
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))


@contextlib.asynccontextmanager
async def browser_page(folder: Path, size: str = "1200,800") -> AsyncIterator[Page]:
    """A browser with one empty tab; `folder` is for its profile."""
    assert CHROMIUM is not None
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *flags, f"--window-size={size}", "--remote-debugging-port=0", f"--user-data-dir={folder}"),
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(HUNG_SECONDS):
            while not (port := _port(folder)):
                await asyncio.sleep(0.05)
            async with connect(f"ws://127.0.0.1:{port[0]}{port[1]}") as whole:
                await whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(await whole.recv())["result"]["targetInfos"]
                tab = next(target["targetId"] for target in targets if target["type"] == "page")
        async with connect(f"ws://127.0.0.1:{port[0]}/devtools/page/{tab}", max_size=2**26) as connection:
            page = Page(connection)
            try:
                yield page
            finally:
                await page.close()
    finally:
        process.kill()
        await process.wait()


def _port(folder: Path) -> list[str]:
    """Port and path of the protocol, once the browser has written both."""
    try:
        lines = (folder / "DevToolsActivePort").read_text().splitlines()
    except FileNotFoundError:
        return []
    return lines if len(lines) == 2 else []
