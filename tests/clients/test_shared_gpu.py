"""Where `outrider up` runs a draft whose network is on the target's GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from supervised import SECONDS

# `outrider up` on a machine with so many GPUs, and services that are none.
_UP = """
import sys
from supervised import SERVICE
from outrider_client.cli import main, services
gpus, sys.argv = int(sys.argv[1]), ["outrider", *sys.argv[2:]]
services.visible_gpus = lambda: gpus
services.module_command = lambda name, *flags: (
    sys.executable, "-c", SERVICE, flags[1], " ".join(("hello from", name, *flags))
)
sys.exit(main())
"""


async def up(python: str, gpus: int, words: tuple[str, ...], port: int, *, draft: bool = False) -> str:
    """What `outrider up` says until it is ready, and its draft service too if there is to be one, and stopped."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", _UP, str(gpus), "up", "--port", str(port), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    said = ""
    async with asyncio.timeout(SECONDS):
        # The target may be ready before its draft has said a word.
        while "| ready on" not in said or (draft and "hello from draft_service" not in said):
            line = await process.stdout.readline()
            assert line, said
            said += line.decode()
        process.send_signal(signal.SIGTERM)
        said += (await process.stdout.read()).decode()
    assert await process.wait() == 0
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (1, ("--drafter", "trie")),
        (1, ("--drafter", "none")),
        (1, ("--drafter", "merged", "--draft-flags", "--device cuda:0")),
        (2, ("--drafter", "model")),
        (0, ("--drafter", "merged")),
    ],
    ids=["trie", "none", "user-placed", "two", "cpu"],
)
async def test_other_drafts_are_services(gpus: int, words: tuple[str, ...], python: str, unused_tcp_port: int) -> None:
    drafts = "none" not in words
    said = await up(python, gpus, words, unused_tcp_port, draft=drafts)
    assert ("hello from draft_service" in said) == drafts
    assert "shares" not in said and "inprocess" not in said


async def test_a_draft_on_the_targets_gpu_runs_in_its_process(
    tmp_path: Path, python: str, unused_tcp_port: int
) -> None:
    """With the flags and the file that a service would have had."""
    file = tmp_path / "outrider.toml"
    file.write_text('[draft]\ndrafter = "model"\n')
    words = ("--config", str(file), "--draft-flags", "--topk 4 --head 'my head'")
    said = await up(python, 1, words, unused_tcp_port)
    assert "hello from draft_service" not in said and "with the draft in its process" in said
    assert "--draft inprocess:model --device cuda:0 --cuda-graphs --topk 4 --head 'my head' --config" in said
    assert "which it shares with the target, in its process\n" in said


@pytest.mark.parametrize("gpus", [1, 2])
async def test_a_head_drafts_in_the_targets_passes(gpus: int, python: str, unused_tcp_port: int) -> None:
    said = await up(python, gpus, ("--drafter", "merged", "--draft-flags", "--head 'my head'"), unused_tcp_port)
    assert "hello from draft_service" not in said
    assert "--draft inpass:merged --device cuda:0 --cuda-graphs --head 'my head'" in said
    assert "the head drafts in its passes\n" in said


async def test_a_draft_with_an_address_stays_a_service(tmp_path: Path, python: str, unused_tcp_port: int) -> None:
    words = ("--drafter", "merged", "--draft-listen", f"unix:{tmp_path / 'draft.sock'}")
    said = await up(python, 1, words, unused_tcp_port, draft=True)
    assert "hello from draft_service" in said and "inprocess" not in said
    assert "which it shares with the target\n" in said
