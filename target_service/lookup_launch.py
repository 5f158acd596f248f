"""Passes that were drafted and verified on the device: what they said, read by the host once for all."""

from __future__ import annotations

import torch
from torch import Tensor

from target_service.sequence import MAX_STRIDE
from target_service.verifier import Verified
from tree_kernels.lookup import SAID, DeviceLookup
from tree_kernels.verification import Walk


def room_for_said(turns: int, max_sequences: int, *, on_gpu: bool) -> Tensor:
    """[turns, max_sequences, MAX_STRIDE, SAID] int32 on the host, as `DeviceLookup.said` has them."""
    return torch.zeros(turns, max_sequences, MAX_STRIDE, SAID, dtype=torch.int32, pin_memory=on_gpu)


class LookedUp:
    """A step of several passes that the device drafts itself; see `launch.Launched`. Its result is good until the next
    but one is launched."""

    followable = True

    def __init__(self, sequences: int, passes: int, lookup: DeviceLookup, host: Tensor) -> None:
        """`host` [max_sequences, MAX_STRIDE, SAID] gets what `lookup` says of this step's passes."""
        self._passes = passes
        self._said = host[:sequences]
        self._said.copy_(lookup.said[:sequences], non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if lookup.said.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    @property
    def on_device(self) -> bool:
        """Whether it runs on a GPU, while the host goes on."""
        return self._done is not None

    def wait(self) -> None:
        """Wait until what was said is on the host."""
        if self._done is not None:
            self._done.synchronize()

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        outcomes: list[Verified | None] = []
        for passes in self._said[:, : self._passes].tolist():
            right, looked_up, _ = zip(*(said[:3] for said in passes), strict=True)
            first, *following = [token for said in passes for token in said[2 : 3 + said[0]]]
            outcomes.append(Verified(Walk((), first), (), tuple(following), looked_up, right))
        return outcomes
