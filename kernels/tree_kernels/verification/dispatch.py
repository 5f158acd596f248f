"""Verification of a whole step on the device of its logits: it does not wait for the host and can be captured.

The rules are those of `tree_kernels.verification.walks`, for all sequences at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tree_kernels.verification import records
from tree_kernels.verification.records import Mode, RowsToVerify, StepToVerify
from tree_kernels.verification.torch_backend import TorchVerification

if TYPE_CHECKING:
    from tree_kernels.verification.triton_backend import TritonVerification


@dataclass(frozen=True)
class Verdicts:
    """What a step's sequences accepted, in one tensor, so that one small copy brings it to the host."""

    tensor: Tensor  # [2 * max_sequences + max_rows] int32, of which the others are views
    accepted_counts: Tensor  # [max_sequences] rows accepted below the root; 0 where there was nothing to verify
    # [max_sequences] the target's own token after the path, with `NOT_FINITE` where the path's last row has logits that
    # are no finite numbers; -1 where nothing was verified.
    next_tokens: Tensor
    # [max_rows] the rows that sequence b accepted, from its first row on, relative to its root and rising; undefined
    # after `accepted_counts[b]` of them.
    accepted_rows: Tensor

    @classmethod
    def over(cls, tensor: Tensor, max_sequences: int) -> Verdicts:
        """Views of a tensor of verdicts, or of a copy of one on the host."""
        sizes = [max_sequences, max_sequences, len(tensor) - 2 * max_sequences]
        return cls(tensor, *torch.split(tensor, sizes))


