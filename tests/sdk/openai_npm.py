"""The official `openai` package of npm, installed from its lock, and a program that does one thing with it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sdk.toolchains import BUILD, HANGS
from waits import HUNG_SECONDS

SOURCE = Path(__file__).with_name("openai_npm")
INSTALLED = BUILD / "openai"


class ApiError(Exception):
    """What the package raised, field by field."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields["message"])
        self.fields = fields


def install() -> None:
    """Put the package, and the program beside it, into the build folder."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for file in SOURCE.iterdir():
        shutil.copy(file, INSTALLED)
    done = subprocess.run(
        ["npm", "ci", "--ignore-scripts"], cwd=INSTALLED, capture_output=True, text=True, timeout=HANGS, check=False
    )
    if done.returncode:
        pytest.fail(f"npm ci\n{done.stdout}{done.stderr}", pytrace=False)


@dataclass(frozen=True)
class OpenAiNpm:
    """The package as a client of the API at `base_url`."""

    base_url: str
    api_key: str = "unused"
    headers: dict[str, str] = field(default_factory=dict)

    async def run(self, case: str, endpoint: str = "chat", body: Any = None, **more: Any) -> Any:
        """What the case comes to. Raises `ApiError` with what the package raised."""
        given = {"baseURL": self.base_url, "apiKey": self.api_key, "headers": self.headers, "endpoint": endpoint}
        said = await self.script(INSTALLED / "main.js", case, given=json.dumps(given | {"body": body} | more))
        answer = json.loads(said)
        if "error" in answer:
            raise ApiError(answer["error"])
        return answer["result"]

    async def script(self, *argv: str | Path, given: str = "") -> str:
        """What a program prints that can import the package. Fails with its complaints."""
        process = await asyncio.create_subprocess_exec(
            *("node", *argv),
            cwd=INSTALLED,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, complaints = await asyncio.wait_for(process.communicate(given.encode()), HUNG_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode == 0, complaints.decode()
        return out.decode()
