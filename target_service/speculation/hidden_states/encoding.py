"""Hidden states of a pass as bytes to send: fused, cast, and copied to the host.

All rows of a pass that verifies trees are encoded right behind its launch; once the host has waited for the pass, it
only picks the committed rows. They share the stream of the pass: on another one they would hardly run before the next
pass has ended. A pass with many rows of prompts is encoded later, when the needed rows are known.

Where the states of few rows stay at one address, encoding is a CUDA graph: as single launches it took 0.40 to 0.57 ms
of the host for each pass (H100, `benchmarks/results/2026-11-25-h100-host-time.md`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from target_service.model.cuda_graphs.pass_graphs import PassGraphs
from target_service.model.head_projection import HeadProjection
from target_service.model.hidden_state_hooks import LayerHooks

# The largest finite number of the type: `torch.finfo(torch.float8_e4m3fn).max`.
_LARGEST_E4M3 = 448.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Rows of a pass that are encoded ahead: a head's weights are read once for as many.
AHEAD_ROWS = 2048
# At most two passes under way, and one whose rows are being picked.
_TURNS = 3

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class StepFeatures:
    """Hidden states of one pass, by its rows: of `states` [R, ..] as bytes of `dtype`, fused by `projection` if there
    is one."""

    # None where all rows are copied `ahead`.
    states: Tensor | None
    dtype: str
    projection: HeadProjection | None
    # [R, bytes of a vector] on the host, once `done`; untouched until they are picked.
    ahead: Bytes | None = None
    done: torch.cuda.Event | None = None

    @torch.inference_mode()
    def of_rows(self, rows: SequenceOf[range]) -> tuple[Bytes, SequenceOf[range]]:
        """Encoded rows on the host, see `encode`: an array [N, bytes of a vector], and where each range of `rows` is in
        it. The array is used again for the third pass from now, so what is kept must be copied. May wait for the
        device."""
        if self.ahead is not None and self.done is not None:
            self.done.synchronize()
            return self.ahead, rows
        assert self.states is not None, "what was not copied is encoded here"
        wanted = torch.tensor([row for of_range in rows for row in of_range])
        states = self.states[wanted.to(self.states.device)]
        encoded: Bytes = encode(states, self.dtype, self.projection).cpu().numpy()
        ends = list(accumulate(map(len, rows)))
        return encoded, [range(end - len(of_range), end) for end, of_range in zip(ends, rows, strict=True)]


class FeatureEncoder:
    """Encodes passes one after the other, through pinned buffers used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._turn = 0
        # [AHEAD_ROWS, bytes of a vector] each, pinned, and the event of the copy that came there last.
        self._hosts: list[tuple[Tensor, torch.cuda.Event]] = []
        self._graphs = PassGraphs(device)

    @torch.inference_mode()
    def encode_after_launch(
        self, hooks: LayerHooks, rows: int, dtype: str, projection: HeadProjection | None
    ) -> StepFeatures | None:
        """The features of the first `rows` of the pass just launched; None where `hooks` kept fewer. On a GPU, those of
        few rows are copied to the host, without waiting."""
        # Rows of the graphs that encode, as of most passes that verify trees. Larger passes leave the host more time.
        size = next((size for size in (16, 32, 64, 128, 256) if rows <= size <= hooks.fixed_rows), 0)
        if size:
            work = size, dtype, projection
            encoded = self._graphs.replay_or_capture(
                hooks, work, lambda: encode(hooks.states(size), dtype, projection)
            )[:rows]
        else:
            states = hooks.copy_states(rows)
            if states is None or not states.is_cuda or rows > AHEAD_ROWS:
                return None if states is None else StepFeatures(states, dtype, projection)
            encoded = encode(states, dtype, projection)
        host, done = self._host(encoded.shape[1])
        host[:rows].copy_(encoded, non_blocking=True)
        done.record()
        return StepFeatures(None, dtype, projection, host[:rows].numpy(), done)

    def _host(self, width: int) -> tuple[Tensor, torch.cuda.Event]:
        if not self._hosts or self._hosts[0][0].shape[1] != width:
            torch.cuda.synchronize()
            pinned = torch.zeros(_TURNS, AHEAD_ROWS, width, dtype=torch.uint8, pin_memory=True)
            self._hosts = [(host, torch.cuda.Event()) for host in pinned]  # type: ignore[no-untyped-call]
        self._turn = (self._turn + 1) % _TURNS
        return self._hosts[self._turn]


def encode(states: Tensor, dtype: str, projection: HeadProjection | None = None) -> Tensor:
    """States [n, ..], fused by `projection` if there is one, as bytes [n, ..] uint8 of `dtype`, in memory of their own.
    Rows of float8_e4m3 end with a float32 scale, which maps the largest element to the end of the type's range."""
    vectors = states if projection is None else projection(states)
    if dtype != "float8_e4m3":
        return vectors.to(_DTYPES[dtype], copy=True).contiguous().view(torch.uint8)
    wide = vectors.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST_E4M3).clamp_(min=torch.finfo(torch.float32).tiny)
    small = (wide / scales).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8), scales.view(torch.uint8)], dim=1)
