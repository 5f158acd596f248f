"""What a runner needs of a model: our decoder has it, and a transformers model through an adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tree_kernels.recurrence import StateShape
from tree_models.layers.decoder import Tap
from tree_models.layers.paged import CacheShape, PagedPass
from tree_models.slots import Copy, WeightSlot


class TargetNetwork(Protocol):
    """A model over the paged cache: R rows of any sequences in, logits out."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden rows and logits."""

    @property
    def vocabulary_size(self) -> int:
        """V."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def layer_count(self) -> int:
        """Decoder layers."""

    @property
    def recurrent_layers(self) -> tuple[int, StateShape] | None:
        """How many layers keep states instead, and of which shape; None where there are none."""

    @property
    def windows(self) -> Sequence[int | None]:
        """By layer with keys and values, how many tokens a row sees; None for all."""

    @property
    def longest_context(self) -> int:
        """Tokens of the longest text."""

    @property
    def latent(self) -> bool:
        """Whether the cache holds latents instead of keys and values."""

    @property
    def cache_shapes(self) -> Sequence[CacheShape]:
        """Of the cache of each layer that keeps keys and values, or latents."""

    def __call__(self, token_ids: Tensor, positions: Tensor, step: PagedPass, rows: Tensor | int = 0) -> Tensor:
        """Logits [.., V] of the given rows, 0 for all, of token ids [R] and positions [R]."""

    def tap(self, layer: int, keep: Tap) -> Callable[[], None]:
        """Give the output [R, H] of a layer to `keep` in every pass; the number of layers stands for the rows after the
        last norm. Returns what ends that. Raises `NotSupported` where the layers cannot be found."""

    def slots(self, copy: Copy) -> list[WeightSlot]:
        """Slots of every tensor, by their names in checkpoints, written by `copy`."""
