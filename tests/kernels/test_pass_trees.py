"""The kernels that read a pass and write trees do what their definition does, which `tests/target/test_in_pass.py`
holds to a draft service's head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, work

from tree_kernels.node_table.layout import NODES

WORKER = "pass_trees_worker.py"


def check(cases: Any) -> None:
    drafted = 0
    for case in cases:
        found, expected = case["found"], case["expected"]
        trees, others = (torch.tensor(one.pop("tables")) for one in (found, expected))
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(value), msg=lambda m, n=name: f"{n}: {m}"
            )
        costs = torch.arange(trees.shape[1]) >= 2 + 4 * NODES
        assert torch.equal(trees[:, ~costs], others[:, ~costs])
        # A logarithm may round differently, once for each node of a path.
        assert (trees[:, costs] - others[:, costs]).abs().max() <= 8
        drafted += int((trees[:, 1] > 1).sum())
    assert drafted > 3


def test_the_kernels_do_what_their_definition_does() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_do_the_same_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))
