"""Other weights in layers as they are prepared for serving compute what a model made with them computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from conftest import make_tiny
from engine_harness import make_runner
from other_weights import other_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import InvalidField
from target_service.model.forward import ForwardInput
from target_service.model.preparing import prepare_network
from target_service.model.runner import ModelRunner
from target_service.model.transformers_network import TransformersNetwork
from target_service.model.weights.files import read_weights
from target_service.model.weights.slots import weight_slots, write_weights
from tree_kernels.attention import AttentionBatch
from tree_models.fused.preparing import LayerOptions
from tree_models.layers.decoder import Decoder
from tree_models.layers.linear import can_pack
from tree_models.reference import published_tensors
from tree_models.slots import TensorSpec, specs_of

pytestmark = pytest.mark.values

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "cohere", "apertus", "bitnet", "gpt2", "gpt_neox"]
packs = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="PyTorch without oneDNN's bf16 products"
)


def after(runner: ModelRunner) -> list[Tensor]:
    """Logits of a short text [5, V], and the keys and values that it left, layer by layer."""
    tokens = (7, 30, 9, 100, 4)
    rows = len(tokens)
    attention = AttentionBatch((0, rows), (0,), ((0,),), runner.cache.page_size, (None,))
    places = tuple(range(rows))
    logits = runner.forward(ForwardInput(tokens, places, places, attention, places)).clone()
    return [logits, *(cache[0, :rows].clone() for cache in runner.cache.keys + runner.cache.values)]


def exchange(runner: ModelRunner, folder: Path) -> int:
    """Write the folder's weights into the runner's model. How many tensors there were."""
    slots = weight_slots(runner.network)
    weights = read_weights(folder, specs_of(slots))
    beats: list[int] = []
    write_weights(slots, weights, torch.device("cpu"), lambda: beats.append(1))
    assert len(beats) == len(slots)
    return len(weights)


def kept(model: PreTrainedModel, folder: Path) -> Path:
    """The model's state as it is published, with every tied tensor once."""
    published = published_tensors(model)
    tensors = {name: published.read(name).clone() for name in published.stored}
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_it_is(runner: ModelRunner) -> None:
    """Layers as they were loaded."""
    assert runner is not None


def fused(runner: ModelRunner) -> None:
    """Layers in fused form where they have one."""
    prepare_network(runner.network, LayerOptions(compiled=False))


def invariant(runner: ModelRunner) -> None:
    """Every product through the kernels."""
    prepare_network(runner.network, LayerOptions(compiled=False, invariant=True))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("prepare", [as_it_is, fused], ids=["loaded", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_place(family: str, prepare: Callable[[ModelRunner], None], tied: bool, tmp_path: Path) -> None:
    old = make_tiny(family, tie_word_embeddings=tied)
    new = other_weights(old)
    folder = kept(new, tmp_path)
    fresh, runner = make_runner(copy.deepcopy(new)), make_runner(old)
    for one in (fresh, runner):
        prepare(one)
    before = after(runner)[0]
    memory = {spec.data_ptr() for spec in every_tensor(runner)}
    assert exchange(runner, folder) == len(specs_of(weight_slots(runner.network)))
    # Captured graphs and fused layers hold these addresses.
    assert {spec.data_ptr() for spec in every_tensor(runner)} == memory
    for value, own in zip(after(runner), after(fresh), strict=True):
        assert torch.equal(value, own)
    assert not torch.allclose(before, after(runner)[0])
    if tied and isinstance(network := runner.network, Decoder):
        assert network.head.plain is not None
        assert network.head.plain.weight.data_ptr() == network.embedding.data_ptr()


def every_tensor(runner: ModelRunner) -> list[Tensor]:
    network = runner.network
    module = network if isinstance(network, Decoder) else cast("TransformersNetwork", network).model
    return [*module.parameters(), *module.buffers()]


def test_layers_that_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    old = make_tiny()
    new = other_weights(old)
    folder = kept(new, tmp_path)
    fresh, runner = make_runner(copy.deepcopy(new)), make_runner(old)
    for one in (fresh, runner):
        invariant(one)
    exchange(runner, folder)
    assert torch.equal(after(runner)[0], after(fresh)[0])


@packs
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "ernie4_5", "bitnet", "gpt2"])
def test_packed(family: str, tied: bool, tmp_path: Path) -> None:
    old = make_tiny(family, tie_word_embeddings=tied).to(torch.bfloat16)
    new = other_weights(old)
    folder = kept(new, tmp_path)
    runner, fresh = make_runner(old, packed=True), make_runner(copy.deepcopy(new), packed=True)
    before = after(runner)[0]
    exchange(runner, folder)
    assert torch.equal(after(runner)[0], after(fresh)[0])
    assert not torch.equal(before, after(runner)[0])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_types_are_converted(stored: torch.dtype, served: torch.dtype, tmp_path: Path) -> None:
    new = other_weights(make_tiny())
    folder = kept(copy.deepcopy(new).to(stored), tmp_path)
    runner = make_runner(make_tiny().to(served))
    exchange(runner, folder)
    expected = make_runner(copy.deepcopy(new).to(stored).to(served))
    for tensor, own in zip(every_tensor(runner), every_tensor(expected), strict=True):
        assert torch.equal(tensor, own)


def test_a_tied_tensor_that_differs_from_its_other(tmp_path: Path) -> None:
    model = make_tiny(tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    runner = make_runner(model)
    exchange(runner, tmp_path)
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidField, match="is tied to"):
        exchange(runner, tmp_path)


def test_what_overflows_in_the_served_type(tmp_path: Path) -> None:
    model = make_tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = 1e30
    folder = kept(model, tmp_path)
    assert exchange(make_runner(make_tiny()), folder)
    with pytest.raises(InvalidField, match="not finite in float16"):
        exchange(make_runner(make_tiny().to(torch.float16)), folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    """In the parts of a tensor that are read many at a time, and in what is left over."""
    size = 70_003
    wanted = {"w": TensorSpec((size,), dtype)}
    for place in (0, 1, 31, size // 2, size - 4, size - 1):
        tensor = torch.linspace(-1, 1, size).to(dtype)
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        assert torch.equal(read_weights(tmp_path, wanted)["w"], tensor)
        tensor[place] = value
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        with pytest.raises(InvalidField, match="not finite"):
            read_weights(tmp_path, wanted)


def test_a_tensor_of_no_values_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.empty(0, 3)}, tmp_path / "model.safetensors")
    assert read_weights(tmp_path, {"w": TensorSpec((0, 3), torch.float32)})["w"].shape == (0, 3)


def test_a_buffer_that_is_kept_is_a_weight(tmp_path: Path) -> None:
    """Such as the corrections of experts' scores, in a model that runs by transformers' code."""
    models = make_tiny("bitnet"), make_tiny("bitnet")
    for value, model in enumerate(models):
        model.model.layers[0].mlp.register_buffer("correction", torch.full((3,), float(value)))
        model.model.layers[0].mlp.register_buffer("scratch", torch.full((3,), float(value)), persistent=False)
    runner = make_runner(models[0])
    exchange(runner, kept(models[1], tmp_path))
    mlp: nn.Module = models[0].model.layers[0].mlp
    assert (float(mlp.correction.sum()), float(mlp.scratch.sum())) == (3.0, 0.0)
