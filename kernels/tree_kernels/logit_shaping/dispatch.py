"""Shapes the logits of a whole step on the device: it does not wait for the host and can be captured.

Nothing is counted from pass to pass. How often each token occurs is counted anew in every pass, from the text that lies
beside the keys: what was accepted, rejected, read again or shared with another sequence is then right by itself, and
tokens that the host does not know yet count too. That reads four bytes of each token of a sequence, where attention
reads its keys and values, some 100 KB at 8B size. The counts take four bytes for each sequence and token of the
vocabulary, for as long as they are used.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tree_kernels.logit_shaping import torch_backend
from tree_kernels.logit_shaping.layout import PLACE
from tree_kernels.logit_shaping.types import SequenceTexts, StepToShape


class DeviceShaper:
    """Shapes the logits of sequences whose `RowsToVerify.shaping` names a place of the table, and of no others.

    Symbols: R rows of a step, B = `max_sequences`, V the vocabulary size.

    Attributes:
        table: [B, PLACE] int32, see `layout`.
        masks: [1 + max_rows, V / 32, rounded up] int32, see `mask_row`.
        mask_room: [as `masks`] int32, on the host, whose masks `mask` copies.
        mask_rows: [max_rows] int32, of each row of the step its mask, counted from 1; 0 for none; negative where
            the row's tokens are not held back either, as its mask allows no others.
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
        self.table = torch.zeros(max_sequences, PLACE, dtype=torch.int32, device=device)
        self.masks = torch.zeros(1 + max_rows, -(-vocabulary_size // 32), dtype=torch.int32, device=device)
        self._room = torch.zeros(self.masks.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.mask_room: NDArray[np.int32] = self._room.numpy()
        self.mask_rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._masked = False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # After the zeros.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._backend = backend or ("triton" if device.type == "cuda" else "torch")

    def place(self, number: int, packed: NDArray[np.int32]) -> None:
        """Write what `pack_shaping` returns to a place of the table, in stream order."""
        self.table[number].copy_(self._pinned(packed), non_blocking=True)

    def mask(self, count: int, rows: NDArray[np.int32]) -> None:
        """Set the masks of the next step, the first `count` of `mask_room`, and which of its rows have which: [rows] as
        in `mask_rows`; rows behind these have none.

        What is launched next waits for them. They are copied at once, beside a pass that is under way: the device has
        to be done with `shape` of every step before that had masks, before any are written to `mask_room`.
        """
        if not count:
            if self._masked:
                self.mask_rows.zero_()
            self._masked = False
            return
        self._masked = True
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.mask_rows.zero_()
            self.mask_rows[: len(rows)].copy_(self._pinned(rows), non_blocking=True)
            self.masks[:count].copy_(self._room[:count], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self.table.device).wait_stream(self._stream)

    def _pinned(self, values: NDArray[np.int32]) -> Tensor:
        # PyTorch does not reuse pinned memory that a copy still reads.
        pinned = torch.empty(values.shape, dtype=torch.int32, pin_memory=self.table.is_cuda)
        pinned.numpy()[:] = values
        return pinned

    def shape(
        self,
        logits: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        parameters: Tensor,
        texts: SequenceTexts,
    ) -> Tensor:
        """Logits [R, V] fp32 of a step, shaped; of rows of no sequence they are undefined. After the pass, and before
        anything changes the step's integers.

        Args:
            logits: [R, at least V] bf16, fp16 or fp32, the last dimension contiguous. Not changed.
            token_ids, parents, parameters: of the step's verification, see `DeviceVerifier.sampled`.
            texts: of the step's sequences.
        """
        rows, vocabulary = len(logits), self._vocabulary_size
        if len(token_ids) != rows or len(parents) != rows or logits.shape[1] < vocabulary:
            raise ValueError(
                f"expected token ids and parents of {rows} rows and logits of {vocabulary} tokens, "
                f"got {len(token_ids)}, {len(parents)} and {logits.shape[1]}"
            )
        step = StepToShape(logits, token_ids, parents, parameters, texts, self.masks, self.mask_rows)
        if self._backend == "torch":
            out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
            torch_backend.shape(step, self.table, out, self._max_sequences)
            return out
        # Only here: Triton may be absent.
        from tree_kernels.logit_shaping import triton_backend

        return triton_backend.shape(step, self.table, vocabulary, self._max_sequences)
