"""How many passes are launched at once: longer while the device waits for the host, shorter when it no longer would."""

from __future__ import annotations

import pytest

from target_service.core.sequence import MAX_STRIDE
from target_service.execution.multi_step import Stride


def drive(stride: Stride, device: float, host: float, *, times: int = 100) -> None:
    """Strides of passes that take the device `device` seconds, and the host `host` once."""
    for _ in range(times):
        seconds = max(stride.passes * device, host)
        stride.observe(stride.passes, seconds, seconds - host)


@pytest.mark.parametrize(
    ("device", "host", "passes"),
    [
        pytest.param(1e-3, 0.3e-3, 1, id="device-bound"),
        pytest.param(1e-3, 1.2e-3, 2, id="a-little-late"),
        pytest.param(1e-3, 3e-3, 4, id="host-bound"),
        pytest.param(1e-4, 3e-3, MAX_STRIDE, id="hopeless"),
        pytest.param(6e-3, 7e-3, 1, id="too-long-to-hold-back"),
    ],
)
def test_the_stride_is_as_long_as_keeps_the_device_busy(device: float, host: float, passes: int) -> None:
    stride = Stride()
    drive(stride, device, host)
    assert stride.passes == passes


def test_the_stride_shrinks_with_the_load() -> None:
    stride = Stride()
    drive(stride, 1e-3, 3e-3)
    assert stride.passes == 4
    drive(stride, 1e-3, 0.2e-3)
    assert stride.passes == 1


def test_the_stride_stays_where_it_is_good() -> None:
    stride, seen = Stride(), set()
    drive(stride, 1e-3, 1.5e-3)
    for _ in range(50):
        drive(stride, 1e-3, 1.5e-3, times=10)
        seen.add(stride.passes)
    assert len(seen) == 1


def test_what_was_launched_before_a_change_says_nothing() -> None:
    stride = Stride(2)
    for _ in range(100):
        stride.observe(1, 1e-3, 0.0)
    assert stride.passes == 2
