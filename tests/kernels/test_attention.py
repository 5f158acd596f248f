"""Backends against the reference, and the reference against a loop over rows and keys."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from tree_kernels.attention import AttentionBatch, TreeAttention, ancestor_mask

pytestmark = pytest.mark.pairs

# Prefix, rows, kind of each sequence.
BATCHES: dict[str, list[tuple[int, int, str]]] = {
    "decode": [(37, 1, "tree")],
    "first token": [(0, 1, "causal")],
    "prefill": [(0, 33, "causal")],
    "chunk": [(29, 18, "causal")],
    "tree": [(51, 17, "tree")],
    "tree at the start": [(0, 9, "tree")],
    "two words": [(5, 70, "tree")],
    "largest": [(3, 256, "tree")],
    "star": [(16, 64, "star")],
    "ragged": [(3, 1, "tree"), (47, 16, "tree"), (0, 21, "causal"), (63, 5, "chain"), (130, 3, "causal")],
    "with empty sequences": [(11, 0, "tree"), (7, 2, "chain"), (0, 0, "causal")],
    "decode batch": [(n, 1, "tree") for n in (1, 15, 16, 17, 200)],
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
    # Written so that NaN fails.
    assert float(error) <= tolerance


def run(backend: Any, case: Any) -> torch.Tensor:
    attention = TreeAttention(backend, case.query.device)
    return attention.run(attention.plan(case.batch), case.query, case.key_cache, case.value_cache, case.scale)


@pytest.mark.parametrize("specs", BATCHES.values(), ids=BATCHES)
def test_the_reference_is_softmax_over_the_visible_keys_of_each_row(attention_case: Any, specs: Any) -> None:
    case = attention_case(specs, width=8, value_width=5)
    actual = run("reference", case)
    batch = case.batch
    for b in range(batch.sequences):
        mask = ancestor_mask(batch.parents[b], batch.row_counts[b])
        for r in range(batch.row_counts[b]):
            visible = [*range(batch.prefix_lengths[b])]
            visible += [batch.prefix_lengths[b] + j for j in mask[r].nonzero()[:, 0].tolist()]
            places = [(batch.pages[b][k // batch.page_size], k % batch.page_size) for k in visible]
            row = batch.query_starts[b] + r
            for head in range(4):
                key = torch.stack([case.key_cache[page, offset, head // 2] for page, offset in places])
                value = torch.stack([case.value_cache[page, offset, head // 2] for page, offset in places])
                probs = (key @ case.query[row, head] * case.scale).softmax(0)
                torch.testing.assert_close(actual[row, head], probs @ value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shuffled", [False, True], ids=["consecutive", "shuffled"])
@pytest.mark.parametrize("specs", BATCHES.values(), ids=BATCHES)
def test_torch_equals_the_reference_on_ragged_batches(
    attention_case: Any, specs: Any, shuffled: bool, page_size: int
) -> None:
    case = attention_case(specs, page_size=page_size, shuffled=shuffled)
    assert_close(run("torch", case), run("reference", case), 1e-5)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (96, 96), (128, 128), (96, 64), (24, 40)])
def test_torch_equals_the_reference_for_any_heads_and_widths(
    attention_case: Any, group: int, width: int, value_width: int
) -> None:
    case = attention_case(BATCHES["ragged"], group=group, width=width, value_width=value_width)
    assert_close(run("torch", case), run("reference", case), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=["bf16", "fp16"])
def test_torch_equals_the_reference_in_half_precision(
    attention_case: Any, dtype: torch.dtype, tolerance: float
) -> None:
    case = attention_case(BATCHES["ragged"], dtype=dtype)
    assert_close(run("torch", case), run("reference", case), tolerance)


def test_a_plan_serves_every_layer_and_dtype(attention_case: Any) -> None:
    case = attention_case(BATCHES["ragged"])
    attention = TreeAttention("torch")
    plan = attention.plan(case.batch)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        tensors = [t.to(dtype) for t in (case.query, case.key_cache, case.value_cache)]
        expected = run("reference", replace(case, query=tensors[0], key_cache=tensors[1], value_cache=tensors[2]))
        assert_close(attention.run(plan, *tensors, case.scale), expected, 1e-2)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_row_of_a_tree_sees_what_it_would_see_alone(attention_case: Any, backend: str) -> None:
    """The path to a row, taken out of the tree and run as a causal chain, ends in the same row."""
    case = attention_case([(20, 12, "tree")], page_size=1)
    (pages,), (parents,) = case.batch.pages, case.batch.parents
    in_tree = run(backend, case)
    for row in range(12):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        alone = AttentionBatch((0, len(path)), (20,), ((*pages[:20], *(pages[20 + r] for r in path)),), 1, (None,))
        chain = run(backend, replace(case, batch=alone, query=case.query[path]))
        torch.testing.assert_close(chain[-1], in_tree[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_rows_at_all(attention_case: Any, backend: str) -> None:
    assert run(backend, attention_case([], value_width=32)).shape == (0, 4, 32)
    assert run(backend, attention_case([(9, 0, "causal")], value_width=32)).shape == (0, 4, 32)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("window", [None, 20])
def test_rows_without_keys_see_their_prefix_from_behind_it(
    attention_case: Any, backend: str, window: int | None
) -> None:
    """As single rows do whose own key is the last one. What lies behind it is NaN."""
    specs = [(64, 5, "causal"), (47, 16, "causal"), (1, 3, "causal")]
    case = attention_case(specs, queries_only=True, window=window)
    found = TreeAttention(backend).run(  # type: ignore[arg-type]
        TreeAttention(backend).plan(case.batch),  # type: ignore[arg-type]
        case.query, case.key_cache, case.value_cache, case.scale, case.variant,
    )  # fmt: skip
    for b, rows in enumerate(case.batch.row_counts):
        keys = case.batch.prefix_lengths[b]
        single = AttentionBatch((0, 1), (keys - 1,), (case.batch.pages[b],), case.batch.page_size, (None,))
        variant = replace(case.variant, window=None if window is None else window - 1)
        for row in range(case.batch.query_starts[b], case.batch.query_starts[b] + rows):
            own = case.query[row : row + 1], case.key_cache, case.value_cache, case.scale, variant
            expected = TreeAttention("reference").run(TreeAttention("reference").plan(single), *own)
            torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [{"window": 1}, {"chunked": True, "window": 8}, {"slopes": True}])
def test_what_rows_without_keys_do_not_take(attention_case: Any, change: dict[str, Any]) -> None:
    case = attention_case([(9, 2, "causal")], queries_only=True, **change)
    attention = TreeAttention("torch")
    with pytest.raises(ValueError, match="rows without keys take no slopes"):
        attention.run(
            attention.plan(case.batch), case.query, case.key_cache, case.value_cache, case.scale, case.variant
        )


BAD_BATCHES = {
    "too few pages": ({"pages": ((0,),)}, "pages for 16"),
    "parents missing": ({"parents": ((0, 0),)}, "2 parents"),
    "starts missing": ({"query_starts": (0,)}, "expected 2 query_starts"),
    "starts late": ({"query_starts": (1, 4)}, "begin with 0"),
    "negative prefix": ({"prefix_lengths": (-1,)}, "after -1 keys"),
    "falling starts": ({"query_starts": (0, -3)}, "-3 rows"),
    "page size": ({"page_size": 0}, "page_size"),
    "no keys at all": ({"prefix_lengths": (0,), "queries_only": True}, "no keys before"),
}


@pytest.mark.parametrize(("change", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    batch = AttentionBatch((0, 3), (17,), ((0, 1),), 16, ((0, 0, 1),))
    TreeAttention("torch").plan(batch)
    with pytest.raises(ValueError, match=message):
        TreeAttention("torch").plan(replace(batch, **change))


def test_tensors_that_do_not_fit_are_refused(attention_case: Any) -> None:
    case = attention_case([(5, 3, "tree")])
    attention = TreeAttention("torch")
    plan = attention.plan(case.batch)
    query, key, value = case.query, case.key_cache, case.value_cache
    for bad_query in (query[:2], query[:, :3], query[..., :32]):
        with pytest.raises(ValueError, match="expected query"):
            attention.run(plan, bad_query, key, value, 1.0)
    for bad_key, bad_value in ((key[:, :8], value[:, :8]), (key, value[:1])):
        with pytest.raises(ValueError, match="expected caches"):
            attention.run(plan, query, bad_key, bad_value, 1.0)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a backend among"):
        TreeAttention("magic")  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_a_backend_whose_package_is_absent_says_so() -> None:
    with pytest.raises(ImportError, match="flashinfer"):
        TreeAttention("flashinfer")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("specs", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("backend", ["torch", "triton", "flashinfer"])
def test_every_backend_equals_the_reference_on_a_gpu(attention_case: Any, backend: str, specs: Any) -> None:
    if backend != "torch":
        pytest.importorskip(backend)
    case = attention_case(specs, dtype=torch.bfloat16, group=4, width=128, device="cuda")
    assert_close(run(backend, case), run("reference", case), 1e-2)
