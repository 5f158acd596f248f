"""Feed-forward layers: gated or plain, by activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.layers.linear import Linear
from tree_models.layers.placing import Placement
from tree_models.slots import Copy, WeightSlot, in_place
from tree_models.spec import Activation, MLPSpec

FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda rows: functional.relu(rows).square(),
}


class XIELU(nn.Module):
    """Apertus' activation (arXiv 2411.13010), whose numbers are weights: [.., I] -> [.., I]."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = place.empty(1), place.empty(1)
        self.beta, self.eps = place.empty(), place.empty()

    def forward(self, rows: Tensor) -> Tensor:
        """[.., I] -> [.., I]."""
        positive, negative = functional.softplus(self.alpha_p), self.beta + functional.softplus(self.alpha_n)
        left = (torch.expm1(torch.minimum(rows, self.eps)) - rows) * negative
        return torch.where(rows > 0, positive * rows * rows, left) + self.beta * rows

    def slots(self, name: str, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the four numbers."""
        for own, memory in self.named_parameters():
            yield in_place(f"{name}.{own}", memory, copy)


class MLP(nn.Module):
    """See `MLPSpec`. Gate and up are one product."""

    def __init__(self, spec: MLPSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.spec = spec
        parts = [spec.width] * (2 if spec.gated else 1)
        self.gate_up = Linear(hidden_size, parts, place, bias=spec.bias)
        self.down = Linear(spec.width, [hidden_size], place, bias=spec.bias)
        self.xielu = XIELU(place) if spec.activation == "xielu" else None

    def forward(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        product: Tensor = self.gate_up(rows)
        activation = self.xielu or FUNCTIONS[self.spec.activation]
        if self.spec.gated:
            gate, up = product.chunk(2, dim=-1)
            product = activation(gate) * up
        else:
            product = activation(product)
        output: Tensor = self.down(product)
        return output

    def slots(self, gate_up: Sequence[str], down: str, activation: str, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the tensors with these whole names; without a gate, of the last of `gate_up`."""
        yield from self.gate_up.slots(gate_up if self.spec.gated else gate_up[-1:], copy)
        yield from self.down.slots([down], copy)
        if self.xielu is not None:
            yield from self.xielu.slots(activation, copy)
