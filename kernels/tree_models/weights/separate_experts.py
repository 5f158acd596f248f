"""Experts that a checkpoint has in one tensor, under the names of one tensor for each expert.

Qwen3.5's layers are published so and Qwen3-MoE's are not, and a checkpoint may differ from its own MTP module. Of all
experts there are `gate_up_proj` [E, 2 * I, H], in which the rows of gate come first, and `down_proj` [E, H, I].
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from tree_models.names import WeightNames
from tree_models.weights.checkpoint import Stored, StoredTensor, TensorSource

_PARTS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
# Tensors of all experts that are in memory at once, each of which may have gigabytes.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class _Slice:
    """An expert's rows of a tensor of all."""

    whole: str
    expert: int
    start: int
    end: int


class SeparateExperts:
    """A checkpoint with a tensor for each expert's gate, up and down. A `TensorSource`."""

    def __init__(self, checkpoint: TensorSource) -> None:
        self._checkpoint, self.stored = checkpoint, dict[str, Stored](checkpoint.stored)
        self._slices: dict[str, _Slice] = {}
        # The tensors read last, since their experts are asked for one after another: by several threads, of which some
        # may be at the next tensor already.
        self._kept: dict[str, Tensor] = {}
        self._reading = threading.Lock()
        for whole, stored in checkpoint.stored.items():
            ending = next((ending for ending in _PARTS if whole.endswith(ending)), None)
            if ending is not None and len(stored.shape) == 3 and stored.shape[1] % len(_PARTS[ending]) == 0:
                del self.stored[whole]
                self._separate(whole, whole.removesuffix(ending), _PARTS[ending], stored)

    def _separate(self, whole: str, prefix: str, parts: tuple[str, ...], stored: Stored) -> None:
        experts, rows, columns = stored.shape
        each = rows // len(parts)
        for expert in range(experts):
            for number, part in enumerate(parts):
                name = f"{prefix}.experts.{expert}.{part}.weight"
                self._slices[name] = _Slice(whole, expert, number * each, (number + 1) * each)
                self.stored[name] = StoredTensor((each, columns), stored.dtype)

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        own = self._slices.get(name)
        if own is None:
            return self._checkpoint.read(name)
        with self._reading:
            whole = self._kept.get(own.whole)
            if whole is None:
                # The first one goes before this one is read.
                for name in list(self._kept)[: 1 - _KEPT]:
                    del self._kept[name]
                whole = self._kept[own.whole] = self._checkpoint.read(own.whole)
        return whole[own.expert, own.start : own.end]


def separated(checkpoint: TensorSource, names: WeightNames) -> TensorSource:
    """The checkpoint as a family with these names reads it."""
    apart = names.expert_gate_up == WeightNames().expert_gate_up
    return SeparateExperts(checkpoint) if apart else checkpoint
