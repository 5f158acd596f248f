"""Experts that a checkpoint has in one tensor, under the names of one tensor for each expert.

Qwen3.5's layers are published so and Qwen3-MoE's are not, and a checkpoint may differ from its own MTP module. Of all
experts there are `gate_up_proj` [E, 2 * I, H], in which the rows of gate come first, and `down_proj` [E, H, I]; of
Qwen3-VL's some have inputs before outputs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from tree_models.names import WeightNames
from tree_models.weights.checkpoint import Stored, StoredTensor, TensorSource
from tree_models.weights.joined_parts import joined

_PARTS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class _Slice:
    """An expert's rows of a tensor of all."""

    whole: str
    expert: int
    start: int
    end: int
    by_columns: bool


class SeparateExperts:
    """A checkpoint with a tensor for each expert's gate, up and down. A `TensorSource`."""

    def __init__(self, checkpoint: TensorSource, hidden_size: int | None = None) -> None:
        """Inputs come before outputs in tensors that are not as wide as the rows where they should be; in none without
        `hidden_size`."""
        self._checkpoint, self.stored = checkpoint, dict[str, Stored](checkpoint.stored)
        self._slices: dict[str, _Slice] = {}
        # The tensors read last, since their experts are asked for one after another: by several threads, of which some
        # may be at the next tensor already.
        self._kept: dict[str, Tensor] = {}
        self._reading = threading.Lock()
        for whole, stored in checkpoint.stored.items():
            ending = next((ending for ending in _PARTS if whole.endswith(ending)), None)
            if ending is None or len(stored.shape) != 3:
                continue
            own = stored.shape[2 if len(_PARTS[ending]) > 1 else 1]
            by_columns = hidden_size is not None and own != hidden_size
            if stored.shape[2 if by_columns else 1] % len(_PARTS[ending]) == 0:
                del self.stored[whole]
                self._separate(whole, ending, stored, by_columns=by_columns)

    def _separate(self, whole: str, ending: str, stored: Stored, *, by_columns: bool) -> None:
        experts, rows, columns = stored.shape
        if by_columns:
            rows, columns = columns, rows
        prefix, parts = whole.removesuffix(ending), _PARTS[ending]
        each = rows // len(parts)
        for expert in range(experts):
            for number, part in enumerate(parts):
                name = f"{prefix}.experts.{expert}.{part}.weight"
                self._slices[name] = _Slice(whole, expert, number * each, (number + 1) * each, by_columns)
                self.stored[name] = StoredTensor((each, columns), stored.dtype)

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        own = self._slices.get(name)
        if own is None:
            return self._checkpoint.read(name)
        with self._reading:
            whole = self._kept.get(own.whole)
            if whole is None:
                # The first one goes before this one is read: two of all experts are in memory at once, each of which
                # may have gigabytes.
                for name in list(self._kept)[:-1]:
                    del self._kept[name]
                whole = self._kept[own.whole] = self._checkpoint.read(own.whole)
        of_expert = whole[own.expert]
        return (of_expert.T if own.by_columns else of_expert)[own.start : own.end]


def separated(checkpoint: TensorSource, names: WeightNames, hidden_size: int | None = None) -> TensorSource:
    """The checkpoint as a family with these names reads it; `hidden_size` where experts may lie by columns."""
    checkpoint = joined(checkpoint, names)
    if not names.expert_gate_up[0].endswith(".experts.{expert}.gate_proj"):
        return checkpoint
    return SeparateExperts(checkpoint, hidden_size if names.experts_by_columns else None)
