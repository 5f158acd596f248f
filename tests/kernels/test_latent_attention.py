"""Latent attention in absorbed form against the expanded form, which is the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, work

from tree_kernels.latent_attention import (
    HeadProjections,
    LatentAttention,
    LatentRows,
    RotaryAngles,
    expanded_values,
    norm_rope_write,
    write_latents,
)

pytestmark = pytest.mark.values

BATCHES: dict[str, list[tuple[int, int, str]]] = {
    "decode": [(37, 1, "tree")],
    "first token": [(0, 1, "causal")],
    "prefill": [(0, 33, "causal")],
    "chunk": [(29, 18, "causal")],
    "tree": [(51, 17, "tree")],
    "tree at the start": [(0, 9, "tree")],
    "two words": [(5, 70, "tree")],
    "ragged": [(3, 1, "tree"), (47, 16, "tree"), (0, 21, "causal"), (63, 5, "chain"), (130, 3, "causal")],
    "with empty sequences": [(11, 0, "tree"), (7, 2, "chain"), (0, 0, "causal")],
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def values_of(backend: Any, case: Any) -> torch.Tensor:
    """[R, H, V] through the absorbed form."""
    attention = LatentAttention(backend, case.cache.device)
    attended = attention.run(attention.plan(case.batch), case.query, case.cache, case.latent, case.scale)
    assert attended.dtype == case.query.dtype and attended.shape == (*case.query.shape[:2], case.latent)
    return expanded_values(attended, case.projections)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shuffled", [False, True], ids=["consecutive", "shuffled"])
@pytest.mark.parametrize("specs", BATCHES.values(), ids=BATCHES)
def test_absorbed_is_expanded(latent_case: Any, specs: Any, shuffled: bool, page_size: int, backend: str) -> None:
    case = latent_case(specs, page_size=page_size, shuffled=shuffled)
    assert relative_error(values_of(backend, case), case.expanded()) < 2e-6


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_nothing_but_rounding_lies_between_the_forms(latent_case: Any, backend: str) -> None:
    """In fp64 the two agree to fp64, so that what differs in fp32 is rounding."""
    case = latent_case(BATCHES["ragged"], dtype=torch.float64)
    expanded = case.expanded()
    assert expanded.dtype == torch.float64
    assert relative_error(values_of(backend, case), expanded) < (1e-6 if backend == "reference" else 1e-14)


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)], ids=["bf16", "fp16"])
def test_half_precision_rounds_queries_and_sums_once_each(
    latent_case: Any, dtype: torch.dtype, tolerance: float, heads: int
) -> None:
    case = latent_case(BATCHES["ragged"], heads=heads, dtype=dtype)
    assert relative_error(values_of("torch", case), case.expanded()) < tolerance


def test_long_chunks_are_attended_to_in_pieces(latent_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = latent_case(BATCHES["ragged"])
    whole = values_of("torch", case)
    monkeypatch.setattr("tree_kernels.latent_attention.torch_backend.MOST_SCORES", 1000)
    torch.testing.assert_close(values_of("torch", case), whole, rtol=1e-5, atol=1e-6)


def test_weights_that_are_written_to_are_what_is_multiplied_with() -> None:
    weight = torch.zeros(3 * 5, 8)
    projections = HeadProjections.of(weight, heads=3, plain=2)
    assert projections.keys.shape == (3, 2, 8) and projections.values.shape == (3, 3, 8)
    weight[5 + 1] = 1.0
    weight[10 + 4] = 2.0
    assert projections.keys[1, 1].eq(1).all() and projections.values[2, 2].eq(2).all()
    assert projections.keys.sum() == 8 and projections.values.sum() == 16


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_new_vectors_land_in_their_slots_and_nowhere_else(page_size: int) -> None:
    cache = torch.randn(64 // page_size, page_size, 14)
    expected = cache.clone().flatten(0, 1)
    latents, rotary, slots = torch.randn(5, 10), torch.randn(5, 4), torch.tensor([33, 0, 63, 17, 16])
    expected[slots] = torch.cat([latents, rotary], dim=1)
    write_latents(latents, rotary, cache, slots)
    assert torch.equal(cache.flatten(0, 1), expected)


@pytest.mark.parametrize(("pairs_in", "pairs_out"), [(True, True), (True, False), (False, False)])
def test_rows_are_normed_turned_and_written(pairs_in: bool, pairs_out: bool) -> None:
    """Held to complex numbers, by which rotary embedding is defined, in fp64."""
    torch.manual_seed(0)
    count, heads, latent, half, plain = 4, 3, 10, 4, 6
    rows = LatentRows(torch.randn(count, latent + 8), torch.randn(count, heads, plain + 8), torch.randn(latent), 1e-6)
    angles = torch.randn(count, half)
    rotary = RotaryAngles(angles.cos(), angles.sin(), pairs_in, pairs_out)
    cache, slots = torch.randn(4, 16, latent + 8), torch.tensor([33, 0, 63, 17])
    absorbed = torch.randn(count, heads, latent + 8)
    untouched, before = absorbed[..., :latent].clone(), cache.clone()
    norm_rope_write(rows, rotary, cache, slots, absorbed)

    def turned(parts: torch.Tensor) -> torch.Tensor:
        wide = parts.double()
        pairs = wide.unflatten(-1, (half, 2)) if pairs_in else torch.stack(wide.split(half, dim=-1), dim=-1)
        turn = torch.polar(torch.ones_like(angles.double()), angles.double())
        numbers = torch.view_as_complex(pairs.contiguous()) * (turn if parts.dim() == 2 else turn[:, None])
        both = torch.view_as_real(numbers)
        return both.flatten(-2) if pairs_out else torch.cat(both.unbind(-1), dim=-1)

    latents = rows.vectors[:, :latent].double()
    normed = latents / (latents.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * rows.weight.double()
    expected = before.double().flatten(0, 1)
    expected[slots] = torch.cat([normed, turned(rows.vectors[:, latent:])], dim=1)
    assert relative_error(cache.flatten(0, 1), expected) < 1e-6
    assert torch.equal(absorbed[..., :latent], untouched)
    assert relative_error(absorbed[..., latent:], turned(rows.queries[..., plain:])) < 1e-6


def test_rows_that_cannot_be_turned_are_refused() -> None:
    rows = LatentRows(torch.randn(2, 18), torch.randn(2, 3, 14), torch.randn(10), 1e-6)
    rotary = RotaryAngles(torch.ones(2, 4), torch.ones(2, 4), True, True)
    cache, slots, absorbed = torch.zeros(1, 16, 18), torch.tensor([0, 1]), torch.zeros(2, 3, 18)
    with pytest.raises(ValueError, match="an even rotary width"):
        norm_rope_write(replace(rows, vectors=torch.randn(2, 17)), rotary, cache, slots, absorbed)
    with pytest.raises(ValueError, match="expected absorbed queries"):
        norm_rope_write(rows, rotary, cache, slots, absorbed[:, :2])
    with pytest.raises(ValueError, match="expected queries"):
        norm_rope_write(replace(rows, queries=rows.queries[:1]), rotary, cache, slots, absorbed)
    with pytest.raises(ValueError, match="integer slots"):
        norm_rope_write(rows, rotary, cache, slots[:1], absorbed)
    with pytest.raises(ValueError, match="integer slots"):
        norm_rope_write(rows, rotary, cache, slots.float(), absorbed)
    with pytest.raises(ValueError, match="as the vectors are"):
        norm_rope_write(rows, rotary, cache.half(), slots, absorbed)
    with pytest.raises(ValueError, match="expected cosines and sines"):
        norm_rope_write(rows, replace(rotary, sines=torch.ones(2, 8)), cache, slots, absorbed)
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        norm_rope_write(replace(rows, vectors=torch.randn(18, 2).t()), rotary, cache, slots, absorbed)
    with pytest.raises(ValueError, match="a contiguous cache"):
        norm_rope_write(rows, rotary, torch.zeros(1, 18, 16).transpose(1, 2), slots, absorbed)


def test_what_does_not_fit_is_refused(latent_case: Any) -> None:
    case = latent_case([(5, 3, "tree")])
    attention = LatentAttention("torch")
    plan = attention.plan(case.batch)
    query, cache = case.query, case.cache
    for bad in (query[:2], query[..., :32]):
        with pytest.raises(ValueError, match="expected query"):
            attention.run(plan, bad, cache, case.latent, 1.0)
    with pytest.raises(ValueError, match="expected query"):
        attention.run(plan, query, cache, query.shape[-1], 1.0)
    with pytest.raises(ValueError, match="expected a cache"):
        attention.run(plan, query, cache[:, :8], case.latent, 1.0)
    with pytest.raises(ValueError, match="expected a backend among"):
        LatentAttention("magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="captured steps"):
        _ = attention.capturable


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    pytest.importorskip("triton")
    return work("latent_worker.py", **INTERPRETED)


def check(found: dict[str, Any]) -> None:
    """fp32 agrees to rounding. Half precision has the queries' and the sums' beside that of the products."""
    wrong = {}
    for name, errors in found["errors"].items():
        tolerance = 4e-3 if name == "half precision" else 2e-2 if name.startswith("bf16") else 3e-6
        # Written so that NaN fails.
        if not all(error <= tolerance for error in errors):
            wrong[name] = errors
    assert not wrong
    assert max(found["update_errors"]) < 3e-6
    assert max(found["output_rows_errors"]) < 3e-6
    assert found["written"]
    for name, error in found["norm_rope_errors"].items():
        assert error <= (2e-2 if "bfloat16" in name else 2e-3 if "float16" in name else 1e-6), name


def test_the_kernel_is_the_expanded_form(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["errors"]) > 30
    check(interpreted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_is_the_expanded_form_on_a_gpu() -> None:
    check(work("latent_worker.py", TRITON_INTERPRET="0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("specs", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_backend_is_the_expanded_form_on_a_gpu(latent_case: Any, backend: str, specs: Any) -> None:
    pytest.importorskip(backend)
    shape = {"heads": 16, "latent": 512, "rotary": 64, "plain": 128, "value": 128}
    case = latent_case(specs, dtype=torch.bfloat16, device="cuda", **shape)
    assert relative_error(values_of(backend, case), case.expanded()) < 2e-2
