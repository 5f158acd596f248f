"""What tests of heads and their targets share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_tiny
from draft_process import Service
from transformers import PreTrainedModel
from warm_python import shared_python, warm_executable


@pytest.fixture(scope="session")
def teacher() -> PreTrainedModel:
    """The tiny model as transformers runs it: what every output is held to, and what heads learn from."""
    model = make_tiny()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def started_in_a_moment() -> Iterator[None]:
    """What a test starts as `sys.executable` is forked from a process that has imported everything."""
    with warm_executable(shared_python("services")):
        yield


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A draft process, not started, which is gone afterwards."""
    service = Service(tmp_path)
    yield service
    if service.alive:
        service.end(signal.SIGKILL)
