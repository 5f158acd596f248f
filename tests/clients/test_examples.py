"""The examples of the README and of clients/python, run as they stand against a real server."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_ADDRESS = "127.0.0.1:50051"


def _readme_example() -> str:
    found = re.search(r"```python\n(.*?)```", (_ROOT / "clients/README.md").read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


async def _run(source: str, address: str) -> str:
    assert _ADDRESS in source
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        source.replace(_ADDRESS, address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.parametrize(
    "source",
    [_readme_example(), (_ROOT / "clients/python/generate.py").read_text()],
    ids=["readme", "generate"],
)
async def test_ten_lines_stream_an_answer(running: Any, source: str) -> None:
    assert (await _run(source, running.address)).startswith("one two three four")


async def test_client_that_drafts_for_itself(running: Any) -> None:
    out = await _run((_ROOT / "clients/python/verify.py").read_text(), running.address)
    # The first guess is what followed 100 where it stood before.
    assert out.splitlines() == ["step 0: 5 guesses kept", "step 1: 0 guesses kept", "step 2: 0 guesses kept"]
