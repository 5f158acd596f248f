"""An engine whose host is the limit, without a device: passes are launched several at once, arrivals come,
and tenants are held to what whole steps take."""

from __future__ import annotations

import argparse
import time

import pytest

from benchmarks.host.host_limit import DRAFT, LOOKUP, PLAIN, Load, engine, measure
from benchmarks.shared.virtual_clock import VirtualClock

# Of what the host does between two looks at the clock; a step has some twenty.
TICK = 5e-5


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock(TICK).install(monkeypatch)


def options(**changes: object) -> argparse.Namespace:
    usual: dict[str, object] = {"sequences": 8, "pass_ms": 0.2, "accepted": [0, 1, 2], "tenants": True}
    times = {"before": [1], "each_before": 0.1, "settle": 0.2, "seconds": 0.3}
    return argparse.Namespace(**usual | times | changes)


@pytest.mark.parametrize("mode", [PLAIN, LOOKUP, DRAFT])
def test_every_mode_makes_tokens(mode: str) -> None:
    found = measure(mode, options())
    assert found["mode"] == mode
    assert found["tokens_per_second"] > 100
    # Tenants may keep each other out of steps, and trials leave drafts out.
    assert 0 < found["sequences"] <= 8
    assert mode != PLAIN or found["with_drafts"] == 0


def test_tenants_are_held_to_whole_steps() -> None:
    """The times that the scheduler learns from add up to the time that passes, also where several passes are a step."""
    loop = engine(PLAIN, options())
    load = Load(loop, 8, tenants=True)
    for _ in range(100):
        load.step()
    learnt: list[float] = []
    owned: list[bool] = []
    passes: list[int] = []
    observe = loop.scheduler.times.observe_step

    def noted(decoding: int, reading_rows: int, seconds: float, *, own: bool = True, drafted: int = 0) -> None:
        learnt.append(seconds)
        owned.append(own)
        observe(decoding, reading_rows, seconds, own=own, drafted=drafted)

    loop.scheduler.times.observe_step = noted  # type: ignore[method-assign]
    begin = time.monotonic()
    for _ in range(200):
        load.step()
        passes.append(loop._ahead.passes if loop._ahead is not None else 1)
    assert max(passes) > 1
    # Single passes among them would stand for a tenant's own steps, were the shortest taken.
    assert not any(owned)
    assert sum(learnt) == pytest.approx(time.monotonic() - begin, rel=0.2)


def test_nothing_is_tried_where_every_drafted_row_is_verified() -> None:
    """Although passes of a twentieth of a millisecond leave the host no time."""
    loop = engine(LOOKUP, options(pass_ms=0.05, tenants=False), adaptive=False)
    load = Load(loop, 8, tenants=False)
    for _ in range(300):
        load.step()
        assert loop.gathering.controller.throughput_trial.allows_rows(8)
