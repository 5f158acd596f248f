"""The figures of the benchmark of streaming."""

from __future__ import annotations

import pytest

from benchmarks.serving import door
from benchmarks.serving.door import Meter, family


def test_requests_and_tokens_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s for the requests before the first token, then 3 ms for each event of two tokens."""
    used = 0.0
    monkeypatch.setattr(door, "processor_seconds", lambda _pid: used)
    meter = Meter({"target": [1]}, 2000)
    used += 2.0
    for _ in range(1000):
        used += 3e-3
        meter.add(1)
    _, joined, token, request = meter.end(10)
    assert joined == 2
    assert token["target"] == pytest.approx(1500)
    assert request["target"] == pytest.approx(200_000)


def test_a_process_is_of_its_own_family() -> None:
    assert family(1)[0] == 1
