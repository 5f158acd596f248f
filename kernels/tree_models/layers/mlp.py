"""Feed-forward layers: gated or plain, by activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.linear import Activation as LaunchedActivation
from tree_kernels.linear import ActivationKind, GateForm
from tree_kernels.linear.layers import gated
from tree_models.layers.linear import Adapter, Linear
from tree_models.layers.placing import Placement
from tree_models.slots import Copy, TensorSpec, WeightSlot
from tree_models.spec import Activation, GateSpec, MLPSpec

FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda rows: functional.relu(rows).square(),
    "quick_gelu": lambda rows: rows * torch.sigmoid(1.702 * rows),
}


def activation_of(activation: Activation) -> LaunchedActivation:
    """The activation as launches take it. Raises `ValueError` for one that has numbers of its own, or that they have
    not."""
    return LaunchedActivation(ActivationKind(activation))


def gate_form_of(gate: GateSpec) -> GateForm:
    """What is done around an activation, as launches take it."""
    return GateForm(gate.limit, gate.limits_activated, gate.offset)


class XIELU(nn.Module):
    """Apertus' activation (arXiv 2411.13010), whose numbers are weights: [.., I] -> [.., I]."""

    # As published; alphas are kept in front of a softplus.
    _NAMES = ("alpha_p", "alpha_n", "beta", "eps")

    def __init__(self, place: Placement) -> None:
        super().__init__()
        # Alpha of positive numbers, alpha of negative ones, beta, epsilon.
        self.numbers = place.empty(len(self._NAMES), dtype=torch.float32)
        self._dtype = place.dtype

    def forward(self, rows: Tensor) -> Tensor:
        """[.., I] -> [.., I]."""
        positive, negative, beta, epsilon = self.numbers.unbind()
        wide = rows.float()
        below = (torch.expm1(torch.minimum(wide, epsilon)) - wide) * negative
        return (torch.where(wide > 0, positive * wide * wide, below) + beta * wide).to(rows.dtype)

    def slots(self, name: str, copy: Copy) -> Iterator[WeightSlot]:
        """The slot of the four numbers."""

        def write(tensors: Sequence[Tensor]) -> None:
            positive, negative, beta, epsilon = (tensor.float().view(1) for tensor in tensors)
            alphas = functional.softplus(positive), beta + functional.softplus(negative)
            copy(self.numbers, torch.cat([*alphas, beta, epsilon]))

        shapes = zip(self._NAMES, ((1,), (1,), (), ()), strict=True)
        yield WeightSlot({f"{name}.{own}": TensorSpec(shape, self._dtype) for own, shape in shapes}, write)


class MLP(nn.Module):
    """See `MLPSpec`. Gate and up are one product."""

    def __init__(self, spec: MLPSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.spec = spec
        parts = [spec.width] * (2 if spec.gated else 1)
        self.gate_up = Linear(hidden_size, parts, place, bias=spec.bias)
        self.down = Linear(spec.width, [hidden_size], place, bias=spec.bias)
        self._gate_form, self._ranks = gate_form_of(spec.gate), place.ranks
        self.adapter: Adapter | None = None  # of the first product
        self.xielu = XIELU(place) if spec.activation == "xielu" else None

    def forward(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        product: Tensor = self.gate_up(rows)
        product = product if self.adapter is None else product + self.adapter(rows)
        activation = self.xielu or FUNCTIONS[self.spec.activation]
        if self.spec.gated:
            gate, up = product.chunk(2, dim=-1)
            gate = gate if self.spec.gate.scale == 1.0 else gate * self.spec.gate.scale
            gate = gate if self.spec.cutoff is None else self._above_cutoff(gate, self.spec.cutoff)
            product = gated(gate, up, activation, self._gate_form)
        else:
            product = activation(product)
        output: Tensor = self.down(product)
        return output if self.spec.scale == 1.0 else output * self.spec.scale

    def _above_cutoff(self, gate: Tensor, deviations: float) -> Tensor:
        """Gates [R, I] as `MLPSpec.cutoff` has them, by the mean and the deviation of all ranks' numbers."""
        wide, ranks = gate.float(), 1 if self._ranks is None else self._ranks.size
        mean = self._mean(wide, ranks)
        deviation = self._mean((wide - mean).square(), ranks).sqrt()
        return functional.relu(wide - (mean + deviations * deviation)).to(gate.dtype)

    def _mean(self, numbers: Tensor, ranks: int) -> Tensor:
        """[R, 1] of numbers [R, I] of every rank."""
        mean = numbers.mean(-1, keepdim=True)
        return mean if self._ranks is None else self._ranks.summed(mean) / ranks

    def slots(self, gate_up: Sequence[str], down: str, activation: str, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the tensors with these whole names; without a gate, of the last of `gate_up`."""
        yield from self.gate_up.slots(gate_up if self.spec.gated else gate_up[-1:], copy)
        yield from self.down.slots([down], copy)
        if self.xielu is not None:
            yield from self.xielu.slots(activation, copy)
