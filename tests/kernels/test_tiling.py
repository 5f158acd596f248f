"""Every tiling fits an SM: a step that does not launch would end the engine."""

from __future__ import annotations

import pytest
from kernel_worker import compiled

# Of a program on an H100 or H200, as CUDA gives it.
SHARED_BYTES = 232_448


def test_every_tiling_fits_an_sm() -> None:
    pytest.importorskip("triton")
    found = compiled("tiling_worker.py")
    assert len(found) > 3
    assert sum(name.startswith("latent") for name in found) == 3
    assert {name: needed for name, needed in found.items() if needed > SHARED_BYTES} == {}
