"""What fails beside other tests is run once more, alone, and named; the runner's summary says how all ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings
from warm_python import shared_python

CONFTEST = """
from hypothesis import settings
pytest_plugins = ("rerun",)
settings.register_profile("long")
"""
TESTS = """
import os, pytest
from hypothesis import settings
beside = "PYTEST_XDIST_WORKER" in os.environ
@pytest.fixture
def cleaned():
    yield
    assert not beside
def test_good(): pass
def test_beside(): assert not beside
def test_cleaning(cleaned): pass
def test_profile(): assert not beside and settings.get_current_profile_name() == "long"
def test_broken(): assert os.environ["BROKEN"] == "no"
"""


@pytest.mark.parametrize(("broken", "status", "summary"), [("yes", 1, "1 failed, 4 passed"), ("no", 0, "5 passed")])
def test_what_failed_is_run_once_more(tmp_path: Path, broken: str, status: int, summary: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"BROKEN": broken, "PYTHONPATH": str(Path(__file__).parents[1])}
    python = str(shared_python("services") / "python")
    command = [python, "-m", "pytest", "-n", "1", "--rerun-failed-alone", "--hypothesis-profile", "long", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *lines, last = done.stdout.splitlines()
    assert (done.returncode, summary in last) == (status, True), done.stdout
    named = [line.rpartition("::")[2] for line in lines if line.startswith("passed only alone: a test to mend: ")]
    assert named == ["test_beside", "test_profile", "test_cleaning"]


def test_the_long_matrix_keeps_what_failed_for_that_run() -> None:
    assert settings.get_profile("others").database is not None
