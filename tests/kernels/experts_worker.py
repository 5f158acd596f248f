"""Runs the experts' kernels over every case and writes what it found as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from examples import is_full
from linear_worker import summed_in_order
from torch import Tensor

from tree_kernels import linear
from tree_kernels.experts import Chosen, ExpertWeights, Routing, RowExperts
from tree_kernels.experts.layers import with_first
from tree_kernels.experts.torch_backend import GroupedExperts
from tree_kernels.experts.triton_backend import TritonExperts
from tree_kernels.experts.triton_tiling import ExpertTiling, ExpertTilings, ExpertVectorTilings
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.forms import PLAIN_GATE
from tree_kernels.linear.triton_tiling import MAX_BLOCK_ROWS, VectorTiling

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = ExpertTilings(
    ExpertTiling(block_rows=8, block_outputs=32, block_inner=32, warps=4, stages=2),
    ExpertTiling(block_rows=16, block_outputs=16, block_inner=16, warps=4, stages=2),
)
# Of what takes long in the interpreter, once for each kind.
IN_TURN = INTERPRETED and not is_full()
_alone = set[tuple[object, ...]]()
# On a GPU shapes are those of real models, which the definition has no room for; other tests compare the two.
TORCH = RowExperts() if INTERPRETED else GroupedExperts()


@dataclass(frozen=True)
class Sizes:
    """Rows, hidden size, width of an expert, number of experts."""

    rows: int
    hidden: int
    inner: int
    experts: int
    routing: Routing
    dtype: torch.dtype = torch.float32
    tilings: ExpertTilings | None = SMALL
    # Weights go through registers.
    vectors: ExpertVectorTilings | None = None
    corrects: bool = False
    # The router multiplies in fp32.
    wide: bool = False
    # Norms before are done by half, and so is the one behind; or both are LayerNorms.
    layer_norm: bool = False
    residual: bool = True
    multiplier: float = 1.0
    activation: linear.ActivationKind = linear.ActivationKind.SILU
    gate: linear.GateForm = PLAIN_GATE
    gated: bool = True
    # Of experts and of the router.
    biases: bool = False
    # All rows want the same experts, so that one expert has more than a tile.
    crowded: bool = False
    # Rows that are there; None for all.
    present: int | None = None
    invariant: bool = False

    def kernels(self) -> TritonExperts:
        return TritonExperts(DEVICE, tilings=self.tilings, vectors=self.vectors, invariant=self.invariant)


def cases() -> dict[str, Sizes]:
    qwen = Sizes(1, 64, 48, 16, Routing(4))
    # From 33 rows on, more pairs than a program looks through.
    found = {f"{rows} rows": replace(qwen, rows=rows) for rows in (1, 2, 7, 32, 33, 70)}
    found["all rows want the same"] = replace(qwen, rows=20, crowded=True)
    found["all of many rows want the same"] = replace(qwen, rows=40, crowded=True)
    found["odd sizes"] = replace(qwen, rows=5, hidden=40, inner=24, experts=11, routing=Routing(3))
    found["odd sizes, many rows"] = replace(found["odd sizes"], rows=50)
    found["mixtral"] = replace(qwen, rows=6, experts=8, routing=Routing(2), tilings=None)
    found["not renormalised, rounded"] = replace(
        qwen, rows=6, routing=Routing(4, renormalised=False, rounded=True, scaling=2.5)
    )
    groups = Routing(4, "sigmoid", least_sum=1e-20, groups=4, top_groups=2, group_score="top2", scaling=2.5)
    found["deepseek v3"] = replace(qwen, rows=9, experts=32, routing=groups, corrects=True, wide=True)
    found["groups by their best"] = replace(
        qwen, rows=9, experts=32, routing=Routing(3, groups=8, top_groups=3, renormalised=False)
    )
    found["groups of an odd size"] = replace(qwen, rows=9, experts=24, routing=Routing(3, groups=4, top_groups=2))
    found["glm 4.5"] = replace(qwen, rows=4, routing=Routing(4, "sigmoid"), corrects=True, layer_norm=True)
    found["ernie"] = replace(qwen, rows=4, routing=Routing(4, clamped_sum=0.9), corrects=True, residual=False)
    found["granite"] = replace(qwen, rows=4, multiplier=0.22, activation=linear.ActivationKind.GELU_TANH)
    # Gates and ups are about 1 in size, so that some are beyond.
    limited = {"activation": linear.ActivationKind.QUICK_GELU, "gate": linear.GateForm(0.7, offset=1.0)}
    oss = replace(qwen, rows=5, hidden=40, inner=24, experts=11, routing=Routing(3), biases=True, **limited)
    found["gpt-oss"] = oss
    found["gpt-oss, many rows"] = replace(oss, rows=50)
    alone = {"gated": False, "activation": linear.ActivationKind.RELU2}
    found["no gates"] = replace(oss, gate=PLAIN_GATE, **alone)
    found["no gates, many rows"] = replace(qwen, rows=50, **alone)
    found["limits after the activation"] = replace(qwen, rows=5, gate=linear.GateForm(0.4, limits_activated=True))
    found["own tiling"] = replace(qwen, rows=40, hidden=128, tilings=None)
    found["a few of its rows"] = replace(qwen, rows=20, present=3, layer_norm=True)
    found["one of its rows, of groups of an odd size"] = replace(found["groups of an odd size"], present=1)
    found |= vector_cases(qwen)
    found["half precision"] = replace(qwen, rows=5, dtype=torch.float16)
    if not INTERPRETED:
        real = Sizes(1, 2048, 768, 128, Routing(8), torch.bfloat16, None)
        for rows in (1, 4, 16, 17, 64, 256, 700):
            found[f"bf16 qwen3 {rows}"] = replace(real, rows=rows)
        for rows in (17, 64):
            found[f"bf16 qwen3 {rows}, invariant"] = replace(real, rows=rows, invariant=True)
        glm = Routing(8, "sigmoid", scaling=1.0)
        for rows in (1, 64):
            oss = Sizes(rows, 2880, 2880, 32, Routing(4, rounded=True), torch.bfloat16, None, biases=True)
            found[f"bf16 gpt-oss {rows}"] = replace(
                oss, activation=linear.ActivationKind.QUICK_GELU, gate=linear.GateForm(7.0, offset=1.0)
            )
            found[f"bf16 mixtral {rows}"] = Sizes(rows, 4096, 14336, 8, Routing(2), torch.bfloat16, None)
            found[f"bf16 glm {rows}"] = Sizes(
                rows, 4096, 1408, 128, glm, torch.bfloat16, None, corrects=True, wide=True
            )
    return found


def vector_cases(qwen: Sizes) -> dict[str, Sizes]:
    """Through registers: blocks that end past the edges, several blocks a row, and what families do differently."""
    base = replace(qwen, vectors=ExpertVectorTilings(VectorTiling(4, 1, 1), VectorTiling(2, 1, 1)))
    large = ExpertVectorTilings(VectorTiling(2, 2, 1), VectorTiling(4, 1, 1))
    own = {
        "1 row": base,
        "3 rows": replace(base, rows=3),
        "two of three rows": replace(base, rows=3, present=2, layer_norm=True),
        "odd sizes": replace(base, rows=2, hidden=41, inner=25, experts=11, routing=Routing(3)),
        "several blocks": replace(base, hidden=600, inner=300, routing=Routing(1), vectors=large),
        "layer norms": replace(base, layer_norm=True),
        "granite": replace(base, multiplier=0.22, activation=linear.ActivationKind.GELU_TANH, residual=False),
        "no gates": replace(
            base, rows=2, hidden=41, inner=25, gated=False, biases=True, activation=linear.ActivationKind.RELU2
        ),
        "gpt-oss": replace(
            base, rows=2, hidden=41, inner=25, experts=11, routing=Routing(3), biases=True,
            activation=linear.ActivationKind.QUICK_GELU, gate=linear.GateForm(0.7, offset=1.0),
        ),
    }  # fmt: skip
    return {f"vectors: {kind}": sizes for kind, sizes in own.items()}


class Inputs:
    """Random weights and rows of a layer."""

    def __init__(self, sizes: Sizes) -> None:
        self._generator = torch.Generator(DEVICE).manual_seed(sizes.rows)
        self.sizes, dtype = sizes, sizes.dtype
        hidden, inner, experts = sizes.hidden, sizes.inner, sizes.experts
        self.hidden = self.make(sizes.rows, hidden)
        if sizes.crowded:
            self.hidden = self.hidden[:1] + 0.01 * self.hidden
        self.residual = self.make(sizes.rows, hidden) if sizes.residual else None
        bias = self.make(hidden) if sizes.layer_norm else None
        self.norm = linear.Norm(self.make(hidden) + 1, 1e-5, bias, centered=sizes.layer_norm)
        self.router = self.make(experts, hidden, scale=2 * hidden**-0.5)
        self.router = self.router.float() if sizes.wide else self.router
        self.correction = self.make(experts, scale=0.3).float() if sizes.corrects else None
        made = 2 * inner if sizes.gated else inner
        self.gate_up = self.make(experts, made, hidden, scale=hidden**-0.5)
        self.down = self.make(experts, hidden, inner, scale=inner**-0.5)
        self.biases = (self.make(experts, made), self.make(experts, hidden)) if sizes.biases else (None, None)
        self.router_bias = self.make(experts).float() if sizes.biases else None
        self.present: Tensor | None = None
        if sizes.present is not None:
            # Behind other numbers of a plan, at an address that is no multiple of 16 bytes.
            self.present = torch.tensor([0, sizes.present], dtype=torch.int32, device=DEVICE)[1:]
        assert self.down.dtype == dtype

    def make(self, *shape: int, scale: float = 1.0) -> Tensor:
        dtype = torch.float32 if INTERPRETED else self.sizes.dtype
        return (torch.randn(shape, generator=self._generator, device=DEVICE, dtype=dtype) * scale).to(self.sizes.dtype)

    @property
    def weights(self) -> ExpertWeights:
        activation = linear.Activation(self.sizes.activation)
        return ExpertWeights(self.gate_up, self.down, activation, self.sizes.gate, *self.biases)


def kernels(inputs: Inputs, rows: slice = slice(None), *, alone: bool = True) -> dict[str, Tensor]:
    """What the kernels make of a slice of the rows; `alone` without a residual and a norm behind it too."""
    sizes, experts = inputs.sizes, inputs.sizes.kernels()
    start = linear.RowLinears().scale_rows(inputs.hidden[rows], inputs.norm)
    chosen = experts.route(start, inputs.router, inputs.correction, sizes.routing, inputs.router_bias, inputs.present)
    residual = None if inputs.residual is None else inputs.residual[rows]
    mixed, scaled = experts.mix(start, chosen, inputs.weights, residual, inputs.norm, sizes.multiplier)
    assert scaled is not None
    normed = scaled.rows.float() * scaled.scale
    found = {"experts": chosen.experts, "weights": chosen.weights, "mixed": mixed, "normed": normed}
    if len(mixed) > MAX_BLOCK_ROWS or scaled.squares is None:
        # As the next layer reads it.
        form = linear.Activation(linear.ActivationKind.NONE)
        found["read"] = CublasLinears(DEVICE).activated_linear(scaled, inputs.gate_up[0], None, form)
    if alone:
        found["plain"], none = experts.mix(start, chosen, inputs.weights)
        assert none is None
    return found


def wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def references(inputs: Inputs, chosen: Tensor) -> dict[str, Tensor]:
    """The same by PyTorch in fp32, where experts are those that the kernels chose; and what it would have chosen."""
    sizes, norm = inputs.sizes, inputs.norm
    # As the kernels read them: rounded.
    start = linear.RowLinears().scale_rows(inputs.hidden, norm)
    start = replace(start, rows=start.rows.float())
    router = inputs.router.float()
    routing = replace(sizes.routing, rounded=False)
    own = TORCH.route(start, router, inputs.correction, routing, inputs.router_bias, inputs.present)
    rows = with_first(start, inputs.present)
    scores = torch.nn.functional.linear(rows.rows, router) * rows.scale
    scores = scores if inputs.router_bias is None else scores + inputs.router_bias
    scores = scores.sigmoid() if routing.scores == "sigmoid" else scores.softmax(-1)
    weights = scores.gather(-1, chosen.long())
    if routing.renormalised:
        total = weights.sum(-1, keepdim=True) + routing.least_sum
        weights = weights / total.clamp(min=routing.clamped_sum)
    weights = weights * routing.scaling
    taken = Chosen(chosen, weights)
    of = replace(
        inputs.weights, gate_up=inputs.gate_up.float(), down=inputs.down.float(), gate_up_bias=wide(inputs.biases[0]),
        down_bias=wide(inputs.biases[1]),
    )  # fmt: skip
    wide_norm = replace(norm, weight=norm.weight.float(), bias=wide(norm.bias))
    mixed, scaled = TORCH.mix(start, taken, of, wide(inputs.residual), wide_norm, sizes.multiplier)
    assert scaled is not None
    normed = scaled.rows * scaled.scale
    plain = TORCH.mix(start, taken, of)[0]
    read = torch.nn.functional.linear(normed, of.gate_up[0])
    return {"experts": own.experts, "weights": weights, "mixed": mixed, "normed": normed, "plain": plain, "read": read}


def errors_of(sizes: Sizes) -> dict[str, float]:
    """Relative errors; of experts the share that differs, which near ties may."""
    inputs = Inputs(sizes)
    # Its products are those of the other, and differ with tilings, edges of blocks and more pairs than a program's.
    own = sizes.rows > 32, sizes.hidden, sizes.inner, sizes.tilings, sizes.vectors
    actual = kernels(inputs, alone=not IN_TURN or own not in _alone)
    _alone.add(own)
    expected = references(inputs, actual["experts"])
    errors = {"experts": float((actual["experts"] != expected["experts"]).float().mean())}
    for name in actual.keys() - {"experts"}:
        errors[name] = float((actual[name].float() - expected[name]).norm() / expected[name].norm())
    return errors


def rows_that_others_change(sizes: Sizes) -> list[str]:
    """Outputs of single rows and of parts that differ from those among all rows."""
    inputs = Inputs(sizes)
    together, changed = kernels(inputs), set()
    for first, last in ((0, 1), (sizes.rows - 1, sizes.rows), (3, 8), (0, sizes.rows // 2 + 1)):
        for name, alone in kernels(inputs, slice(first, last)).items():
            # The product of the next layer is cuBLAS's.
            if name != "read" and not torch.equal(alone, together[name][first:last]):
                changed.add(name)
    return sorted(changed)


def main() -> None:
    chosen = cases()
    invariant = {"own tiling": replace(chosen["own tiling"], invariant=True)}
    invariant |= {name: sizes for name, sizes in chosen.items() if sizes.invariant and sizes.rows > 16}
    with summed_in_order() if INTERPRETED else nullcontext():
        changed = {name: rows_that_others_change(sizes) for name, sizes in invariant.items()}
    found = {
        "errors": {name: errors_of(sizes) for name, sizes in chosen.items()},
        "changed": changed,
        "empty": {name: list(tensor.shape) for name, tensor in kernels(Inputs(chosen["7 rows"]), slice(0, 0)).items()},
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
