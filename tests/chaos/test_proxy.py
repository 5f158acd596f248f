"""The bad network of the fault runs: nothing of it goes on once it is stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chaos.proxy import Proxy
from waits import HUNG_SECONDS


async def test_a_stopped_proxy_leaves_no_task(tmp_path: Path) -> None:
    """Also of a connection whose bytes are held back for longer than anybody waits."""
    arrived = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        writer.close()

    upstream = await asyncio.start_unix_server(answer, tmp_path / "upstream")
    before = asyncio.all_tasks()
    proxy = Proxy(str(tmp_path / "upstream"))
    await proxy.start()
    proxy.rate = 1.0
    _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"a" * 1000)
    await asyncio.wait_for(arrived.wait(), HUNG_SECONDS)
    await asyncio.sleep(0.05)
    await proxy.stop()
    writer.close()
    upstream.close()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
