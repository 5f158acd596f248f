"""The launch that attends for a level of trees does what its definition does, and that what attention over whole tails
does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work
from tail_levels import CASES, inputs_of, levels_of

from tree_kernels.attention import AttentionBatch, AttentionVariant, TreeAttention
from tree_kernels.level_attention import LevelAttention

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_a_level_is_a_part_of_its_tails(name: str) -> None:
    case = CASES[name]
    for level in levels_of(case, CPU):
        query, keys, *others = inputs_of(case, level, CPU)
        found = LevelAttention(CPU).run(level, query, keys, *others)
        width = level.end - level.first
        for b, (start, end) in enumerate(pairwise(level.query_starts.tolist())):
            if start == end:
                continue
            # The tail up to the level, of which these rows come last.
            prefix, begin = int(level.prefix_lengths[b]), int(level.page_starts[b])
            batch = AttentionBatch(
                (0, level.end), (prefix,), (tuple(level.page_table[begin:].tolist()),), case.page_size,
                (tuple(level.parents[b, : level.end].tolist()),),
            )  # fmt: skip
            queries = query.new_zeros(level.end, *query.shape[1:])
            queries[-width:] = query[b * width : (b + 1) * width]
            attention = TreeAttention("reference")
            expected = attention.run(attention.plan(batch), queries, keys, *others)[-width:]
            torch.testing.assert_close(found[b * width : (b + 1) * width], expected, rtol=1e-5, atol=1e-5)


def check(errors: dict[str, float]) -> None:
    """fp32 agrees to rounding, half precision to its own. Written so that NaN fails."""
    assert errors.keys() == CASES.keys()
    assert {name: error for name, error in errors.items() if not error <= (2e-3 if "half" in name else 2e-6)} == {}


def test_the_launch_does_what_is_defined() -> None:
    pytest.importorskip("triton")
    check(work("level_attention_worker.py", **INTERPRETED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_launch_does_what_is_defined_on_a_gpu() -> None:
    check(work("level_attention_worker.py", TRITON_INTERPRET="0"))


def test_what_has_no_launch_is_not_taken() -> None:
    levels = LevelAttention(CPU)
    levels._launched = object()  # type: ignore[assignment]
    assert levels.takes(64, AttentionVariant(score_cap=2.0), 256)
    assert not levels.takes(65, AttentionVariant(), 128)
    assert not levels.takes(9, AttentionVariant(window=64), 128)
    assert not levels.takes(9, AttentionVariant(slopes=torch.ones(4)), 128)
    assert not levels.takes(9, AttentionVariant(), 512)
    assert not LevelAttention(CPU).takes(9, AttentionVariant(), 128)


def test_every_tiling_fits_an_sm() -> None:
    pytest.importorskip("triton")
    needed = compiled("level_attention_compiling_worker.py")
    assert len(needed) > 3 and max(needed.values()) <= 227 << 10
