"""Runs the linear kernels over every case and writes what it found as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from examples import is_full
from torch import Tensor

from tree_kernels import linear
from tree_kernels.conditional_launch import launched_if_positive
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.triton_backend import TritonLinears
from tree_kernels.linear.triton_tiling import LinearTiling, VectorTiling
from tree_kernels.linear.vector_backend import VectorLinears

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EPSILON = 1e-5
SMALL = LinearTiling(block_rows=16, block_outputs=16, block_inner=32, splits=1, warps=4, stages=3, ahead=2)
TORCH = linear.RowLinears()
# Cases whose launches are made conditional too, those that the interpreter runs in `make test` at the end.
CONDITIONAL = ("15 rows", "parts", "parts, int8", "tensor maps, few rows, parts", "few: qwen3.5")
# Of combinations that take long, values of each.
IN_TURN = INTERPRETED and not is_full()
# Cases that the interpreter runs in `make test-full` alone: more programs of what others launch with the same flags.
LEFT_OUT = ("40 rows", "17 rows, int8", "tensor maps, 130 rows", "few: qwen3 by tensor maps", "cublas 129 rows")


@dataclass(frozen=True)
class Sizes:
    """Rows, hidden size, query heads, heads of keys, width of a head, intermediate size."""

    rows: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    bias: bool = False
    dtype: torch.dtype = torch.float32
    tiling: LinearTiling | None = SMALL
    invariant: bool = False
    # The products are the library's.
    cublas: bool = False
    # One row's, through registers; by this tiling or by its own.
    one_row: bool = False
    vectors: VectorTiling | None = None
    # By what `row_linears` chooses: on Hopper, rings of weights.
    chosen: bool = False
    # Weights are in int8.
    int8: bool = False
    # What families do differently; see `tree_kernels.linear.forms`.
    layer_norm: bool = False
    post_norm: bool = False
    multiplier: float = 1.0
    head_norms: str = "none"
    rotary: int | None = None
    interleaved: bool = False
    value_norms: bool = False
    # Keys and values are those of a launch that makes no queries.
    keys_alone: bool = False
    activation: linear.ActivationKind = linear.ActivationKind.SILU

    def linears(self) -> TritonLinears:
        if self.cublas:
            return CublasLinears(DEVICE)
        if self.one_row:
            return VectorLinears(DEVICE, vectors=self.vectors)
        if self.chosen:
            chosen = linear.row_linears(DEVICE)
            assert isinstance(chosen, TritonLinears)
            return chosen
        return TritonLinears(DEVICE, invariant=self.invariant, tiling=self.tiling)


def cases() -> dict[str, Sizes]:
    tiny = Sizes(3, 48, 3, 1, 16, 80)
    found = {f"{rows} rows": replace(tiny, rows=rows) for rows in (1, 15, 16, 17, 40)}
    found["bias"] = replace(tiny, bias=True)
    found["blocks that end past the edge"] = replace(tiny, hidden=40, inner=72)
    found["wider tile"] = replace(tiny, width=32, tiling=LinearTiling(16, 32, 64, 1, 4, 2, 0))
    split = LinearTiling(16, 16, 16, 4, 4, 2, 0)
    found["parts"] = replace(tiny, rows=17, hidden=64, heads=4, inner=128, tiling=split)
    found["own tiling"] = replace(tiny, rows=33, width=32, tiling=None)
    maps = LinearTiling(64, 32, 32, 1, 4, 3, 0, mapped=True)
    for rows in (3, 40, 130):
        found[f"tensor maps, {rows} rows"] = replace(tiny, rows=rows, width=32, tiling=maps, bias=rows == 40)
    shared = replace(maps, splits=2, ahead=1)
    found["tensor maps, parts"] = replace(tiny, rows=40, hidden=64, heads=4, inner=128, width=32, tiling=shared)
    narrow = LinearTiling(16, 32, 32, 2, 4, 3, 0, mapped=True)
    found["tensor maps, few rows, parts"] = replace(
        tiny, rows=13, hidden=64, heads=4, inner=128, width=32, tiling=narrow
    )
    found["tensor maps past the edge"] = replace(tiny, hidden=40, inner=72, tiling=maps)
    found["tensor maps not for int8"] = replace(tiny, tiling=replace(maps, block_rows=16), int8=True)
    found["half precision"] = replace(tiny, dtype=torch.float16)
    for name in ("16 rows", "17 rows", "bias", "blocks that end past the edge", "parts", "own tiling"):
        found[f"{name}, int8"] = replace(found[name], int8=True)
    found["parts, int8"] = replace(found["parts, int8"], tiling=replace(split, block_inner=32, splits=2))
    found["half precision, int8"] = replace(tiny, dtype=torch.float16, int8=True)
    found |= form_cases(tiny)
    found |= cublas_cases()
    found |= vector_cases(tiny)
    if not INTERPRETED:
        found |= ring_cases()
        small, large = Sizes(1, 576, 9, 3, 64, 1536), Sizes(1, 4096, 32, 8, 128, 14336)
        for name, sizes in (("smollm2", small), ("llama", large)):
            for rows in (1, 5, 16, 32, 64, 130):
                # Compiling takes longer than running.
                for invariant in (False, True) if rows in (5, 64, 130) else (False,):
                    one = replace(sizes, rows=rows, bias=rows == 5, dtype=torch.bfloat16, tiling=None)
                    found[f"bf16 {name} {rows} {invariant}"] = replace(one, invariant=invariant)
                found[f"bf16 {name} {rows}, int8"] = replace(one, int8=True, invariant=False)
    return found


def form_cases(tiny: Sizes) -> dict[str, Sizes]:
    """What families do differently, by kernels of few rows and behind the library's products."""
    kinds = linear.ActivationKind
    found: dict[str, Sizes] = {}
    # Behind the library's products rows of many programs are of one form, where they take long: `cublas_cases`.
    rows = 9 if IN_TURN else 67
    for name, base in (("few", tiny), ("cublas", replace(tiny, rows=rows, cublas=True))):
        wide = replace(base, heads=4, kv_heads=2, width=32)
        own = {
            "qwen3": replace(wide, head_norms="heads", hidden=64),
            "qwen3 of half a tile": replace(wide, head_norms="heads", width=16, bias=True),
            "norms of odd heads": replace(wide, head_norms="heads", width=48),
            "olmo2": replace(wide, head_norms="all", post_norm=True, heads=3, kv_heads=1, bias=True),
            "glm4": replace(wide, rotary=16, interleaved=True, post_norm=True, bias=True),
            "cohere": replace(wide, interleaved=True, layer_norm=True),
            "phi": replace(wide, rotary=24),
            "normed and partly rotated": replace(wide, rotary=8, interleaved=True, head_norms="heads"),
            "no rotary embedding": replace(wide, rotary=0),
            "gemma4": replace(wide, head_norms="heads", value_norms=True, post_norm=True, rotary=8),
            "gemma4, odd heads": replace(wide, head_norms="heads", value_norms=True, width=48),
            "gemma4 without keys": replace(wide, head_norms="heads", value_norms=True, kv_heads=0),
            "keys alone": replace(wide, bias=True, keys_alone=True),
            "normed keys alone": replace(wide, head_norms="heads", hidden=64, keys_alone=True),
            "starcoder2": replace(wide, layer_norm=True, bias=True, activation=kinds.GELU_TANH),
            "sandwich of layer norms": replace(wide, layer_norm=True, post_norm=True, bias=True),
            "granite": replace(base, multiplier=0.22, bias=True),
            "gelu": replace(base, activation=kinds.GELU, bias=True),
            "relu": replace(base, activation=kinds.RELU),
            "relu2": replace(base, activation=kinds.RELU2),
            "no activation": replace(base, activation=kinds.NONE),
            "xielu": replace(base, activation=kinds.XIELU),
            "sigmoid": replace(base, activation=kinds.SIGMOID, bias=True),
            "softplus": replace(base, activation=kinds.SOFTPLUS),
        }
        found |= {f"{name}: {kind}": sizes for kind, sizes in own.items()}
    split = LinearTiling(16, 16, 32, 1, 4, 2, 0)
    found["few: parts of normed heads"] = replace(found["few: qwen3"], rows=17, hidden=128, tiling=split)
    found["few: qwen3, own tiling"] = replace(found["few: qwen3"], rows=40, hidden=128, tiling=None)
    # Norms of such heads take a launch of their own.
    wide = replace(found["few: qwen3"], rows=9, heads=2, kv_heads=1, width=256, rotary=64, tiling=None)
    found["few: qwen3.5"] = wide
    found["few: qwen3, int8"] = replace(found["few: qwen3"], int8=True)
    found["few: relu2 by tensor maps"] = replace(
        found["few: relu2"], tiling=LinearTiling(64, 32, 32, 1, 4, 3, 0, mapped=True)
    )
    found["few: qwen3 by tensor maps"] = replace(
        found["few: qwen3"], rows=70, hidden=128, tiling=LinearTiling(64, 32, 32, 2, 4, 3, 0, mapped=True)
    )
    found["few: keys alone by tensor maps"] = replace(found["few: qwen3 by tensor maps"], keys_alone=True)
    found["half precision: olmo2"] = replace(found["few: olmo2"], dtype=torch.float16)
    if not INTERPRETED:
        qwen = Sizes(1, 4096, 32, 8, 128, 12288, False, torch.bfloat16, None, head_norms="heads")
        for rows in (1, 16, 64):
            found[f"bf16 qwen3 {rows}"] = replace(qwen, rows=rows)
        found["bf16 qwen3 64, invariant"] = replace(qwen, rows=64, invariant=True)
        found["bf16 cublas qwen3 130"] = replace(qwen, rows=130, cublas=True)
        found["bf16 olmo2 32"] = replace(qwen, rows=32, head_norms="all", post_norm=True)
    return found


