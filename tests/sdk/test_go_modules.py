"""The proxy that the Go client is fetched from: what is published is what is compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from sdk.go_modules import publish_sources
from sdk.toolchains import go

pytestmark = [pytest.mark.sdk]

PATH = "example.com/team/small"
# Programs that import different packages.
PROGRAM = """package main

import "os"

func main() { os.Stdout.WriteString("one") }
"""
CHANGED = """package main

import (
	"fmt"
	"strings"
)

func main() { fmt.Print(strings.ToUpper("two")) }
"""


def output(folder: Path, program: str) -> str:
    """What a program prints, published and compiled at one path like any before it."""
    source, consumer = folder / "source", folder / "consumer"
    for old in (source, consumer, folder / "proxy", folder / "modules"):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir()
    consumer.mkdir()
    (source / "go.mod").write_text(f"module {PATH}\n\ngo 1.24\n")
    (source / "main.go").write_text(program)
    version = publish_sources(PATH, "v0.1.0", source, folder / "proxy")
    environment = go().environment | {"GOPROXY": (folder / "proxy").as_uri(), "GOMODCACHE": str(folder / "modules")}
    binary = folder / "program"
    for command in (
        ("go", "mod", "init", "example.com/consumer"),
        ("go", "get", f"{PATH}@{version}"),
        ("go", "build", "-o", str(binary), PATH),
    ):
        done = subprocess.run(command, cwd=consumer, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return subprocess.run([binary], capture_output=True, text=True, check=True).stdout


def test_changed_sources_are_compiled_with_their_own_imports(tmp_path: Path) -> None:
    assert output(tmp_path, PROGRAM) == "one"
    assert output(tmp_path, CHANGED) == "TWO"


def test_same_sources_have_the_same_version(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "go.mod").write_text(f"module {PATH}\n")
    versions = [publish_sources(PATH, "v0.1.0", tmp_path / "source", tmp_path / proxy) for proxy in ("first", "second")]
    assert versions[0] == versions[1]
