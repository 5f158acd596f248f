"""Keeps the outputs of decoder layers, row by row, while a model runs: the hidden states that EAGLE heads read.

A hook on each layer copies into memory of a fixed address, so that a CUDA graph captured with the hooks fills it at
every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import NotSupported


class LayerHooks:
    """Hooks on decoder layers, and the memory they fill. `layers` are outputs of decoder layers from 0; the number of
    layers stands for the state after the last norm. `width` is that of all these outputs, joined."""

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], max_rows: int, *, grows: bool = True) -> None:
        """Room for `max_rows` of a pass; more only if it `grows`, which captured graphs do not support. Raises
        `NotSupported` where the model has no such layer."""
        self.layers = layers
        modules = [_module(model, layer) for layer in layers]
        self._each = int(model.config.hidden_size)
        self.width = self._each * len(layers)
        self._grows = grows
        self._states = torch.zeros(max_rows, self.width, dtype=model.dtype, device=model.device)
        self._handles = [module.register_forward_hook(self._hook(place)) for place, module in enumerate(modules)]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

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

    def _hook(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        columns = slice(place * self._each, (place + 1) * self._each)

        # The compiler would make a version of a layer for each hooked layer.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # [1, R, W]
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            rows = hidden.shape[1]
            if rows > len(self._states) and self._grows:
                # Tensors made in inference mode cannot be written outside of it.
                with torch.inference_mode(False):
                    self._states = torch.zeros(2 * rows, self.width, dtype=hidden.dtype, device=hidden.device)
            self._states[:rows, columns].copy_(hidden[0, : len(self._states)])

        return cast("Callable[[nn.Module, Any, Any], None]", keep)


def _module(model: PreTrainedModel, layer: int) -> nn.Module:
    """The module whose output is the state that `layer` names."""
    inner = getattr(model, "model", None)
    layers, norm = getattr(inner, "layers", None), getattr(inner, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise NotSupported(f"the layers of a {model.config.model_type} cannot be found, and so not be read")
    if not 0 <= layer <= len(layers):
        raise NotSupported(f"layer {layer} is wanted of a target that has {len(layers)}")
    return norm if layer == len(layers) else layers[layer]