def vector_cases(tiny: Sizes) -> dict[str, Sizes]:
    """Of one row: blocks that end past the edges, several blocks a row, and what families do differently."""
    kinds = linear.ActivationKind
    base = replace(tiny, rows=1, heads=4, kv_heads=2, width=32, one_row=True, vectors=VectorTiling(4, 1, 1))
    own = {
        "past the edges": replace(base, hidden=40, inner=73),
        "several blocks": replace(base, hidden=600, vectors=VectorTiling(8 if IN_TURN else 2, 2, 1), bias=True),
        "whole blocks": replace(base, hidden=512, inner=512, vectors=VectorTiling(8, 1, 1)),
        "qwen3": replace(base, head_norms="heads", hidden=64),
        "norms of all heads": replace(base, head_norms="all", post_norm=True, bias=True),
        "partly rotated": replace(base, rotary=8, interleaved=True, head_norms="heads"),
        "no rotary embedding": replace(base, rotary=0),
        "layer norms": replace(base, layer_norm=True, bias=True, activation=kinds.GELU_TANH),
        "granite": replace(base, multiplier=0.22, bias=True, activation=kinds.XIELU),
        "sigmoid": replace(base, activation=kinds.SIGMOID),
        "gemma4": replace(base, head_norms="heads", value_norms=True),
        "gemma4 without keys": replace(base, head_norms="heads", value_norms=True, kv_heads=0),
        "keys alone": replace(base, head_norms="heads", hidden=64, bias=True, keys_alone=True),
        "int8": replace(base, int8=True),
        "not of two rows": replace(base, rows=2),
    }
    found = {f"vectors: {kind}": sizes for kind, sizes in own.items()}
    if not INTERPRETED:
        large = Sizes(1, 4096, 32, 8, 128, 14336, False, torch.bfloat16, None, one_row=True)
        found["bf16 vectors llama"] = large
        found["bf16 vectors llama, bias"] = replace(large, bias=True)
        found["bf16 vectors qwen3"] = replace(large, hidden=2048, kv_heads=4, inner=12288, head_norms="heads")
    return found


