"""What the tests' interpreter does in place of Triton's own is the same, whatever types, shapes and numbers."""

from __future__ import annotations

import pytest
from kernel_worker import INTERPRETED, work

pytest.importorskip("triton")


def test_known_operations_are_tritons() -> None:
    found = work("known_operations_worker.py", **INTERPRETED)
    assert found["found"] > 10_000
    assert found["different"] == []
