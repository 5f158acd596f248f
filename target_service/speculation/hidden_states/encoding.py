"""Hidden states of a pass as bytes to send: fused, cast, and copied to the host.

All rows of a pass that verifies trees are encoded right behind its launch; once the host has waited for the pass, it
only picks the committed rows. They share the stream of the pass: on another one they would hardly run before the next
pass has ended. A pass with many rows of prompts is encoded later, when the needed rows are known.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from target_service.model.head_projection import HeadProjection

# The largest finite number of the type: `torch.finfo(torch.float8_e4m3fn).max`.
_LARGEST_E4M3 = 448.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Rows of a pass that are encoded ahead: a head's weights are read once for as many.
AHEAD_ROWS = 2048
# At most two passes under way, and one whose rows are being picked.
_TURNS = 3

Bytes = npt.NDArray[np.uint8]


class StepFeatures:
    """Hidden states of one pass, by its rows."""

    def __init__(self, states: Tensor, dtype: str, projection: HeadProjection | None) -> None:
        """`states` [R, ..] are fused by `projection`, if there is one, and sent as `dtype`."""
        self._states = states
        self._dtype = dtype
        self._projection = projection
        # [R, bytes of a vector] on the host, once `done`.
        self._ahead: Bytes | None = None
        self._done: torch.cuda.Event | None = None

    @torch.inference_mode()
    def begin(self, host: Callable[[int], Tensor]) -> None:
        """Encode all rows now, without waiting. `host` takes the bytes of a vector and returns pinned memory for all
        rows, which stays untouched until they are picked."""
        encoded = self._encoded(self._states)
        ahead = host(encoded.shape[1])[: len(encoded)]
        ahead.copy_(encoded, non_blocking=True)
        self._ahead = ahead.numpy()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    @torch.inference_mode()
    def of_rows(self, rows: SequenceOf[int]) -> Bytes:
        """The encoded rows [n, bytes of a vector] on the host, see `encode`. May wait for the device."""
        if self._ahead is not None and self._done is not None:
            self._done.synchronize()
            # NumPy takes 10 us; PyTorch would wake a thread on every core, which takes 1 to 8 ms.
            return self._ahead[list(rows)]
        encoded: Bytes = self._encoded(self._states[torch.tensor(rows).to(self._states.device)]).cpu().numpy()
        return encoded

    def _encoded(self, states: Tensor) -> Tensor:
        return encode(states if self._projection is None else self._projection(states), self._dtype)


class FeatureEncoder:
    """Encodes passes one after the other, through pinned buffers used in turn."""

    def __init__(self) -> None:
        self._turn = 0
        # [AHEAD_ROWS, bytes of a vector] each, pinned.
        self._hosts: list[Tensor] = []

    def begin(self, states: Tensor, dtype: str, projection: HeadProjection | None) -> StepFeatures:
        """The features of a pass from the states of its hooks. On a GPU, those of few rows are copied to the host."""
        features = StepFeatures(states, dtype, projection)
        if states.is_cuda and len(states) <= AHEAD_ROWS:
            features.begin(self._host)
        return features

    def _host(self, width: int) -> Tensor:
        if not self._hosts or self._hosts[0].shape[1] != width:
            torch.cuda.synchronize()
            self._hosts = [torch.zeros(AHEAD_ROWS, width, dtype=torch.uint8, pin_memory=True) for _ in range(_TURNS)]
        self._turn = (self._turn + 1) % _TURNS
        return self._hosts[self._turn]


def encode(vectors: Tensor, dtype: str) -> Tensor:
    """Vectors [n, width] as bytes [n, ..] uint8 of `dtype`. Rows of float8_e4m3 end with a float32 scale, which maps
    the largest element to the end of the type's range."""
    if dtype != "float8_e4m3":
        return vectors.to(_DTYPES[dtype]).contiguous().view(torch.uint8)
    wide = vectors.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST_E4M3).clamp_(min=torch.finfo(torch.float32).tiny)
    small = (wide / scales).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8), scales.view(torch.uint8)], dim=1)
