"""Verification in Triton: the launches, and the tensors between them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tree_kernels.attention.tree_mask import MAX_TREE_ROWS
from tree_kernels.verification.records import StepToVerify
from tree_kernels.verification.triton_filter import filter_kernel
from tree_kernels.verification.triton_rows import RUNGS, mass_kernel, peak_kernel
from tree_kernels.verification.triton_scores import gain_kernel, moment_kernel, score_kernel
from tree_kernels.verification.triton_walk import walk_kernel

_CHUNK = 2048
_BLOCK = 128


class TritonVerification:
    """See `tree_kernels.verification.DeviceVerifier`, which checks the arguments.

    Scratch is allocated by every call, so that captured graphs share it through their pool.
    """

    def __init__(self, vocabulary_size: int, max_sequences: int, verdicts: Tensor, lossy_rows: Tensor) -> None:
        self._vocabulary_size = vocabulary_size
        self._sequences = max_sequences
        self._verdicts = verdicts
        self._lossy_rows = lossy_rows
        self._max_rows = max_rows = len(lossy_rows)
        self._chunks = triton.cdiv(vocabulary_size, _CHUNK)
        # Few sizes, so that most buckets and vocabularies share what is compiled.
        self._block_chunks = max(64, triton.next_power_of_2(self._chunks))
        self._block_rows = next(size for size in (16, 64, MAX_TREE_ROWS) if size >= min(max_rows, MAX_TREE_ROWS))

    def verify(self, step: StepToVerify, *, sampled: bool, filtered: bool, typical: bool) -> None:
        """Write the verdicts and, of TYPICAL sequences, the lossy rows.

        Two launches, three if `sampled`, two more if `filtered`, and two more if `typical`."""
        logits, token_ids, parents, parameters, distributions = step
        peaks, peak_ids, block_peaks, depths = self._peaks(step, sampled, filtered)
        cuts = cut_ids = None
        if filtered:
            cuts, cut_ids = self._cuts(step, peaks, block_peaks)
        scores, winners = peaks, peak_ids
        if sampled:
            scores = torch.empty(peaks.shape, dtype=torch.float64, device=logits.device)
            winners = torch.empty_like(peak_ids)
            score_kernel[tuple(peaks.shape)](
                logits, logits.stride(0), token_ids, parents, parameters, self._sequences, distributions,
                self._max_rows, peaks, peak_ids, depths, cuts, cut_ids, scores, winners, self._vocabulary_size,
                self._chunks, CHUNK=_CHUNK, BLOCK_CHUNKS=self._block_chunks, BLOCK_R=self._block_rows, CUT=filtered,
                DRAWN=distributions is not None, num_warps=4,
            )  # fmt: skip
        gains = self._gains(step, peaks, cuts, cut_ids) if typical else None
        walk_kernel[(self._sequences,)](
            logits, logits.stride(0), token_ids, parents, parameters, self._sequences, distributions, self._max_rows,
            peaks, cuts, cut_ids, scores, winners, gains, self._verdicts, self._lossy_rows, self._vocabulary_size,
            self._chunks, BLOCK_CHUNKS=self._block_chunks, BLOCK_R=self._block_rows, CHUNK=_CHUNK, SAMPLED=sampled,
            CUT=filtered, DRAWN=distributions is not None, TYPICAL_ROWS=typical, num_warps=4, num_stages=1,
        )  # fmt: skip

    def _gains(self, step: StepToVerify, peaks: Tensor, cuts: Tensor | None, cut_ids: Tensor | None) -> Tensor:
        """See `gain_kernel`."""
        logits, token_ids, parents, parameters, _ = step
        rows, device = logits.shape[0], logits.device
        moments = torch.empty(*peaks.shape, 2, dtype=torch.float64, device=device)
        gains = torch.empty(rows, dtype=torch.float64, device=device)
        moment_kernel[tuple(peaks.shape)](
            logits, logits.stride(0), parameters, self._sequences, peaks, cuts, cut_ids, moments, self._vocabulary_size,
            self._chunks, CHUNK=_CHUNK, BLOCK_CHUNKS=self._block_chunks, CUT=cuts is not None, num_warps=4,
        )  # fmt: skip
        gain_kernel[(rows,)](
            logits, logits.stride(0), token_ids, parents, parameters, self._sequences, peaks, cuts, cut_ids, moments,
            gains, self._vocabulary_size, self._chunks, BLOCK_CHUNKS=self._block_chunks, CUT=cuts is not None,
            num_warps=4,
        )  # fmt: skip
        return gains

    def _peaks(
        self, step: StepToVerify, sampled: bool, filtered: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        logits, _, parents, parameters, _ = step
        rows, device = logits.shape[0], logits.device
        peaks = torch.empty(rows, self._chunks, device=device)
        peak_ids = torch.empty(rows, self._chunks, dtype=torch.int32, device=device)
        block_peaks = torch.empty(rows, self._chunks * _CHUNK // _BLOCK, device=device) if filtered else None
        depths = torch.empty(rows, dtype=torch.int32, device=device) if sampled else None
        peak_kernel[(rows, self._chunks)](
            logits, logits.stride(0), parents, parameters, self._sequences, peaks, peak_ids, block_peaks, depths,
            self._vocabulary_size, self._chunks,
            CHUNK=_CHUNK, BLOCK=_BLOCK, BY_BLOCK=filtered, DEPTHS=sampled, num_warps=4,
        )  # fmt: skip
        return peaks, peak_ids, block_peaks, depths

    def _cuts(self, step: StepToVerify, peaks: Tensor, block_peaks: Tensor | None) -> tuple[Tensor, Tensor]:
        assert block_peaks is not None
        logits, parameters = step.logits, step.parameters
        rows, device = logits.shape[0], logits.device
        masses = torch.empty(*peaks.shape, RUNGS.value, dtype=torch.float64, device=device)
        mass_kernel[tuple(peaks.shape)](
            logits, logits.stride(0), parameters, self._sequences, peaks, masses, self._vocabulary_size, self._chunks,
            CHUNK=_CHUNK, BLOCK_CHUNKS=self._block_chunks, num_warps=4,
        )  # fmt: skip
        cuts = torch.empty(rows, dtype=torch.float64, device=device)
        cut_ids = torch.empty(rows, dtype=torch.int32, device=device)
        # Each program lists up to V tokens for itself, 12 bytes each.
        programs, row_blocks = min(rows, 128), block_peaks.shape[1]
        length = row_blocks * _BLOCK
        # So many tokens are listed, and searched, at a time. Lists of text are short; more would be faster for flat
        # distributions.
        tiles = {"TILE": 2048, "SEARCH": 1024}
        filter_kernel[(programs,)](
            logits, logits.stride(0), parameters, self._sequences, peaks, block_peaks, masses,
            torch.empty(programs, length, dtype=torch.float64, device=device),
            torch.empty(programs, length, dtype=torch.int32, device=device),
            torch.empty(programs, row_blocks, dtype=torch.int32, device=device),
            cuts, cut_ids, rows, self._vocabulary_size, self._chunks, row_blocks, length,
            BLOCK_CHUNKS=self._block_chunks, BLOCK=_BLOCK, ALL_BLOCKS=self._block_chunks * _CHUNK // _BLOCK,
            num_warps=8, num_stages=1, **tiles,
        )  # fmt: skip
        return cuts, cut_ids
