"""Recurrent layers over trees: `plan` once per step, then `RecurrentPass.convolve` and `mix` once per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch
from tree_kernels.recurrence.states import LayerStates, RecurrentStates
from tree_kernels.recurrence.torch_backend import TorchRecurrence
from tree_kernels.recurrence.types import Convolved, HeadsLayout, RecurrencePlan, ShortConvolution

if TYPE_CHECKING:
    from tree_kernels.recurrence.triton_backend import TritonRecurrence

RecurrenceBackend = Literal["torch", "triton"]


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
        # What computes, without checks. Its gates and what it does to outputs are those of `gating`, of tensors whose
        # last dimension is contiguous.
        self.form: TorchRecurrence | TritonRecurrence = TorchRecurrence(torch.device(device))
        if backend == "triton":
            # Only here: Triton may be absent.
            from tree_kernels.recurrence.triton_backend import TritonRecurrence

            self.form = TritonRecurrence(torch.device(device))

    @property
    def capturable(self) -> TritonRecurrence:
        """The triton backend, for captured steps. `ValueError` for any other."""
        if self.backend != "triton":
            raise ValueError(f"only the triton backend runs in captured steps, this is {self.backend}")
        return cast("TritonRecurrence", self.form)

    def plan(self, batch: AttentionBatch, slots: Sequence[int], states: RecurrentStates) -> RecurrencePlan:
        """Do the index work of one step, which has to run then: keys before it count as folded.

        Args:
            batch: the step's rows, as attention has them.
            slots: [B] slot of each sequence's state, all different but for 0, which is of no sequence.
            states: where they are.

        Raises:
            ValueError: lengths disagree, or a tree has more rows than the states' window.
        """
        batch.check()
        if len(slots) != batch.sequences:
            raise ValueError(f"expected {batch.sequences} slots of states, got {len(slots)}")
        return self.form.plan(batch, slots, states)


@dataclass(frozen=True, slots=True)
class RecurrentPass:
    """What every recurrent layer of one pass needs: the layer's inputs are convolved, and then mixed or scanned."""

    recurrence: TreeRecurrence
    plan: RecurrencePlan
    states: RecurrentStates

    def convolve(self, layer: int, inputs: Tensor, gates: Tensor, convolution: ShortConvolution) -> Convolved:
        """Convolve the inputs of a layer's rows with those of their ancestors, take accepted tokens' inputs into the
        window, and keep the rows' inputs and gates.

        Args:
            layer: counted among recurrent layers.
            inputs: [R, C], of the states' dtype.
            gates: [R, G] fp32, and [R, 0] of selective scans and of keyed states.
            convolution: the layer's.
        """
        shape, rows = self.states.shape, self.plan.batch.rows
        if inputs.shape != (rows, shape.channels) or gates.shape != (rows, shape.early_gates):
            raise ValueError(
                f"expected inputs {[rows, shape.channels]} and {shape.early_gates} gates of each, "
                f"got {list(inputs.shape)} and {list(gates.shape)}"
            )
        return self.recurrence.form.convolve(self._at(layer), inputs, gates, convolution)

    def mix(self, layer: int, convolved: Convolved, gates: Tensor, layout: HeadsLayout) -> Tensor:
        """Fold accepted tokens into a layer's states, and read the states at every row: [R, H, Dv] in the dtype of the
        inputs. Of keyed states, keep the rows' gates too; see `reference.run_keyed_text`.

        Args:
            layer: as given to `convolve`.
            convolved: what that returned.
            gates: as given to it; of keyed states [R, H * Dk + H] fp32.
            layout: how heads are made of it; of keyed states without heads that share keys.
        """
        shape, form = self.states.shape, self.recurrence.form
        if not shape.keyed:
            return form.mix(self._at(layer), convolved, gates, layout)
        if gates.shape != (self.plan.batch.rows, shape.gates) or layout.key_heads != shape.heads:
            raise ValueError(f"expected {shape.gates} gates of keyed states, got {list(gates.shape)}")
        return form.mix_keyed(self._at(layer), convolved, gates, layout)

    def scan(self, layer: int, convolved: Convolved, gates: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
        """Fold accepted tokens into a selective layer's states, read the states at every row, and keep the rows' gates:
        [R, C] fp32. See `reference.scan_text`.

        Args:
            layer: as given to `convolve`.
            convolved: what that returned, of which the rows are values.
            gates: [R, C + K * N] fp32, each channel's step and the keys of K groups of channels.
            queries: [R, K * N] fp32.
            decay: [C, N] fp32, negative.
        """
        shape = self.states.shape
        if gates.shape != (self.plan.batch.rows, shape.gates) or not shape.selective:
            raise ValueError(f"expected {shape.gates} gates of a selective layer, got {list(gates.shape)}")
        return self.recurrence.form.scan(self._at(layer), convolved, gates, queries, decay)

    def _at(self, layer: int) -> LayerStates:
        return LayerStates(self.plan, self.states, layer)
