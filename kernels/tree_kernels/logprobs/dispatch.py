"""Gathers the log-probabilities of a step's tokens behind its verification: it does not wait for the host and can be
captured."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tree_kernels.logprobs import torch_backend
from tree_kernels.logprobs.layout import WIDTH
from tree_kernels.verification.dispatch import Verdicts


class DeviceLogprobs:
    """For sequences with `RowsToVerify.logprobs`, by the logits as the model gives them.

    Attributes:
        found: [max_rows, WIDTH] int32, see `layout`: the i-th token that a sequence generated, counted from 0, at its
            tree's first row + i. Overwritten by every call; undefined elsewhere.
    """

    def __init__(
        self,
        device: torch.device,
        vocabulary_size: int,
        max_sequences: int,
        max_rows: int,
        backend: Literal["triton", "torch"] | None = None,
    ) -> None:
        """`backend` None is "triton" on a GPU and "torch" elsewhere."""
        self._vocabulary_size = vocabulary_size
        self._max_sequences = max_sequences
        self.found = torch.zeros(max_rows, WIDTH, dtype=torch.int32, device=device)
        self._backend = backend or ("triton" if device.type == "cuda" else "torch")

    def gather(self, logits: Tensor, token_ids: Tensor, parameters: Tensor, verdicts: Verdicts) -> None:
        """Write `found`, by logits [R, at least V] of any floating dtype, the last dimension contiguous, and the tokens
        [R] int32, parameters and verdicts of the step's verification. Raises `ValueError` for more than `max_rows`."""
        if len(logits) > len(self.found) or len(token_ids) != len(logits):
            raise ValueError(
                f"expected up to {len(self.found)} rows of logits and token ids, got {len(logits)} and {len(token_ids)}"
            )
        if self._backend == "torch":
            torch_backend.gather(logits[:, : self._vocabulary_size], token_ids, parameters, verdicts, self.found)
            return
        # Only here: Triton may be absent.
        from tree_kernels.logprobs import triton_backend

        sizes = self._vocabulary_size, self._max_sequences
        triton_backend.gather(logits, token_ids, parameters, verdicts, self.found, *sizes)
