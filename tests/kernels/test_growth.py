"""The kernels that grow trees do what PyTorch does, which `tests/draft/test_device_growth.py` holds to the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor

from tree_kernels import growth

WORKER = "growth_worker.py"


def check(cases: Any) -> None:
    for case in cases:
        found, expected = case["found"], case["expected"]
        for name in ("tail", "tokens", "parents"):
            assert found[name] == expected[name], name
        assert torch.tensor(found["worths"]).allclose(torch.tensor(expected["worths"]), rtol=1e-4, atol=0.0)
        for own, other in zip(found["passes"], expected["passes"], strict=True):
            # Next tokens and their parents' rows, and the children.
            assert own[:2] == other[:2] and own[3:] == other[3:]
            assert torch.tensor(own[2]).allclose(torch.tensor(other[2]), rtol=1e-4, atol=0.0, equal_nan=True)
        for (tokens, parents, scores), other in zip(found["kept"], expected["kept"], strict=True):
            assert [tokens, parents] == other[:2] and scores == pytest.approx(other[2], rel=1e-4)
    # Some levels are left out, and some of the same trees are not.
    assert {wanted for case in cases for *_, wanted in case["found"]["passes"][1:]} == {True, False}
    assert sum(len(tokens) for case in cases for tokens, _, _ in case["found"]["kept"]) > 100


def test_the_kernels_grow_the_same_trees() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


@pytest.mark.parametrize("least_mass", [0.05, 0.1, 0.3, 2.0])
def test_levels_that_hold_too_little_are_left_out_with_all_behind_them(least_mass: float) -> None:
    sequences, levels, width, growing = 3, 5, 4, 2
    device = torch.device("cpu")
    whole = growth.make_growth(sequences, levels, width, width, device)
    cut = growth.make_growth(sequences, levels, width, width, device, least_mass=least_mass)
    # The last sequence is absent, and grows nothing.
    limits = torch.tensor([[63, 63, 0], [levels] * sequences], dtype=torch.int32)
    tails = [torch.zeros(sequences, 1 + (levels - 1) * width, dtype=torch.int32) for _ in range(2)]
    generator = torch.Generator().manual_seed(5)
    ends = None
    for level in range(1, levels + 1):
        rows = sequences * (1 if level == 1 else width)
        logits = torch.randn(rows, 50, generator=generator) * 4.0
        children = growth.likeliest(logits, torch.ones(sequences), width, None)
        held = float(whole.frontier_path_probs[level % 2].sum()) / growing
        if level > 1 and ends is None and held < least_mass:
            ends = whole.first_item(level)
        for trees, tail in zip((whole, cut), tails, strict=True):
            growth.grow(trees, children, limits, level, 0.0, tail)
    ends = ends or whole.tokens.shape[1]
    assert (ends < whole.tokens.shape[1]) == (least_mass > 0.1)
    assert torch.equal(cut.path_probs[:, :ends], whole.path_probs[:, :ends])
    assert not cut.path_probs[:, ends:].any() and whole.path_probs[:growing, -width * width :].any()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mapped", [False, True])
def test_ranks_that_share_a_vocabulary_find_the_same_children(size: int, *, mapped: bool) -> None:
    rows, vocabulary, breadth = 6, 40, 12
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3.0
    temperatures, ids = torch.tensor([0.7, 1.3]), (torch.arange(vocabulary) * 3).int() if mapped else None
    draw = growth.GumbelMax(
        torch.tensor([1, 0]).int(), torch.tensor([0, 5]).int(), torch.tensor([0.9, 1.0]).double(),
        torch.tensor([0.01, 0.0]).double(), torch.tensor([5, -3]), torch.tensor([9, 11]),
    )  # fmt: skip

    def children(logits: Tensor, ranks: ThreadRank | None) -> tuple[growth.Children, growth.Children]:
        of_rows = logits, temperatures, breadth, ids
        return growth.likeliest(*of_rows, ranks), growth.gumbel_max_winners(*of_rows, draw, 2, 20, 0.9, ranks)

    whole = children(logits, None)
    parts = on_ranks(size, lambda rank: children(logits.chunk(size, dim=1)[rank.rank], rank))
    for found in parts:
        for own, first, expected in zip(found, parts[0], whole, strict=True):
            assert own.tokens.equal(expected.tokens) and own.scores.allclose(expected.scores, rtol=1e-5, atol=0.0)
            assert own.scores.equal(first.scores)


def test_few_levels_are_never_left_out() -> None:
    with pytest.raises(ValueError, match="at least three"):
        growth.make_growth(1, 2, 4, 4, torch.device("cpu"), least_mass=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_grow_the_same_trees_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))


def test_the_kernels_compile_for_a_gpu() -> None:
    """A program has 227 KB of shared memory, which what is counted for many items could outgrow."""
    pytest.importorskip("triton")
    needed = compiled("growth_compiling_worker.py")
    assert len(needed) > 8 and max(needed.values()) < 227 << 10
