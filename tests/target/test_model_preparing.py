"""Layers in fused form compute what they do plainly, and one that is built otherwise stays plain. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from classic_models import CLASSIC
from fused_models import EXPERTS, FUSED, after, runner_of
from recurrent_models import RECURRENT
from torch import Tensor
from windowed_models import WINDOWED

from target_service.model.preparing import prepare_network
from target_service.model.runner import ModelRunner
from tree_kernels.compiled_layers import compile_layer
from tree_kernels.experts import Chosen, RowExperts
from tree_kernels.linear import Activation, RowLinears, ScaledRows
from tree_models.fused import preparing
from tree_models.fused.forms import FusedForm
from tree_models.fused.preparing import MANY_ROWS, MAX_ROWS, LayerOptions
from tree_models.layers.decoder import Decoder

UNCOMPILED = LayerOptions(compiled=False)


def decoder_of(runner: ModelRunner) -> Decoder:
    assert isinstance(runner.network, Decoder)
    return runner.network


def forms_of(runner: ModelRunner) -> list[FusedForm]:
    return [form for form in decoder_of(runner).forms if isinstance(form, FusedForm)]


def compute_the_same(fused: ModelRunner, plain: ModelRunner, *passes: int) -> None:
    """In passes of so many rows each, whatever is kept of them."""
    for rows in passes:
        for value, own in zip(after(fused, rows), after(plain, rows), strict=True):
            torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", FUSED)
def test_fused_layers_compute_what_they_do_plainly(model_type: str) -> None:
    plain, fused = (runner_of(model_type, **FUSED[model_type]) for _ in range(2))
    assert prepare_network(fused.network, UNCOMPILED) == fused.network.layer_count
    compute_the_same(fused, plain, 1, MAX_ROWS + 1)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gpt_neox", "gptj", "falcon", "falcon, groups", "persimmon"])
def test_fused_layers_of_gpts_compute_what_they_do_plainly(name: str) -> None:
    model_type, settings = CLASSIC[name]
    plain, fused = (runner_of(model_type, **settings) for _ in range(2))
    assert prepare_network(fused.network, UNCOMPILED) == fused.network.layer_count
    compute_the_same(fused, plain, 1, 6, MAX_ROWS + 1)


# Of a decoder's layers all but these are fused: heads whose values are their keys, values narrower than keys.
PLAIN_LAYERS = {"gemma4, experts": 3, "gemma4_unified": 3, "mimo_v2": 4}


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4, experts",
        "gemma4_unified",
        "afmoe",
        "laguna",
        "laguna, gates of numbers",
        "mimo_v2",
        "exaone_moe",
    ],
)
def test_fused_layers_with_windows_compute_what_they_do_plainly(name: str) -> None:
    model_type, settings = WINDOWED[name]
    plain, fused = (runner_of(model_type, **settings) for _ in range(2))
    assert prepare_network(fused.network, UNCOMPILED) == fused.network.layer_count - PLAIN_LAYERS.get(name, 0)
    compute_the_same(fused, plain, 1, 6, MAX_ROWS + 1)


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "qwen3_5",
        "qwen3_next",
        "qwen3_next, dense",
        "granitemoehybrid, mamba",
        "granitemoehybrid, mamba and experts",
        "bamba",
        "nemotron_h",
    ],
)
def test_fused_layers_with_states_compute_what_they_do_plainly(name: str) -> None:
    """Each pass folds what the one before kept."""
    model_type, settings = RECURRENT[name]
    runners = [runner_of(model_type, **settings) for _ in range(2)]
    assert prepare_network(runners[0].network, UNCOMPILED) == runners[0].network.layer_count
    for rows in (1, 9, 1, 64):
        (own, *kept), (expected, *others) = (after(runner, rows) for runner in runners)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
        states = [runner.cache.recurrent for runner in runners]
        for pool in ("states", "windows", "inputs", "gates"):
            kept, others = [*kept, getattr(states[0], pool)], [*others, getattr(states[1], pool)]
        for value, other in zip(kept, others, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4)


def test_layers_with_states_are_not_invariant() -> None:
    model_type, settings = RECURRENT["lfm2"]
    with pytest.raises(ValueError, match="independent of the batch"):
        prepare_network(runner_of(model_type, **settings).network, LayerOptions(invariant=True))


def test_any_number_of_rows() -> None:
    plain, fused = runner_of(), runner_of()
    prepare_network(fused.network, UNCOMPILED)
    compute_the_same(fused, plain, 7, MAX_ROWS, 100)


def test_rows_choose_what_computes_them() -> None:
    runner = runner_of()
    assert prepare_network(runner.network, UNCOMPILED) == 2
    for form in forms_of(runner):
        one, few, many = (form.linears.of(rows) for rows in (1, 2, MAX_ROWS + 1))
        assert None not in (one, few, many) and len({id(one), id(few), id(many)}) == 3
        assert form.linears.of(MAX_ROWS) is few and form.linears.of(MANY_ROWS) is many
        assert form.linears.of(MANY_ROWS + 1) is many and form.linears.of(0) is None
    # Where plain layers are compiled, the largest passes run these.
    assert prepare_network(runner.network, LayerOptions()) == 2
    assert all(form.linears.of(MANY_ROWS + 1) is None for form in forms_of(runner))
    prepare_network(runner.network, LayerOptions(compiled=False, many=False))
    assert all(form.linears.of(MAX_ROWS + 1) is None for form in forms_of(runner))


class Other(RowLinears):
    """Computes an MLP that is none."""

    def gated_linear(
        self, rows: ScaledRows, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None
    ) -> Tensor:
        return -super().gated_linear(rows, weight, bias, activation or Activation())


def test_layers_that_many_rows_would_not_fit_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a layer's ways is tried before it is trusted."""
    monkeypatch.setattr(preparing, "many_row_linears", lambda _device: Other())
    runner = runner_of()
    assert prepare_network(runner.network, UNCOMPILED) == 0
    assert prepare_network(runner.network, LayerOptions(compiled=False, many=False)) == 2