class DeviceVerifier:
    """Verifies every sequence of a step in two launches (`greedy`) or three to seven (`sampled`).

    Symbols: R rows of the step's tensors, at most `max_rows`; B = `max_sequences`; V the vocabulary size. Nothing is
    read back and no shape depends on data, so that the calls can be captured; verdicts are overwritten by the next
    call.

    Attributes:
        verdicts: those of the last call, overwritten by the next.
        lossy_rows: [max_rows] int32, at the places of a TYPICAL sequence's `Verdicts.accepted_rows`: 1 where the
            model's own draw is another token than the row's; undefined elsewhere.

    Args:
        vocabulary_size: V; logits may be wider, the rest is ignored.
        max_sequences, max_rows: of a step; rows of no sequence cost next to nothing.
        backend: "triton", which has to be installed, or "torch"; None is "triton" on a GPU and "torch" elsewhere.
    """

    def __init__(
        self,
        device: torch.device | str,
        vocabulary_size: int,
        max_sequences: int,
        max_rows: int,
        backend: Literal["triton", "torch"] | None = None,
    ) -> None:
        if not 0 < vocabulary_size < records.NOT_FINITE:
            raise ValueError(f"expected a vocabulary of 1 to {records.TOKEN_BITS} tokens, got {vocabulary_size}")
        self.vocabulary_size = vocabulary_size
        self._max_sequences = max_sequences
        self._max_rows = max_rows
        # Length of the packed parameters.
        self.integers = records.parameter_count(max_sequences, max_rows)
        device = torch.device(device)
        # At one address for good.
        verdicts = torch.zeros(2 * max_sequences + max_rows, dtype=torch.int32, device=device)
        self.verdicts = Verdicts.over(verdicts, max_sequences)
        self.lossy_rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        sizes_and_results = (vocabulary_size, max_sequences, verdicts, self.lossy_rows)
        self._backend: TorchVerification | TritonVerification
        if (backend or ("triton" if device.type == "cuda" else "torch")) == "triton":
            # Only here: Triton may be absent.
            from tree_kernels.verification.triton_backend import TritonVerification

            self._backend = TritonVerification(*sizes_and_results)
        else:
            self._backend = TorchVerification(*sizes_and_results)

    def pack(self, sequences: Sequence[RowsToVerify]) -> NDArray[np.int32]:
        """The step's parameters, int32 [integers], to be copied to the device with the rest of the step. Raises
        `ValueError` for more sequences than `max_sequences`, or rows out of range."""
        return records.pack_parameters(sequences, self._max_sequences, self._max_rows, self.vocabulary_size)

    def pack_distributions(self, by_row: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> NDArray[np.int32]:
        """Draft distributions by the step's row of the parent, int32 [max_rows + 1 + 2 * pairs]. Raises `ValueError`
        for a row out of range, lengths that differ, or more than `MAX_SUPPORT` pairs in a row."""
        return records.pack_distributions(by_row, self._max_rows)

    def greedy(self, logits: Tensor, token_ids: Tensor, parents: Tensor, parameters: Tensor) -> Verdicts:
        """Verify a step whose sequences are all GREEDY. Takes and raises what `sampled` does."""
        step = StepToVerify(logits, token_ids, parents, parameters, None)
        return self._verify(step, sampled=False, filtered=False, typical=False)

    def sampled(
        self,
        logits: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        parameters: Tensor,
        distributions: Tensor | None = None,
        *,
        filtered: bool = True,
        typical: bool = True,
    ) -> Verdicts:
        """Verify a step of any mixture of modes. Raises `ValueError` where shapes or dtypes differ from these.

        Args:
            logits: [R, at least V] bf16, fp16 or fp32, the last dimension contiguous.
            token_ids: [R] int32, the step's input.
            parents: [R] int32, relative to each sequence's root, parents[i] < i; not read at roots and in chains.
            parameters: [integers] int32, see `pack`.
            distributions: [any] int32 that begins with what `pack_distributions` returns; None where no row has one.
            filtered: whether any sequence is `RowsToVerify.filtered`; False saves two launches.
            typical: whether any sequence is TYPICAL; False saves two launches.
        """
        step = StepToVerify(logits, token_ids, parents, parameters, distributions)
        return self._verify(step, sampled=True, filtered=filtered, typical=typical)

    def warm_up(
        self, dtype: torch.dtype, *, filtered: Sequence[bool] = (False, True), typical: Sequence[bool] = (False,)
    ) -> None:
        """Compile every kernel for logits of this dtype, so that no step waits for it. Takes seconds for each, once.
        `filtered` and `typical` are the values that `sampled` will be called with."""
        device = self.verdicts.tensor.device
        drawn = torch.from_numpy(self.pack_distributions({0: ((0,), (1,))})).to(device)
        # Numbers that are 1 or multiples of 16 are compiled for.
        for rows in sorted({1, min(16, self._max_rows)}):
            logits = torch.zeros(rows, self.vocabulary_size, dtype=dtype, device=device)
            integers = torch.zeros(rows, dtype=torch.int32, device=device)
            packed = self.pack([RowsToVerify(0, rows, Mode.COUPLED, top_k=2, is_chain=True)])
            step = (logits, integers, integers, torch.from_numpy(packed).to(device))
            self.greedy(*step)
            for distributions, cut, kept in itertools.product((None, drawn), filtered, typical):
                self.sampled(*step, distributions, filtered=cut, typical=kept)

    def _verify(self, step: StepToVerify, *, sampled: bool, filtered: bool, typical: bool) -> Verdicts:
        logits, token_ids, parents, parameters, _ = step
        rows = logits.shape[0]
        if logits.ndim != 2 or logits.shape[1] < self.vocabulary_size or logits.stride(1) != 1:
            raise ValueError(f"expected logits [R, {self.vocabulary_size}], contiguous, got {list(logits.shape)}")
        if rows > self._max_rows or len(token_ids) != rows or len(parents) != rows:
            raise ValueError(
                f"expected at most {self._max_rows} rows of logits, token ids and parents, "
                f"got {rows}, {len(token_ids)} and {len(parents)}"
            )
        if len(parameters) != self.integers:
            raise ValueError(f"expected {self.integers} parameters, got {len(parameters)}")
        dtypes = {token_ids.dtype, parents.dtype, parameters.dtype}
        if dtypes != {torch.int32}:
            raise ValueError(f"expected int32 token ids, parents and parameters, got {dtypes}")
        self._backend.verify(step, sampled=sampled, filtered=filtered, typical=typical)
        return self.verdicts
