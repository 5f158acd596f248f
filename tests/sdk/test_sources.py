"""The SDKs' sources: generated code is what the contract gives, versions are pinned, and the examples run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.v1 import target_pb2 as pb

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(600)]

CLIENTS = Path(__file__).parents[2] / "clients"


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_generated_code_is_current(toolchain: Any, tmp_path: Path) -> None:
    shutil.copy(toolchain.folder / "buf.gen.yaml", tmp_path)
    toolchain.run(*toolchain.generate, folder=tmp_path)
    generated = contents(tmp_path / toolchain.generated)
    assert generated
    assert contents(toolchain.folder / toolchain.generated) == generated


def test_npm_versions_are_pinned() -> None:
    package = json.loads((CLIENTS / "typescript" / "package.json").read_text())
    versions = package["dependencies"] | package["devDependencies"]
    assert [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    lock = json.loads((CLIENTS / "typescript" / "package-lock.json").read_text())
    installed = {name: entry for name, entry in lock["packages"].items() if name}
    assert [name for name, entry in installed.items() if "integrity" not in entry] == []
    # Addresses would tie installs to the registry that wrote the file.
    assert [name for name, entry in installed.items() if "resolved" in entry] == []


@pytest.mark.asyncio(loop_scope="session")
async def test_example_prints_the_answer(sdk: Any) -> None:
    question = pb.ChatMessage(role="user", content="Why is the sky blue?")
    answer = await sdk.run("generate", pb.GenerateRequest(chat=pb.ChatInput(messages=[question])))
    assert answer["text"]
    assert await sdk.run_example() == answer["text"]
