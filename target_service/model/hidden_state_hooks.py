"""Keeps the outputs of decoder layers, row by row, while a model runs: the hidden states that EAGLE heads read.

A hook on each layer copies into memory of a fixed address, so that a CUDA graph captured with the hooks fills it at
every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import NotSupported
from target_service.model.network import TargetNetwork
from tree_kernels.linear import RowLinears, row_linears
from tree_models.layers.decoder import Tap


class LayerHooks:
    """Hooks on decoder layers, and the memory they fill. `layers` are outputs of decoder layers from 0; the number of
    layers stands for the state after the last norm. `width` is that of all these outputs, joined."""

    def __init__(self, network: TargetNetwork, layers: tuple[int, ...], max_rows: int, *, grows: bool = True) -> None:
        """Room for `max_rows` of a pass; more only if it `grows`, which captured graphs do not support. Raises
        `NotSupported` where the model has no such layer."""
        self.layers = layers
        for layer in layers:
            if not 0 <= layer <= network.layer_count:
                raise NotSupported(f"layer {layer} is wanted of a target that has {network.layer_count}")
        self._each = network.hidden_size
        self.width = self._each * len(layers)
        self._grows = grows
        # Graphs are captured where there is Triton.
        self._linears = RowLinears() if grows else row_linears(network.device)
        self._states = torch.zeros(max_rows, self.width, dtype=network.dtype, device=network.device)
        self._removals = [network.tap(layer, self._keeping(place)) for place, layer in enumerate(layers)]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for remove in self._removals:
            remove()

    @property
    def fixed_rows(self) -> int:
        """Rows that `states` has at the same address for every pass; 0 where the memory may move."""
        return 0 if self._grows else len(self._states)

    def states(self, rows: int) -> Tensor:
        """[rows, width]: the states of the pass just launched, at most `fixed_rows`; the next pass overwrites them, and
        rows that the pass did not have are of earlier ones."""
        return self._states[:rows]

    def copy_states(self, rows: int) -> Tensor | None:
        """[rows, width]: a copy of the states of the pass just launched; None where it has more rows than there is room
        for. Does not wait for the device."""
        if rows > len(self._states):
            return None
        return self._states[:rows].clone()

    def _keeping(self, place: int) -> Tap:
        columns = slice(place * self._each, (place + 1) * self._each)

        def keep(hidden: Tensor) -> None:
            rows = len(hidden)
            if rows > len(self._states) and self._grows:
                # Tensors made in inference mode cannot be written outside of it.
                with torch.inference_mode(False):
                    self._states = torch.zeros(2 * rows, self.width, dtype=hidden.dtype, device=hidden.device)
            self._linears.copy_rows(hidden[: len(self._states)], self._states[:rows, columns])

        return keep
