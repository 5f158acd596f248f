"""The commands of the operator's pages: every flag that they name is one of its command's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("operate.md", "troubleshooting.md")
# Flags of other programs.
FOREIGN = {"--gpus", "--index-url"}


@cache
def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "outrider_client.cli", *command, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(page: str) -> list[list[str]]:
    """Every `outrider ..` of the page's examples, lines that go on joined and comments left out."""
    blocks = re.findall(r"```\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("outrider ")]


def flags_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--") and " " not in word}


def named(command: str) -> str:
    return help_of("draft", "--drafter", "merged") if command == "draft" else help_of(command)


@pytest.mark.parametrize("command", commands("operate.md"), ids=" ".join)
def test_the_examples_flags_are_the_commands(command: list[str]) -> None:
    _, name, *words = command
    assert [flag for flag in sorted(flags_of(words)) if flag not in named(name)] == []
    for flag, service in (("--target-flags", "target"), ("--draft-flags", "draft")):
        if flag in words:
            inner = flags_of(shlex.split(words[words.index(flag) + 1]))
            assert inner and all(one in named(service) for one in inner)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_is_named_is_there(page: str) -> None:
    everywhere = "".join(map(named, ("target", "draft", "up", "bench", "generate"))) + help_of()
    found = set(re.findall(r"`(--[a-z-]+)", (DOCS / page).read_text())) - FOREIGN
    assert len(found) > 4
    assert [flag for flag in sorted(found) if flag not in everywhere] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_is_named_is_there(page: str) -> None:
    known = (DOCS / "observability.md").read_text()
    found = set(re.findall(r"`(outrider_[a-z_]+)`", (DOCS / page).read_text()))
    assert found
    assert [metric for metric in sorted(found) if metric not in known] == []