def test_one_odd_layer_costs_one_layer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain, fused = (runner_of(num_hidden_layers=4) for _ in range(2))
    tried = preparing.computes_the_same

    def odd(decoder: Decoder, index: int, form: FusedForm) -> bool:
        if index == 2:
            form = FusedForm(form.parts, preparing.LinearsByRows(((MAX_ROWS, Other()),)), form.experts)
        return tried(decoder, index, form)

    monkeypatch.setattr(preparing, "computes_the_same", odd)
    assert prepare_network(fused.network, UNCOMPILED) == 3
    assert [form is None for form in decoder_of(fused).forms] == [False, False, True, False]
    assert "layer 2 computes something else" in caplog.text
    for value, own in zip(after(fused, 5), after(plain, 5), strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-4)


class Straying(RowExperts):
    """Sends rows from the first one on to other experts, as rounding may do with one."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def route(self, rows: ScaledRows, weight: Tensor, *others: Any, **named: Any) -> Chosen:
        chosen = super().route(rows, weight, *others, **named)
        # Not where a pass has a single row, which would be all of them.
        strays = self._rows if len(rows.rows) > 1 else 0
        chosen.experts[:strays] = (chosen.experts[:strays] + 1) % len(weight)
        return chosen


@pytest.mark.parametrize(("rows", "fused"), [(1, 2), (2, 2), (3, 0)])
def test_a_row_that_goes_to_another_expert_costs_no_layer(
    monkeypatch: pytest.MonkeyPatch, rows: int, fused: int
) -> None:
    monkeypatch.setattr(preparing, "row_experts", lambda *_, **__: Straying(rows))
    runner = runner_of("qwen3_moe", **EXPERTS, head_dim=16)
    for layer in decoder_of(runner).layers:
        # Else attention were nearly all of what a layer adds.
        layer.mlp.down.data.mul_(1000)
    assert prepare_network(runner.network, UNCOMPILED) == fused


def test_a_kernel_that_fails_leaves_layers_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(RowLinears):
        def rotary_linear(self, *_: Any, **__: Any) -> Tensor:
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(preparing, "row_linears", lambda *_, **__: Failing())
    runner = runner_of()
    assert prepare_network(runner.network, UNCOMPILED) == 0
    assert "cannot be fused" in caplog.text and "out of shared memory" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("olmo", {"clip_qkv": 0.4}), ("cohere", {"use_qk_norm": True}), ("bitnet", {})],
)
def test_layers_that_no_launch_has_stay_plain(model_type: str, settings: dict[str, Any]) -> None:
    plain, prepared = (runner_of(model_type, **settings) for _ in range(2))
    assert prepare_network(prepared.network, UNCOMPILED) == 0
    for value, own in zip(after(prepared, 5), after(plain, 5), strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-4)


def test_what_is_not_asked_for_is_not_done() -> None:
    runner = runner_of()
    assert prepare_network(runner.network, LayerOptions(compiled=False, fused=False)) == 0
    assert not forms_of(runner) and decoder_of(runner).final_form is None


def test_invariant_layers_take_every_product_and_any_number_of_rows() -> None:
    plain, runner = runner_of(), runner_of()
    assert prepare_network(runner.network, UNCOMPILED) == 2
    assert prepare_network(runner.network, LayerOptions(invariant=True)) == 2
    assert decoder_of(runner).final_form is not None
    assert all(form.linears.of(1 << 20) is form.linears.of(1) for form in forms_of(runner))
    for value, own in zip(after(runner, 70), after(plain, 70), strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model_type", "settings"), [("olmo", {"clip_qkv": 0.4}), ("bitnet", {})])
def test_a_model_that_cannot_be_made_invariant_is_refused(model_type: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="layers cannot be made independent"):
        prepare_network(runner_of(model_type, **settings).network, LayerOptions(invariant=True))


# OLMo 2 has norms of queries and keys too.
@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3", marks=pytest.mark.full), "olmo2", "mixtral"])
def test_plain_layers_are_compiled_once_for_the_rows_of_a_pass(model_type: str) -> None:
    """Layers of one kind share what is compiled, and attention alone breaks the graphs."""
    settings = EXPERTS if model_type == "mixtral" else {}
    plain, compiled = (runner_of(model_type, num_hidden_layers=4, **settings) for _ in range(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_of(compiled).layers:
        compile_layer(layer, "eager")
    for value, own in zip(after(compiled, 5), after(plain, 5), strict=True):
        torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-4)
    first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Of the layer, its attention and its experts, a frame before the break and one behind it, for all layers.
    assert 0 < first <= 6
    after(compiled, 5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == first
