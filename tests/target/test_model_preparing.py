"""Layers that are fused compute what they did, and those built otherwise keep their own code. No GPU is needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_tiny
from torch import Tensor
from transformers import PreTrainedModel

from target_service.model.forward import ForwardInput
from target_service.model.fused import preparing
from target_service.model.fused.layers import FusedLayer, FusedNorm, RotaryTable, RowsHead
from target_service.model.fused.preparing import MANY_ROWS, MAX_ROWS, LayerOptions, prepare_layers
from target_service.model.runner import ModelRunner, runner_for
from tree_kernels.attention import AttentionBatch
from tree_kernels.linear import RowLinears, ScaledRows

PAGE_SIZE = 4
UNCOMPILED = LayerOptions(compiled=False)


def batch_of(rows: int, seed: int = 0) -> ForwardInput:
    """One tree behind 9 tokens."""
    rng = random.Random(seed)
    parents = tuple(rng.randrange(max(1, row)) for row in range(rows))
    pages = tuple(rng.sample(range(40), -(-(9 + rows) // PAGE_SIZE)))
    slots = tuple(pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(9, 9 + rows))
    attention = AttentionBatch((0, rows), (9,), (pages,), PAGE_SIZE, (parents,))
    tokens = tuple(rng.randrange(200) for _ in range(rows))
    return ForwardInput(tokens, tuple(range(9, 9 + rows)), slots, attention, tuple(range(rows)))


def runner_of(model: PreTrainedModel) -> ModelRunner:
    runner = runner_for(model, None, num_pages=40, page_size=PAGE_SIZE)
    for cache in runner.cache.keys + runner.cache.values:
        cache.normal_(generator=torch.Generator().manual_seed(1))
    return runner


def after(runner: ModelRunner, rows: int) -> list[Tensor]:
    """Logits of a step, and the caches behind it."""
    logits = runner.forward(batch_of(rows)).clone()
    return [logits, *(cache.clone() for cache in runner.cache.keys + runner.cache.values)]


def layers_of(model: PreTrainedModel) -> Any:
    inner: Any = model
    return inner.model.layers


def with_norms(model: PreTrainedModel) -> PreTrainedModel:
    """The model with norms of different weights, where a random one has ones."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("rows", [1, 7, MAX_ROWS, MAX_ROWS + 1, 100])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_layers_compute_what_they_did(model_type: str, rows: int) -> None:
    expected = after(runner_of(with_norms(make_tiny(model_type))), rows)
    model = with_norms(make_tiny(model_type))
    runner = runner_of(model)
    assert prepare_layers(model, UNCOMPILED) == len(layers_of(model))
    for value, own in zip(after(runner, rows), expected, strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-5)


def test_rows_choose_what_computes_them() -> None:
    model = runner_of(make_tiny()).model
    assert prepare_layers(model, UNCOMPILED) == 2
    for layer in layers_of(model):
        few, many = layer.linears.of(1), layer.linears.of(MAX_ROWS + 1)
        assert few is not many and None not in (few, many)
        assert layer.linears.of(MAX_ROWS) is few and layer.linears.of(MANY_ROWS) is many
        assert layer.linears.of(0) is layer.linears.of(MANY_ROWS + 1) is None
    prepare_layers(model, LayerOptions(compiled=False, many=False))
    assert all(layer.linears.of(MAX_ROWS + 1) is None for layer in layers_of(model))


def test_layers_that_many_rows_would_not_fit_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a layer's ways is tried before it is trusted."""

    class Other(RowLinears):
        def gated_linear(self, rows: ScaledRows, weight: Tensor) -> Tensor:
            return -super().gated_linear(rows, weight)

    monkeypatch.setattr(preparing, "many_row_linears", lambda _device: Other())
    model = runner_of(make_tiny()).model
    assert prepare_layers(model, UNCOMPILED) == 0
    assert prepare_layers(model, LayerOptions(compiled=False, many=False)) == 2


FOREIGN: dict[str, Callable[[], PreTrainedModel]] = {
    "norms behind": lambda: make_tiny("olmo2"),
    "weights joined in the checkpoint": lambda: make_tiny("phi3"),
    "residuals of another weight": lambda: make_tiny("granite", residual_multiplier=0.5),
    "another activation": lambda: make_tiny("llama", hidden_act="gelu"),
    "a bias of the gate": lambda: make_tiny("llama", mlp_bias=True),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_layers_that_are_built_otherwise_keep_their_code(make: Callable[[], PreTrainedModel]) -> None:
    expected = after(runner_of(make()), 5)
    model = make()
    runner = runner_of(model)
    assert prepare_layers(model, UNCOMPILED) == 0
    assert not any(isinstance(layer, FusedLayer) for layer in layers_of(model))
    for value, own in zip(after(runner, 5), expected, strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-5)


def test_attention_scores_of_another_scale_are_kept() -> None:
    """Granite's scale is its own; the fused layer takes it from the module."""
    model, plain = (make_tiny("granite", attention_multiplier=0.3) for _ in range(2))
    runner, own = runner_of(model), runner_of(plain)
    assert prepare_layers(model, UNCOMPILED) == 2
    torch.testing.assert_close(after(runner, 5)[0], after(own, 5)[0], rtol=1e-4, atol=1e-5)


def test_a_layer_without_a_step_runs_its_own_code() -> None:
    model = make_tiny()
    tokens = torch.arange(6).unsqueeze(0)
    model.set_attn_implementation("eager")
    expected = model(tokens).logits
    model.set_attn_implementation("outrider_tree")
    assert prepare_layers(model, UNCOMPILED) == 2
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, expected)


def test_what_is_not_asked_for_is_not_done() -> None:
    model = runner_of(make_tiny()).model
    assert prepare_layers(model, LayerOptions(compiled=False, fused=False)) == 0
    inner: Any = model
    assert not isinstance(inner.model.norm, FusedNorm)
    assert not isinstance(inner.model.rotary_emb, RotaryTable)


def test_invariant_layers_take_every_product_and_any_number_of_rows() -> None:
    expected = after(runner_of(make_tiny()), 70)
    model = make_tiny()
    runner = runner_of(model)
    assert prepare_layers(model, UNCOMPILED) == 2
    assert prepare_layers(model, LayerOptions(invariant=True)) == 2
    inner: Any = model
    assert isinstance(inner.lm_head, RowsHead)
    assert all(layer.linears.of(1 << 20) is layer.linears.of(1) for layer in inner.model.layers)
    for value, own in zip(after(runner, 70), expected, strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-5)


def test_a_model_that_cannot_be_made_invariant_is_refused() -> None:
    model = runner_of(make_tiny("olmo2")).model
    with pytest.raises(ValueError, match="olmo2: its layers cannot be made independent"):
        prepare_layers(model, LayerOptions(invariant=True))


@pytest.mark.parametrize("model_type", ["gpt_neox", "opt"])
def test_a_model_whose_parts_have_other_names_keeps_its_code(model_type: str) -> None:
    runner = runner_of(make_tiny(model_type, num_key_value_heads=4))
    expected = runner.forward(batch_of(5)).clone()
    assert prepare_layers(runner.model, UNCOMPILED) == 0
    torch.testing.assert_close(runner.forward(batch_of(5)), expected)
