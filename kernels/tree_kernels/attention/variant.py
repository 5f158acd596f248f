"""What a kind of layer does to attention besides scaling its scores: a window, a cap of scores, sinks, slopes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """One layer's kind of attention. Each part that is absent costs nothing.

    A key's position is its place in the prefix, or for a row of the tail the prefix's length and the row's depth in its
    tree: siblings share a position. Neither slots nor indices of rows count.
    """

    # A row at position p sees keys at positions above p - window: itself and window - 1 before it. None for all.
    window: int | None = None
    score_cap: float | None = None  # scores are cap * tanh(score / cap) once they are scaled (Gemma 2)
    # [Hq] fp32: a logit of each query head, one more term in its softmax's sum, for which there is no value (gpt-oss).
    sinks: Tensor | None = None
    # The keys that a row at position p sees begin at the multiple of `window` at or below p instead (Llama 4).
    chunked: bool = False
    # [Hq] fp32: what each query head's scores fall by with each position between a row and a key (ALiBi, arXiv
    # 2108.12409).
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected a window of at least one key, got {self.window}")
        if self.score_cap is not None and self.score_cap <= 0:
            raise ValueError(f"expected a positive cap of scores, got {self.score_cap}")

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax over all earlier keys."""
        return self.window is None and self.score_cap is None and self.sinks is None and self.slopes is None

    def first_key(self, position: int) -> int:
        """The first key of the prefix that a row at `position` sees."""
        if self.window is None:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)


PLAIN = AttentionVariant()
