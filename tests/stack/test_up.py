"""`make up`: which compose it takes, what it waits for, and what it says when there is nothing to wait for."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from compose_stack import ROOT
from waits import HUNG_SECONDS

SCRIPT = ROOT / "target_service" / "stack" / "up.sh"
READY = "/stack_model_1|exited|0|0|\n/stack_target_1|running|0|0|healthy\n/stack_jaeger_1|running|0|0|"
# Says what it was called with, and what the test laid out for it. Of each look at the containers, the next file.
COMPOSE = """#!/bin/sh
echo "$0 $*" >>"$LAID/calls"
case "$*" in
  *"up "*) exit "$(cat "$LAID/up")" ;;
  *"ps "*) cat "$LAID/ids" ;;
esac
"""
DOCKER = """#!/bin/sh
case "$1" in
  info) cat "$LAID/info" >&2; [ ! -s "$LAID/info" ] ;;
  compose) shift; [ -e "$LAID/plugin" ] && exec docker-compose-plugin "$@"; exit 1 ;;
  inspect) [ $# -gt 3 ] || { echo "inspect requires at least 1 argument" >&2; exit 1; }
    set -- "$LAID"/look.*; cat "$1"; [ $# -gt 1 ] && rm "$1"; true ;;
  logs) echo "the last words of $4" ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A machine with a scripted Docker. A look at its containers is lines of NAME|STATUS|EXIT CODE|RESTARTS|HEALTH."""

    folder: Path

    def up(
        self, *flags: str, looks: Sequence[str] = (READY,), info: str = "", up: int = 0, seconds: int = 60
    ) -> tuple[int, str]:
        """The exit status and all that was printed."""
        for number, look in enumerate(looks):
            (self.folder / f"look.{number}").write_text(look + "\n")
        (self.folder / "info").write_text(info)
        (self.folder / "up").write_text(str(up))
        (self.folder / "ids").write_text("1 2\n" if looks else "")
        environment = {"PATH": str(self.folder), "LAID": str(self.folder), "OUTRIDER_UP_SECONDS": str(seconds)}
        done = subprocess.run(
            [str(SCRIPT), *flags], env=environment, capture_output=True, text=True, timeout=HUNG_SECONDS
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def calls(self) -> list[str]:
        """How compose was called, its program's name first."""
        return [Path(call).name for call in (self.folder / "calls").read_text().splitlines()]

    def program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With docker-compose 1.29, and without the plugin."""
    made = Machine(tmp_path)
    made.program("docker", DOCKER)
    made.program("docker-compose", COMPOSE)
    for name in ("bash", "sh", "cat", "rm", "sleep", "dirname", "env"):
        os.symlink(shutil.which(name) or name, tmp_path / name)
    return made


def test_debians_compose_will_do(machine: Machine) -> None:
    status, said = machine.up()
    assert (status, said) == (0, "make up: every container is healthy\n")
    assert machine.calls[0] == "docker-compose up --build --detach"


def test_the_plugin_comes_first(machine: Machine) -> None:
    machine.program("docker-compose-plugin", COMPOSE)
    (machine.folder / "plugin").touch()
    assert machine.up("--profile", "observability")[0] == 0
    assert machine.calls[1] == "docker-compose-plugin --profile observability up --build --detach"


def test_waits_for_the_last(machine: Machine) -> None:
    loading = READY.replace("healthy", "starting")
    created = READY.replace("running|0|0|healthy", "created|0|0|")
    assert machine.up(looks=(created, loading, READY))[0] == 0
    assert not (machine.folder / "look.1").exists() and len(machine.calls) == 4


@pytest.mark.parametrize(
    "state",
    ["exited|1|3|", "restarting|2|1|starting", "running|0|2|starting", "running|0|0|unhealthy", "dead|137|0|"],
)
def test_what_failed_is_shown_at_once(machine: Machine, state: str) -> None:
    status, said = machine.up(looks=(READY.replace("running|0|0|healthy", state),))
    assert status == 1
    assert "the last words of stack_target_1" in said and "stack_model_1" not in said
    assert "make up: failed: stack_target_1" in said


def test_a_failure_of_compose_is_explained(machine: Machine) -> None:
    """Compose itself gives a container's number and its exit status."""
    status, said = machine.up(looks=(READY.replace("exited|0", "exited|1"),), up=1)
    assert status == 1 and "the last words of stack_model_1" in said


def test_an_image_that_cannot_be_built_is_not_explained_away(machine: Machine) -> None:
    """No container is made then; what compose said is the reason, and nothing else stands below it."""
    status, said = machine.up(looks=(), up=1)
    assert status == 1 and said == "make up: `docker-compose up` failed, and says above why\n"


def test_does_not_wait_for_ever(machine: Machine) -> None:
    status, said = machine.up(looks=(READY.replace("healthy", "starting"),), seconds=1)
    assert status == 1 and "not healthy after 1 s: stack_target_1" in said


def test_there_is_one_look_however_long_building_took(machine: Machine) -> None:
    status, said = machine.up(looks=(READY,), seconds=0)
    assert status == 0 and said == "make up: every container is healthy\n"


def test_a_daemon_that_does_not_run(machine: Machine) -> None:
    status, said = machine.up(info="Cannot connect to the Docker daemon. Is it running?")
    assert status == 1 and len(said.splitlines()) == 2
    assert "Cannot connect to the Docker daemon" in said and "in the group docker" in said


@pytest.mark.parametrize(("missing", "hint"), [("docker", "docker.io"), ("docker-compose", "docker-compose-plugin")])
def test_what_is_not_installed_is_named(machine: Machine, missing: str, hint: str) -> None:
    (machine.folder / missing).unlink()
    status, said = machine.up()
    assert status == 1 and len(said.splitlines()) <= 2 and hint in said


def test_make_up_runs_it() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "up", "PROFILE=observability"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OUTRIDER_OTLP_ENDPOINT=http://jaeger:4317" in done.stdout
    assert done.stdout.split()[-3:] == ["target_service/stack/up.sh", "--profile", "observability"]