def ring_cases() -> dict[str, Sizes]:
    """Of a GPU: what rings of weights compute there, and sizes beside them that they leave to other kernels."""
    kinds = linear.ActivationKind
    llama = Sizes(1, 4096, 32, 8, 128, 14336, False, torch.bfloat16, None, chosen=True)
    qwen = replace(llama, inner=12288, head_norms="heads")
    found = {f"bf16 ring llama {rows}": replace(llama, rows=rows, bias=rows == 5) for rows in (5, 8, 9, 17, 32, 64, 65)}
    found |= {f"bf16 ring qwen3 {rows}": replace(qwen, rows=rows, bias=rows == 16) for rows in (7, 16, 33)}
    found["bf16 ring, gelu"] = replace(llama, rows=12, activation=kinds.GELU_TANH, multiplier=0.22)
    found["bf16 ring, another activation"] = replace(llama, rows=12, activation=kinds.GELU)
    found["bf16 ring, partly rotated"] = replace(llama, rows=12, rotary=64)
    found["bf16 ring, wide sums"] = replace(llama, rows=12, hidden=8192, heads=64)
    found["bf16 ring, int8"] = replace(llama, rows=12, int8=True)
    return found


def cublas_cases() -> dict[str, Sizes]:
    """Of the library's products: groups of query heads, widths that fill no block, rows of one program and of many."""
    base = Sizes(5, 48, 3, 1, 16, 80, cublas=True)
    found = {f"cublas {rows} rows": replace(base, rows=rows, bias=rows % 2 == 1) for rows in (1, 2, 67, 129)}
    for width, kv_heads in ((64, 1), (128, 2)):
        for group in (1, 2, 3, 4, 8):
            sizes = replace(base, heads=kv_heads * group, kv_heads=kv_heads, width=width, bias=group == 4)
            found[f"cublas {group} heads a key of {width}"] = sizes
    found["cublas many heads"] = replace(base, heads=24, kv_heads=4)
    found["cublas odd widths"] = replace(base, hidden=40, width=48, inner=1300)
    found["cublas more columns than a block"] = replace(base, hidden=2304)
    for dtype in (torch.float16, torch.bfloat16):
        half = replace(base, dtype=dtype, rows=9, hidden=96, heads=8, width=64, inner=128)
        for bias in (False, True):
            name = str(dtype).removeprefix("torch.").replace("bfloat16", "bf16")
            found[f"{name} cublas {bias}"] = replace(half, bias=bias)
    if not INTERPRETED:
        for rows in (65, 1600):
            sizes = Sizes(rows, 4096, 32, 8, 128, 14336, rows == 65, torch.bfloat16, cublas=True)
            found[f"bf16 cublas llama {rows}"] = sizes
    return found


