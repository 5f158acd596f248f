"""Hidden states of a pass as the bytes that travel: fused, cast, and brought to the host.

Of a pass that verifies trees all rows are encoded as soon as it is launched, before whatever runs next: which of them
are committed is known when the host has waited for the pass anyway, and then it only picks. Not on a stream of their
own, where they would hardly run before the pass that is launched behind has ended. A pass with many rows of prompts is
encoded when it is known which of them anybody wants.
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
# Passes under way at most, and the one whose rows are being picked.
_TURNS = 3

Bytes = npt.NDArray[np.uint8]


class StepFeatures:
    """What one pass yields, by its rows."""

    def __init__(self, states: Tensor, dtype: str, projection: HeadProjection | None) -> None:
        """States [R, ..] of a pass, fused by `projection` if there is one, in the `dtype` that travels."""
        self._states = states
        self._dtype = dtype
        self._projection = projection
        # [R, bytes of a vector] on the host, once `done`.
        self._ahead: Bytes | None = None
        self._done: torch.cuda.Event | None = None

    @torch.inference_mode()
    def begin(self, host: Callable[[int], Tensor]) -> None:
        """Encode all rows now, without waiting, into what `host` gives for a vector of so many bytes: pinned memory
        with room for them, left alone until they were picked."""
        encoded = self._encoded(self._states)
        ahead = host(encoded.shape[1])[: len(encoded)]
        ahead.copy_(encoded, non_blocking=True)
        self._ahead = ahead.numpy()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    @torch.inference_mode()
    def of_rows(self, rows: SequenceOf[int]) -> Bytes:
        """[n, bytes of a vector] on the host, a scale behind each row where there is one. Waits if need be."""
        if self._ahead is not None and self._done is not None:
            self._done.synchronize()
            # Not by PyTorch, which would wake a thread on every core for it: 1 to 8 ms where 10 us do.
            return self._ahead[list(rows)]
        encoded: Bytes = self._encoded(self._states[torch.tensor(rows).to(self._states.device)]).cpu().numpy()
        return encoded

    def _encoded(self, states: Tensor) -> Tensor:
        return encode(states if self._projection is None else self._projection(states), self._dtype)


class FeatureEncoder:
    """Encodes passes one after the other."""

    def __init__(self) -> None:
        self._turn = 0
        # [AHEAD_ROWS, bytes of a vector] each, pinned, used in turns.
        self._hosts: list[Tensor] = []

    def begin(self, states: Tensor, dtype: str, projection: HeadProjection | None) -> StepFeatures:
        """What a pass yields, see `LayerHooks.take`; on a GPU it is on its way to the host, if it has few rows."""
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
    """[n, width] as bytes [n, ..] uint8 of the type that travels; for float8_e4m3 with a float32 scale behind each row,
    which brings the largest element to the end of the type's range."""
    if dtype != "float8_e4m3":
        return vectors.to(_DTYPES[dtype]).contiguous().view(torch.uint8)
    wide = vectors.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST_E4M3).clamp_(min=torch.finfo(torch.float32).tiny)
    small = (wide / scales).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8), scales.view(torch.uint8)], dim=1)
