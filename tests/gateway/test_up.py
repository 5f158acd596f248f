"""`outrider up --http`: target and gateway from one command."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

import httpx
import pytest
from waits import HUNG_SECONDS
from warm_python import shared_python


async def test_up_serves_http(model: str, unused_tcp_port_factory: Callable[[], int]) -> None:
    port, http = unused_tcp_port_factory(), unused_tcp_port_factory()
    # Forked, and so are the services that it starts.
    python = str(shared_python("services") / "python")
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "outrider_client.cli", "up", "--drafter", "none", "--model", model),
        *("--dtype", "float32", "--target-flags", "--threads 1", "--port", str(port), "--http", str(http)),
        *("--gateway-flags", "--allow-origin http://localhost:3000 --allow-host llm.example"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(HUNG_SECONDS):
            while b"OpenAI-compatible API at" not in said:
                line = await process.stdout.readline()
                assert line, said.decode()
                said += line
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}") as client:
                # The gateway looks at its targets every two seconds.
                while (await client.get("/health/ready")).status_code != 200:
                    await asyncio.sleep(0.1)
                asked = {"prompt": "once", "max_tokens": 4, "temperature": 0}
                answer = (await client.post("/v1/completions", json=asked)).json()
                listed = await client.get("/v1/models", headers={"origin": "http://localhost:3000"})
                named = [
                    await client.get("/health", headers={"host": host}) for host in ("llm.example", "evil.example")
                ]
            assert [one.status_code for one in named] == [200, 403]
            assert answer["usage"]["completion_tokens"] == 4
            assert listed.headers["access-control-allow-origin"] == "http://localhost:3000"
            process.send_signal(signal.SIGTERM)
            said += await process.stdout.read()
    except BaseException:
        # Its services end with it.
        process.terminate()
        raise
    assert await process.wait() == 0
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("http", "status", "message"),
    [("many", 2, "--http: 'many' is neither a port nor HOST:PORT"), ("busy", 1, "--http takes another")],
)
async def test_up_says_what_is_wrong_with_http(
    http: str, status: int, message: str, unused_tcp_port_factory: Callable[[], int]
) -> None:
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as busy:
        taken = busy.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider_client.cli", "up", "--port", str(unused_tcp_port_factory())),
            *("--http", str(taken) if http == "busy" else http),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert process.returncode == status
    assert message in said.decode()