class Inputs:
    """Random weights and rows of a layer."""

    def __init__(self, sizes: Sizes) -> None:
        self._generator = torch.Generator().manual_seed(sizes.rows)
        self._dtype = sizes.dtype
        self.sizes = sizes
        total = (sizes.heads + 2 * sizes.kv_heads) * sizes.width
        self.hidden = self.make(sizes.rows, sizes.hidden)
        self.attended = self.make(sizes.rows, sizes.heads * sizes.width)
        self.embedding = self.make(2 * sizes.inner, sizes.hidden, scale=sizes.hidden**-0.5)
        self.qkv = self.weight(total, sizes.hidden)
        self.out = self.weight(sizes.hidden, sizes.heads * sizes.width)
        self.gate_up = self.weight(2 * sizes.inner, sizes.hidden)
        self.bias = self.make(total) if sizes.bias else None
        self.out_bias = self.make(sizes.hidden) if sizes.bias else None
        self.norm = self.norm_of(sizes.hidden, sizes.layer_norm)
        self.angles = self.make(sizes.rows, sizes.width if sizes.rotary is None else sizes.rotary).float()
        self.frequencies = self.make(sizes.width).float().abs()
        self.gate_up_bias = self.make(2 * sizes.inner) if sizes.bias else None
        self.sum = linear.SumForm(self.norm_of(sizes.hidden, False) if sizes.post_norm else None, sizes.multiplier)
        if sizes.post_norm and sizes.layer_norm:
            self.sum = linear.SumForm(self.norm_of(sizes.hidden, True), sizes.multiplier)
        query_norm = key_norm = None
        if sizes.head_norms != "none":
            wide = sizes.head_norms == "all"
            query_norm, key_norm = (
                self.norm_of(count * sizes.width if wide else sizes.width, False)
                for count in (sizes.heads, sizes.kv_heads)
            )
            key_norm = replace(key_norm, epsilon=0.1)
        self.head_form = linear.HeadForm(query_norm, key_norm, sizes.interleaved, 0.2 if sizes.value_norms else 0.0)
        numbers = torch.tensor([0.8, 0.6, 0.5, -1e-6], device=DEVICE)
        has_numbers = sizes.activation is linear.ActivationKind.XIELU
        self.activation = linear.Activation(sizes.activation, numbers if has_numbers else None)
        # Slots that nothing is written to hold NaN, so that two caches differ where one was.
        self.slots = torch.randperm(sizes.rows + 5, generator=self._generator)[: sizes.rows].to(DEVICE)

    def make(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(DEVICE, self._dtype)

    def norm_of(self, width: int, layer_norm: bool) -> linear.Norm:
        bias = self.make(width) if layer_norm else None
        return linear.Norm(self.make(width) + 1, EPSILON, bias, centered=layer_norm)

    def weight(self, outputs: int, inner: int) -> linear.Weight:
        made = self.make(outputs, inner, scale=self.sizes.hidden**-0.5)
        return linear.Int8Weight.of(made) if self.sizes.int8 else made

    def heads(self, rows: slice = slice(None)) -> linear.HeadRows:
        shape = (self.sizes.rows + 5, 1, self.sizes.kv_heads, self.sizes.width)
        keys, values = (torch.full(shape, 7.0, dtype=self._dtype, device=DEVICE) for _ in range(2))
        cosines, sines = (turn[rows].to(self._dtype) for turn in (self.angles.cos(), self.angles.sin()))
        return linear.HeadRows(cosines, sines, self.slots[rows], keys, values)


def head_input_of(linears: linear.RowLinears, inputs: Inputs, rows: slice = slice(None)) -> dict[str, Tensor]:
    """What a draft head's first layer reads, where the hidden rows are its features; the definition's in fp32."""
    device, dtype = (torch.device("cpu"), torch.float32) if linears is TORCH else (DEVICE, inputs.sizes.dtype)
    features, embedding, weight = (
        one.to(device, dtype) for one in (inputs.hidden, inputs.embedding, inputs.norm.weight)
    )  # fmt: skip
    count = torch.arange(inputs.sizes.rows, dtype=torch.int32, device=device)
    tokens, positions = count * 7 % len(embedding), count * 61 + 1
    norms = linear.Norm(weight, EPSILON), linear.Norm(weight * 0.5, 1e-3)
    of = linear.HeadInputs(embedding, *norms, inputs.frequencies.to(device), 1.25)
    found = linears.head_input(tokens[rows], features[rows], positions[rows], of)
    # The same rows' features, taken from all in another order.
    sources = (count.long() * 3 + 1)[rows] % len(features)
    taken = linears.head_input(tokens[rows], features, positions[rows], of, sources)
    of_rows = {"joined": found.rows, "cosines": found.cosines, "sines": found.sines}
    return {**of_rows, "joined taken": taken.rows, "taken": taken.features}


def kernels(inputs: Inputs, rows: slice = slice(None)) -> dict[str, Tensor]:
    """What every kernel makes of a slice of the rows."""
    sizes = inputs.sizes
    triton = sizes.linears()
    hidden, attended, heads = inputs.hidden[rows], inputs.attended[rows], inputs.heads(rows)
    start = triton.scale_rows(hidden, inputs.norm)
    heads = replace(heads, queries=hidden.new_zeros(1 + len(hidden), sizes.heads, sizes.width)[1:])
    query = triton.rotary_linear(start, inputs.qkv, inputs.bias, heads, inputs.head_form)
    assert query is heads.queries
    if sizes.keys_alone:
        heads, first = inputs.heads(rows), sizes.heads * sizes.width
        bias = None if inputs.bias is None else inputs.bias[first:]
        assert isinstance(inputs.qkv, Tensor)
        assert not triton.rotary_linear(start, inputs.qkv[first:], bias, heads, inputs.head_form).numel()
    added, scaled = triton.add_linear(attended, inputs.out, inputs.out_bias, hidden, inputs.norm, inputs.sum)
    assert scaled is not None
    plain, none = triton.add_linear(attended, inputs.out)
    assert none is None
    mlp = scaled, inputs.gate_up, inputs.gate_up_bias, inputs.activation
    apart, copied = hidden.new_zeros(len(hidden), 2, hidden.shape[1]).unbind(1)
    triton.copy_rows(hidden, copied)
    return {
        "norm": triton.norm_rows(hidden, inputs.norm, apart),
        "copied": copied,
        **head_input_of(triton, inputs, rows),
        "query": query,
        "keys": heads.key_cache,
        "values": heads.value_cache,
        "added": added,
        "plain": plain,
        "gated": triton.gated_linear(*mlp),
        "activated": triton.activated_linear(*mlp),
    }


def on_cpu(weight: linear.Weight) -> linear.Weight:
    """The weight on a CPU, in fp32 where it is not in int8."""
    if isinstance(weight, linear.Int8Weight):
        return linear.Int8Weight(weight.words.cpu(), weight.row_scales.cpu())
    return weight.cpu().float()


def norm_on_cpu(norm: linear.Norm | None) -> linear.Norm | None:
    if norm is None:
        return None
    bias = None if norm.bias is None else norm.bias.cpu().float()
    return replace(norm, weight=norm.weight.cpu().float(), bias=bias)


def references(inputs: Inputs) -> dict[str, Tensor]:
    """The same on a CPU in fp32."""
    rows, attended, norm = inputs.hidden.cpu().float(), inputs.attended.cpu().float(), norm_on_cpu(inputs.norm)
    assert norm is not None
    heads = inputs.heads()
    heads = linear.HeadRows(
        heads.cosines.cpu().float(), heads.sines.cpu().float(), heads.slots.cpu(),
        heads.key_cache.cpu().float(), heads.value_cache.cpu().float(),
    )  # fmt: skip
    biases = inputs.bias, inputs.out_bias, inputs.gate_up_bias
    bias, out_bias, gate_up_bias = (None if one is None else one.cpu().float() for one in biases)
    out = on_cpu(inputs.out)
    form, numbers = inputs.sum, inputs.activation.parameters
    form = replace(form, norm=norm_on_cpu(form.norm))
    added, scaled = TORCH.add_linear(attended, out, out_bias, rows, norm, form)
    assert scaled is not None
    head_form = inputs.head_form
    head_form = replace(
        head_form, query_norm=norm_on_cpu(head_form.query_norm), key_norm=norm_on_cpu(head_form.key_norm)
    )
    activation = replace(inputs.activation, parameters=None if numbers is None else numbers.cpu())
    mlp = scaled, on_cpu(inputs.gate_up), gate_up_bias, activation
    start = TORCH.scale_rows(rows, norm)
    return {
        "norm": TORCH.norm_rows(rows, norm),
        "copied": rows,
        **head_input_of(TORCH, inputs),
        "query": TORCH.rotary_linear(start, on_cpu(inputs.qkv), bias, heads, head_form),
        "keys": heads.key_cache,
        "values": heads.value_cache,
        "added": added,
        "plain": TORCH.add_linear(attended, out)[0],
        "gated": TORCH.gated_linear(*mlp),
        "activated": TORCH.activated_linear(*mlp),
    }


def errors_of(sizes: Sizes) -> dict[str, float]:
    inputs = Inputs(sizes)
    actual, expected = kernels(inputs), references(inputs)
    return {
        name: float((actual[name].cpu().float() - expected[name]).norm() / expected[name].norm())
        for name in expected
        # A layer without keys has none.
        if expected[name].numel()
    }


@contextmanager
def summed_in_order() -> Iterator[None]:
    """The interpreter multiplies with NumPy, whose BLAS sums a row in an order that hangs on the row's place on some
    processors. What the kernels do is not to hang on that."""
    of_blas = np.matmul

    def product(left: Any, right: Any, dtype: Any = None) -> Any:
        return np.add.reduce(left[..., :, :, None] * right[..., None, :, :], axis=-2, dtype=dtype)

    np.matmul = product
    try:
        yield
    finally:
        np.matmul = of_blas


def rows_that_others_change(sizes: Sizes) -> list[str]:
    """Outputs of single rows and of parts that differ from those among all rows. The caches are left out."""
    inputs = Inputs(sizes)
    together, changed = kernels(inputs), set()
    for first, last in ((0, 1), (sizes.rows - 1, sizes.rows), (3, 8), (0, sizes.rows // 2 + 1)):
        for name, alone in kernels(inputs, slice(first, last)).items():
            if name not in ("keys", "values") and not torch.equal(alone, together[name][first:last]):
                changed.add(name)
    return sorted(changed)


def shapes_without_rows(sizes: Sizes) -> dict[str, list[int]]:
    """Shapes of what every kernel makes of no rows; the caches, which stay as they are, are left out."""
    made = kernels(Inputs(sizes), slice(0, 0))
    return {name: list(tensor.shape) for name, tensor in made.items() if name not in ("keys", "values")}


def rows_without_a_slot_are_not_written(sizes: Sizes) -> bool:
    inputs = Inputs(sizes)
    heads = inputs.heads()
    slots = heads.slots.clone()
    slots[4:] = -1
    # As a captured step has them.
    slots = slots.to(torch.int32)
    heads = replace(heads, slots=slots)
    triton = sizes.linears()
    triton.rotary_linear(triton.scale_rows(inputs.hidden, inputs.norm), inputs.qkv, None, heads)
    written = slots[:4].tolist()
    untouched = [slot for slot in range(inputs.sizes.rows + 5) if slot not in written]
    caches = heads.key_cache, heads.value_cache
    return all(bool((one[untouched] == 7.0).all() and (one[written] != 7.0).all()) for one in caches)


def conditions_are_kept(sizes: Sizes) -> bool:
    """Whether launches write the same as without a condition where it holds, and nothing where it does not."""
    inputs = Inputs(sizes)
    plain, condition = kernels(inputs), torch.ones(1, dtype=torch.int32, device=DEVICE)
    with launched_if_positive(condition):
        same = kernels(inputs)
        condition.zero_()
        heads, into = inputs.heads(), torch.full_like(inputs.hidden, 7.0)
        triton = sizes.linears()
        start = triton.scale_rows(inputs.hidden, inputs.norm)
        triton.rotary_linear(start, inputs.qkv, None, heads, inputs.head_form)
        triton.add_linear(inputs.attended, inputs.out, residual=inputs.hidden, into=into)
    untouched = all(bool((one == 7.0).all()) for one in (heads.key_cache, heads.value_cache, into))
    return untouched and all(torch.equal(same[name], plain[name]) for name in plain)


def main() -> None:
    chosen = cases()
    invariant = {"own tiling": replace(chosen["own tiling"], invariant=True)}
    invariant |= {name: sizes for name, sizes in chosen.items() if sizes.invariant and sizes.rows > 5}
    with summed_in_order() if INTERPRETED else nullcontext():
        changed = {name: rows_that_others_change(sizes) for name, sizes in invariant.items()}
    found = {
        "errors": {name: errors_of(sizes) for name, sizes in chosen.items() if not (IN_TURN and name in LEFT_OUT)},
        "changed": changed,
        "empty": {name: shapes_without_rows(chosen[name]) for name in ("15 rows", "parts", "cublas 67 rows")},
        "conditional": {name: conditions_are_kept(chosen[name]) for name in CONDITIONAL[2 * IN_TURN :]},
        "unslotted": all(rows_without_a_slot_are_not_written(chosen[name]) for name in ("15 rows", "cublas 67 rows")),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
