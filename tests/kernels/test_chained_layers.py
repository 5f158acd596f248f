"""Whole decoders by the kernels, of which each layer's form reads what the one before carries to it: interpreted on a
CPU. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_worker import INTERPRETED, work

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return work("../chained_layers_worker.py", **INTERPRETED)


def test_passes_are_those_of_plain_layers(found: dict[str, Any]) -> None:
    """Of one row, of a tile's rows at most, and of more; in fp32 to rounding."""
    assert len(found) > 10
    wrong: dict[str, float] = {}
    for name, case in found.items():
        tolerance = 2e-2 if name.startswith("half") else 5e-5
        # Written so that NaN fails.
        wrong |= {f"{name}, {rows} rows": error for rows, error in case["errors"].items() if not error <= tolerance}
    assert not wrong


def test_all_layers_with_a_form_have_one(found: dict[str, Any]) -> None:
    plain = {name: case["layers"][1] - case["layers"][0] for name, case in found.items()}
    # Values that are keys, experts beside attention, and layers that a case leaves plain.
    for name, left in plain.items():
        some = name in ("gemma4, experts", "gemma4_unified", "cohere2_moe") or "plain" in name
        assert bool(left) == some, name
