"""Generated text as token ids, in a folder of safetensors files that appear only when complete, so that runs resume.

Also the choice of a head's draft vocabulary: the tokens its target generates most (FR-Spec, arXiv 2502.14856; EAGLE-3's
`d2t`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor

from outrider.distillation import WrittenText


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in ascending order of their numbers."""

    token_ids: NDArray[np.int32]  # [N] of all texts, one after the other
    starts: NDArray[np.int64]  # [n + 1] text i is `token_ids[starts[i] : starts[i + 1]]`
    prompt_lengths: NDArray[np.int32]  # [n]
    temperatures: NDArray[np.float32]  # [n]
    numbers: NDArray[np.int64]  # [n] as in `WrittenText`

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] tokens of each text."""
        return np.diff(self.starts)

    def text(self, index: int) -> NDArray[np.int32]:
        """[length] token ids of one text."""
        return self.token_ids[self.starts[index] : self.starts[index + 1]]

    def choose(self, indices: NDArray[np.int64]) -> Texts:
        """The texts of these indices, in that order."""
        pieces = [self.text(int(index)) for index in indices]
        return Texts(
            np.concatenate(pieces) if pieces else self.token_ids[:0],
            np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64),
            self.prompt_lengths[indices],
            self.temperatures[indices],
            self.numbers[indices],
        )


class Corpus:
    """A folder of texts, to which several processes may add, each under its own writer number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes: dict[Path, tuple[int, int]] = {}

    def add(self, texts: Sequence[WrittenText], writer: int) -> None:
        """Write the texts as one file. No other process may use the same `writer`."""
        count = len(list(self._folder.glob(f"{writer:03d}-*.safetensors")))
        path = self._folder / f"{writer:03d}-{count:06d}.safetensors"
        partial = path.with_suffix(".partial")
        lengths = [len(text.token_ids) for text in texts]
        tensors = {
            "token_ids": np.concatenate([np.asarray(text.token_ids, np.int32) for text in texts]),
            "lengths": np.asarray(lengths, np.int64),
            "prompt_lengths": np.asarray([text.prompt_length for text in texts], np.int32),
            "temperatures": np.asarray([text.temperature for text in texts], np.float32),
            "numbers": np.asarray([text.number for text in texts], np.int64),
        }
        last = max(text.number for text in texts)
        save_file(tensors, partial, metadata={"tokens": str(sum(lengths)), "last": str(last)})
        # Other processes see complete files only.
        partial.rename(path)

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self._scan().values())

    def next_number(self, writer: int, writers: int) -> int:
        """The number of this writer's next text; writer w of n has the numbers w, w + n, .. ."""
        own = [last for path, (_, last) in self._scan().items() if int(path.name[:3]) == writer]
        return max(own) + writers if own else writer

    def load(self) -> Texts:
        """All texts, in an order that depends on their numbers alone."""
        files = [load_file(path) for path in self._scan()]
        if not files:
            empty = np.zeros(0, np.int32)
            starts = np.zeros(1, np.int64)
            return Texts(empty, starts, empty, empty.astype(np.float32), empty.astype(np.int64))
        joined = {name: np.concatenate([file[name] for file in files]) for name in files[0]}
        starts = np.concatenate([[0], np.cumsum(joined["lengths"])]).astype(np.int64)
        unsorted = Texts(
            joined["token_ids"], starts, joined["prompt_lengths"], joined["temperatures"], joined["numbers"]
        )
        return unsorted.choose(np.lexsort((starts[:-1], joined["numbers"])).astype(np.int64))

    def _scan(self) -> dict[Path, tuple[int, int]]:
        """Tokens and last number of every file. Each file is read once."""
        for path in sorted(self._folder.glob("*.safetensors")):
            if path not in self._sizes:
                with safe_open(path, framework="np") as file:
                    metadata = file.metadata()
                self._sizes[path] = (int(metadata["tokens"]), int(metadata["last"]))
        return dict(sorted(self._sizes.items()))


def answer_counts(texts: Texts, vocab_size: int) -> NDArray[np.int64]:
    """[vocab_size] how often each token occurs in answers."""
    # +1 where an answer begins and -1 where its text ends: the running sum is 1 in answers and 0 in prompts.
    edges = np.zeros(len(texts.token_ids) + 1, np.int64)
    np.add.at(edges, texts.starts[:-1] + texts.prompt_lengths, 1)
    np.add.at(edges, texts.starts[1:], -1)
    in_answer = np.cumsum(edges[:-1])
    return np.bincount(texts.token_ids, weights=in_answer, minlength=vocab_size).astype(np.int64)


def choose_tokens(counts: NDArray[np.int64], size: int) -> Tensor | None:
    """[size] int64: the most frequent token ids in ascending order, of equals the lower ids; None for all."""
    if size == 0 or size >= len(counts):
        return None
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def coverage(counts: NDArray[np.int64], tokens: Tensor | None) -> float:
    """Share of the counted tokens that the draft vocabulary holds; `tokens` None is the whole vocabulary."""
    total = int(counts.sum())
    return 1.0 if tokens is None or total == 0 else float(counts[tokens.cpu().numpy()].sum() / total)
