"""Workers of xdist that are forked from one process that has imported the tests: by themselves, each of them imports
what these import for fifteen seconds, and rewrites their assertions for ten where no other run has."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from warm_python import COLLECTED, shared_python

from outrider_client.local.placement import visible_gpus


def pytest_configure(config: pytest.Config) -> None:
    """What tests start as `sys.executable` is the real one, in workers as elsewhere."""
    sys.executable = getattr(config, "workerinput", {}).get("executable", sys.executable)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    # Tests ask whether there is one while they are imported, and behind that no fork can use it.
    if visible_gpus():
        return
    profile = config.getoption("--hypothesis-profile", None)
    # Settings of properties are made where these are defined.
    os.environ[COLLECTED] = json.dumps([*config.args, *(["--hypothesis-profile", profile] if profile else [])])
    try:
        for spec in specs:
            spec.python = str(shared_python("workers") / "python")
    finally:
        del os.environ[COLLECTED]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # The run as `shared_python` names it here.
    node.workerinput |= {"executable": sys.executable, "testrunuid": str(os.getpid())}
