"""How many passes are launched at once: longer while the device waits for the host, shorter when it no longer would."""

from __future__ import annotations

import pytest

from target_service.core.sequence import MAX_PASSES
from target_service.execution.multi_step import MultiStep


def drive(multi_step: MultiStep, device: float, host: float, *, times: int = 100) -> None:
    """Strides of passes that take the device `device` seconds, and the host `host` once."""
    for _ in range(times):
        seconds = max(multi_step.passes * device, host)
        multi_step.observe_launch(multi_step.passes, seconds, seconds - host)


@pytest.mark.parametrize(
    ("device", "host", "passes"),
    [
        pytest.param(1e-3, 0.3e-3, 1, id="device-bound"),
        pytest.param(1e-3, 1.2e-3, 2, id="a-little-late"),
        pytest.param(1e-3, 3e-3, 4, id="host-bound"),
        pytest.param(1e-4, 3e-3, MAX_PASSES, id="hopeless"),
        pytest.param(6e-3, 7e-3, 1, id="too-long-to-hold-back"),
    ],
)
def test_the_stride_is_as_long_as_keeps_the_device_busy(device: float, host: float, passes: int) -> None:
    multi_step = MultiStep()
    drive(multi_step, device, host)
    assert multi_step.passes == passes


def test_the_stride_shrinks_with_the_load() -> None:
    multi_step = MultiStep()
    drive(multi_step, 1e-3, 3e-3)
    assert multi_step.passes == 4
    drive(multi_step, 1e-3, 0.2e-3)
    assert multi_step.passes == 1


def test_the_stride_stays_where_it_is_good() -> None:
    multi_step, seen = MultiStep(), set()
    drive(multi_step, 1e-3, 1.5e-3)
    for _ in range(50):
        drive(multi_step, 1e-3, 1.5e-3, times=10)
        seen.add(multi_step.passes)
    assert len(seen) == 1


def test_what_was_launched_before_a_change_says_nothing() -> None:
    multi_step = MultiStep()
    multi_step.passes = 2
    for _ in range(100):
        multi_step.observe_launch(1, 1e-3, 0.0)
    assert multi_step.passes == 2
