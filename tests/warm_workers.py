"""Workers of xdist that are forked from one process that has imported what tests import: by themselves, each of them
imports it for fifteen seconds."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from warm_python import shared_python


def pytest_configure(config: pytest.Config) -> None:
    """What tests start as `sys.executable` is the real one, in workers as elsewhere."""
    sys.executable = getattr(config, "workerinput", {}).get("executable", sys.executable)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs:
        spec.python = str(shared_python("workers") / "python")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # The run as `shared_python` names it here.
    node.workerinput |= {"executable": sys.executable, "testrunuid": str(os.getpid())}
