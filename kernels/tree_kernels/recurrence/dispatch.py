"""Recurrent layers over trees: `plan` once per step, then `convolve` and `mix` once per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch
from tree_kernels.recurrence.states import RecurrentStates
from tree_kernels.recurrence.torch_backend import TorchRecurrence
from tree_kernels.recurrence.types import Convolved, HeadsLayout, RecurrencePlan, ShortConvolution

RecurrenceBackend = Literal["torch"]


class _RecurrenceForm(Protocol):
    def plan(self, batch: AttentionBatch, states: Sequence[int], window: int) -> RecurrencePlan: ...

    def convolve(
        self,
        plan: RecurrencePlan,
        states: RecurrentStates,
        layer: int,
        inputs: Tensor,
        gates: Tensor,
        convolution: ShortConvolution,
    ) -> Convolved: ...

    def mix(
        self,
        plan: RecurrencePlan,
        states: RecurrentStates,
        layer: int,
        convolved: Convolved,
        gates: Tensor,
        layout: HeadsLayout,
    ) -> Tensor: ...


class TreeRecurrence:
    """Convolutions and states of ragged tree rows, exact for every path.

    A row's result is that of its own path run alone (`reference.run_text`): committed tokens, its ancestors, itself.
    Rows of a sequence are its last known token with a tree of guesses, or up to `window` tokens, whose inputs are kept
    until the next pass; more rows than that are known tokens, which become part of the state at once. Symbols as in
    `types`.
    """

    def __init__(self, backend: RecurrenceBackend = "torch", device: torch.device | str = "cpu") -> None:
        """ "torch" is the fast path on a CPU, and runs anywhere."""
        if backend not in get_args(RecurrenceBackend):
            raise ValueError(f"expected a backend among {get_args(RecurrenceBackend)}, got {backend!r}")
        self.backend = backend
        self._implementation: _RecurrenceForm = TorchRecurrence(torch.device(device))

    def plan(self, batch: AttentionBatch, states: Sequence[int], window: int) -> RecurrencePlan:
        """Do the index work of one step.

        Args:
            batch: the step's rows, as attention has them.
            states: [B] slot of each sequence's state, all different but for 0, which is of no sequence.
            window: that of the states.

        Raises:
            ValueError: lengths disagree, or a tree has more rows than `window`.
        """
        batch.check()
        if len(states) != batch.sequences:
            raise ValueError(f"expected {batch.sequences} slots of states, got {len(states)}")
        return self._implementation.plan(batch, states, window)

    def convolve(
        self,
        plan: RecurrencePlan,
        states: RecurrentStates,
        layer: int,
        inputs: Tensor,
        gates: Tensor,
        convolution: ShortConvolution,
    ) -> Convolved:
        """Convolve the inputs of a layer's rows with those of their ancestors, take accepted tokens' inputs into the
        window, and keep the rows' inputs and gates.

        Args:
            plan: what `plan` of this object returned for this step.
            states: where sequences' states are.
            layer: counted among recurrent layers.
            inputs: [R, C], of the states' dtype.
            gates: [R, G] fp32.
            convolution: the layer's.
        """
        expected = plan.batch.rows, states.shape.channels
        if inputs.shape != expected or gates.shape != (plan.batch.rows, states.shape.gates):
            raise ValueError(
                f"expected inputs {list(expected)} and {states.shape.gates} gates of each, "
                f"got {list(inputs.shape)} and {list(gates.shape)}"
            )
        return self._implementation.convolve(plan, states, layer, inputs, gates, convolution)

    def mix(
        self,
        plan: RecurrencePlan,
        states: RecurrentStates,
        layer: int,
        convolved: Convolved,
        gates: Tensor,
        layout: HeadsLayout,
    ) -> Tensor:
        """Fold accepted tokens into a layer's states, and read the states at every row: [R, H, Dv] in the dtype of the
        inputs.

        Args:
            plan, states, layer, gates: as given to `convolve`.
            convolved: what that returned.
            layout: how heads are made of it.
        """
        return self._implementation.mix(plan, states, layer, convolved, gates, layout)


@dataclass(frozen=True, slots=True)
class RecurrentPass:
    """What every recurrent layer of one pass needs."""

    recurrence: TreeRecurrence
    plan: RecurrencePlan
    states: RecurrentStates

    def convolve(self, layer: int, inputs: Tensor, gates: Tensor, convolution: ShortConvolution) -> Convolved:
        """See `TreeRecurrence.convolve`."""
        return self.recurrence.convolve(self.plan, self.states, layer, inputs, gates, convolution)

    def mix(self, layer: int, convolved: Convolved, gates: Tensor, layout: HeadsLayout) -> Tensor:
        """See `TreeRecurrence.mix`."""
        return self.recurrence.mix(self.plan, self.states, layer, convolved, gates, layout)
