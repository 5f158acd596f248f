"""The examples of docs/gateway.md, run as they stand."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from waits import HUNG_SECONDS

from outrider_gateway.config import GatewayConfig

PAGE = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
ADDRESS = "127.0.0.1:8000"
SERVED = {"name": "smollm2-135m-instruct"}


def example(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None and ADDRESS in found[1]
    return found[1]


async def run(gateway: Any, *command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(word.replace(ADDRESS, gateway.server.address) for word in command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert process.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(gateways: Any) -> None:
    async with gateways(served=SERVED) as gateway:
        script = example("bash").replace("curl ", "curl --fail-with-body --write-out '\\n' ")
        out = await run(gateway, "bash", "-e", "-c", script)
    whole = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [answer["object"] for answer in whole] == ["list", "chat.completion", "text_completion"]
    assert len(whole[2]["choices"]) == 2
    parts = [line.removeprefix("data: ") for line in out.splitlines() if line.startswith("data: ")]
    assert parts[-1] == "[DONE]"
    assert json.loads(parts[-2])["usage"]["completion_tokens"] == 32
    assert json.loads(parts[1])["outrider"]["pieces"]
    assert len(example("bash").splitlines()) <= 10


async def test_python(gateways: Any) -> None:
    async with gateways(served=SERVED) as gateway:
        said = await run(gateway, sys.executable, "-c", example("python"))
    assert len(said) == 32


def test_limits_are_the_settings() -> None:
    config = GatewayConfig()
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| ([\d.]+)", PAGE, re.MULTILINE))
    assert len(rows) == 10
    for flag, value in rows.items():
        setting = getattr(config, flag.replace("-", "_"))
        assert setting == float(value) * (2**20 if flag.endswith("-bytes") else 1)
