"""What of a pass only some requests need, on its way to the host."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from outrider.sampling import TokenLogprobs
from tree_kernels.logprobs import read_logprobs


class WantedExtras(NamedTuple):
    """What a sequence of a pass needs: whether rows are lossy, and how many log-probabilities beside each token's; None
    for no log-probabilities at all."""

    lossy: bool
    logprobs: int | None


class PassExtras(NamedTuple):
    """On the host; None where no sequence of the pass needs it."""

    lossy: Tensor | None  # [max_rows] int32, see `DeviceVerifier.lossy_rows`
    logprobs: Tensor | None  # [max_rows, WIDTH] int32, see `DeviceLogprobs.found`

    def lossy_of(self, first_row: int, accepted: int) -> tuple[bool, ...]:
        """Of the rows accepted of the tree at `first_row`, whether the model would have drawn another token."""
        assert self.lossy is not None, "a sequence is verified by typical acceptance"
        return tuple(map(bool, self.lossy[first_row : first_row + accepted].tolist()))

    def logprobs_of(self, first_row: int, accepted: int, listed: int | None) -> tuple[TokenLogprobs, ...]:
        """Of the tokens that the tree at `first_row` brought, with `listed` others each; none with None."""
        if listed is None:
            return ()
        assert self.logprobs is not None, "a sequence has log-probabilities returned"
        rows = self.logprobs[first_row : first_row + accepted + 1].numpy()
        return tuple([TokenLogprobs(*each) for each in read_logprobs(rows, listed)])
