"""Windows, caps, sinks and slopes: each row of a random tree against its own path, run alone by another formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tree_kernels.attention import AttentionBatch, AttentionVariant, TreeAttention

pytestmark = pytest.mark.pairs
HEADS, KV_HEADS, WIDTH = 4, 2, 8


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    rows = draw(st.integers(1, 20))
    return tuple(draw(st.integers(0, max(0, row - 1))) for row in range(rows))


def alone(query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant) -> Tensor:
    """[Hq, Dv] of the last token of what it sees of a plain text, in fp64."""
    keys, values, cap, sinks = keys.double(), values.double(), variant.score_cap, variant.sinks
    outputs = []
    for head in range(HEADS):
        scores = keys[:, head // 2] @ query[head].double() * WIDTH**-0.5
        scores = scores if cap is None else cap * (scores / cap).tanh()
        if variant.slopes is not None:
            scores += variant.slopes[head].double() * torch.arange(1 - len(keys), 1)
        weights = scores.exp()
        total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
        outputs.append(weights @ values[:, head // 2] / total)
    return torch.stack(outputs).float()


@examples(100)
@given(
    trees(),
    st.integers(0, 30),
    st.integers(1, 40),
    st.sampled_from([None, 0.8]),
    *[st.booleans()] * 3,
    st.integers(0, 99),
)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_row_sees_the_last_keys_of_its_own_path(
    backend: Any, parents: tuple[int, ...], prefix: int, window: int, cap: float | None, has_sinks: bool, chunked: bool,
    has_slopes: bool, seed: int,
) -> None:  # fmt: skip
    """Or those of its chunk. By depth: siblings see as far back as each other. What no window reaches is NaN, and
    reaches nothing."""
    generator, rows = torch.Generator().manual_seed(seed), len(parents)
    query, keys, values = (
        torch.randn(count, heads, WIDTH, generator=generator)
        for count, heads in ((rows, HEADS), (prefix + rows, KV_HEADS), (prefix + rows, KV_HEADS))
    )
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    slopes = torch.rand(HEADS, generator=generator) if has_slopes else None
    variant = AttentionVariant(window, cap, sinks, chunked, slopes)
    unseen = variant.first_key(prefix)
    size = 4
    pages = torch.randperm(20, generator=generator)[: -(-(prefix + rows) // size)].tolist()
    caches = torch.full((2, 20, size, KV_HEADS, WIDTH), float("nan"))
    for key in range(unseen, prefix + rows):
        caches[:, pages[key // size], key % size] = torch.stack([keys[key], values[key]])
    attention = TreeAttention(backend)
    plan = attention.plan(AttentionBatch((0, rows), (prefix,), (pages,), size, (parents,)))
    found = attention.run(plan, query, caches[0], caches[1], WIDTH**-0.5, variant)
    for row in range(rows):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        seen = [*range(prefix), *(prefix + node for node in path)]
        last = len(seen) - 1
        seen = seen[last // window * window if chunked else max(0, last - window + 1) :]
        expected = alone(query[row], keys[seen], values[seen], variant)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": 21},
    "wide window": {"window": 500},
    "cap": {"score_cap": 0.7},
    "sinks": {"sinks": True},
    "slopes": {"slopes": True},
    "all": {"window": 5, "score_cap": 3.0, "sinks": True, "slopes": True},
    "chunks": {"window": 21, "chunked": True},
    "wide chunks": {"window": 500, "chunked": True},
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_torch_equals_the_reference(attention_case: Any, arguments: dict[str, Any], page_size: int) -> None:
    specs = [
        (3, 1, "tree"), (47, 16, "tree"), (0, 41, "causal"), (7, 0, "causal"), (63, 5, "chain"), (130, 3, "causal"),
        (40, 1, "tree"),
    ]  # fmt: skip
    case = attention_case(specs, page_size=page_size, **arguments)
    outputs = []
    for backend in ("reference", "torch"):
        attention: Any = TreeAttention(backend)
        plan = attention.plan(case.batch)
        tensors = case.query, case.key_cache, case.value_cache
        # Layers of several kinds take turns.
        attention.run(plan, *(torch.zeros_like(one) for one in tensors), case.scale)
        outputs.append(attention.run(plan, *tensors, case.scale, case.variant))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_a_prompt_in_parts_has_the_same_rows(monkeypatch: pytest.MonkeyPatch, attention_case: Any) -> None:
    """Where scores would take too much memory at a time, rows are computed in turn."""
    case = attention_case([(9, 30, "causal")], window=7, sinks=True)
    attention = TreeAttention("torch")
    plan = attention.plan(case.batch)
    run = (case.query, case.key_cache, case.value_cache, case.scale, case.variant)
    whole = attention.run(plan, *run)
    monkeypatch.setattr("tree_kernels.attention.torch_backend.MOST_SCORES", 1000)
    torch.testing.assert_close(attention.run(plan, *run), whole)


def test_a_variant_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        AttentionVariant(window=0)
    with pytest.raises(ValueError, match="positive cap"):
        AttentionVariant(score_cap=0.0)


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_numbers_of_other_heads_are_refused(attention_case: Any, name: str) -> None:
    case = attention_case([(9, 3, "tree")])
    attention = TreeAttention("torch")
    case = replace(case, variant=AttentionVariant(**{name: torch.zeros(3)}))
    with pytest.raises(ValueError, match=rf"expected {name} \[4\], got \[3\]"):
        plan = attention.plan(case.batch)
        attention.run(plan, case.query, case.key_cache, case.value_cache, case.scale, case.variant)
