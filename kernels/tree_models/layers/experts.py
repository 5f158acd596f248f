"""A mixture of experts: a router, experts of one width, and perhaps one for every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.layers.linear import Linear
from tree_models.layers.mlp import FUNCTIONS, MLP
from tree_models.layers.placing import Placement
from tree_models.layers.router import Router
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, in_place, stacked
from tree_models.spec import Activation, ExpertsSpec


class MixtureOfExperts(nn.Module):
    """See `ExpertsSpec`: [R, H] -> [R, H]."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, layer: int, place: Placement) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.router = Router(spec, hidden_size, place)
        self.gate_up = place.empty(spec.count, 2 * spec.width, hidden_size)
        self.down = place.empty(spec.count, hidden_size, spec.width)
        self.shared = MLP(spec.shared, hidden_size, place) if spec.shared else None
        self.shared_gate = Linear(hidden_size, [1], place) if spec.shared_gate else None

    def forward(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        chosen, weights = self.router(rows)
        output = mixed(rows, chosen, weights, self.gate_up, self.down, self.spec.activation)
        if self.shared is not None:
            shared: Tensor = self.shared(rows)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(rows)) * shared
            output = output + shared
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        yield from self.router.slots(names, self.layer, copy)
        yield from self._expert_slots(names.expert_gate_up, self.gate_up, names, copy)
        yield from self._expert_slots([names.expert_down], self.down, names, copy)
        if self.shared is not None:
            gate_up = [names.in_layer(name, self.layer) for name in names.shared_gate_up]
            down = names.in_layer(names.shared_down, self.layer)
            yield from self.shared.slots(gate_up, down, "", copy)
        if self.shared_gate is not None:
            yield from self.shared_gate.slots([names.in_layer(names.shared_gate, self.layer)], copy)

    def _expert_slots(
        self, published: Sequence[str], memory: Tensor, names: WeightNames, copy: Copy
    ) -> Iterator[WeightSlot]:
        if "{expert}" not in published[0]:
            yield in_place(f"{names.in_layer(published[0], self.layer)}.weight", memory, copy)
            return
        for expert in range(self.spec.count):
            of = [f"{names.in_layer(name, self.layer, expert)}.weight" for name in published]
            yield from stacked(of, memory[expert], copy)


def mixed(
    rows: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """[R, H]: each row through its experts, weighed and summed in fp32, in the rows' type.

    Args:
        rows: [R, H].
        chosen: [R, k] integers, the experts of each row.
        weights: [R, k], of each of them.
        gate_up: [E, 2 * I, H].
        down: [E, H, I].
        activation: of the gate.
    """
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in torch.unique(chosen).tolist():
        places, ranks = torch.where(chosen == expert)
        gate, up = functional.linear(rows[places], gate_up[expert]).chunk(2, dim=-1)
        output = functional.linear(FUNCTIONS[activation](gate) * up, down[expert])
        total.index_add_(0, places, output.float() * weights[places, ranks, None].float())
    return total.to(rows.dtype)
