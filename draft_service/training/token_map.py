"""Which tokens a head can say: those that its target says most (FR-Spec, arXiv 2502.14856; EAGLE-3's `d2t`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.training.corpus import Texts


def answer_counts(texts: Texts, vocab_size: int) -> NDArray[np.int64]:
    """[vocab_size] how often each token stands in an answer."""
    # +1 where an answer begins and -1 where its text ends: the running sum tells answers from prompts.
    edges = np.zeros(len(texts.token_ids) + 1, np.int64)
    np.add.at(edges, texts.starts[:-1] + texts.prompt_lengths, 1)
    np.add.at(edges, texts.starts[1:], -1)
    spoken = np.cumsum(edges[:-1])
    return np.bincount(texts.token_ids, weights=spoken, minlength=vocab_size).astype(np.int64)


def choose_tokens(counts: NDArray[np.int64], size: int) -> NDArray[np.int64] | None:
    """The `size` most frequent token ids, rising; among equals the lower ids. None for the whole vocabulary."""
    if size == 0 or size >= len(counts):
        return None
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)


def coverage(counts: NDArray[np.int64], tokens: NDArray[np.int64] | None) -> float:
    """Share of what was said that lies in the map."""
    total = int(counts.sum())
    return 1.0 if tokens is None or total == 0 else float(counts[tokens].sum() / total)
