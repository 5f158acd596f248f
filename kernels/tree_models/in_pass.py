"""A drafter that the target's own passes run: behind each of them, on the same stream, without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tree_kernels.attention import TreeAttention
from tree_kernels.latent_attention import LatentAttention
from tree_kernels.pass_trees import VerifiedRows
from tree_models.layers.decoder import Decoder
from tree_models.layers.paged import CacheShape, PagedPass
from tree_models.rank_group import RankGroup


class PassTarget(NamedTuple):
    """The model behind whose passes a drafter is to run."""

    layers: int  # decoder layers
    cached_layers: int  # of them, those with keys and values, or latents
    latent: bool  # the cache keeps latents
    hidden_size: int
    vocabulary_size: int
    tokenizer_fingerprint: str
    device: torch.device
    dtype: torch.dtype
    vocabulary_weights: Sequence[nn.Parameter] = ()  # as the function has them
    # Where Outrider's own layers run on one device: of each layer with keys and values what it caches, and how many
    # tokens its rows see, None for all; and what embeds token ids and positions [R] as its first layer reads them.
    cache_shapes: Sequence[CacheShape] = ()
    windows: Sequence[int | None] = ()
    embed: Callable[[Tensor, Tensor], Tensor] | None = None
    ranks: RankGroup | None = None  # those that share the model, each of which makes a drafter; None where it is whole


class SequenceKeys(NamedTuple):
    """Where a sequence's keys and values lie in the target's cache."""

    pages: Sequence[int]
    length: int  # keys


class _Network(Protocol):
    """The part of a target's model that `pass_target` reads."""

    @property
    def layer_count(self) -> int: ...
    @property
    def cache_shapes(self) -> Sequence[CacheShape]: ...
    @property
    def latent(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


def pass_target(network: _Network, tokenizer_fingerprint: str) -> PassTarget:
    """What a drafter is told of a target's model."""
    sizes = network.layer_count, len(network.cache_shapes), network.latent, network.hidden_size, network.vocabulary_size
    target = PassTarget(*sizes, tokenizer_fingerprint, network.device, network.dtype)
    if not isinstance(network, Decoder):
        return target
    target = target._replace(vocabulary_weights=vocabulary_weights(network))
    if network.place.ranks is not None:
        return target._replace(ranks=network.place.ranks)
    return target._replace(cache_shapes=network.cache_shapes, windows=network.windows, embed=network.embedded)


def vocabulary_weights(decoder: Decoder) -> Sequence[nn.Parameter]:
    """[V, H] the token embedding, and the output head where it is not packed: a drafter that has the same may share
    them."""
    return [decoder.embedding] if decoder.head.plain is None else [decoder.embedding, decoder.head.plain.weight]


class VerifiedPass(NamedTuple):
    """A pass whose rows were verified and not moved yet."""

    rows: VerifiedRows
    states: Tensor  # [R, F * W], the outputs of the layers that the drafter reads, side by side
    positions: Tensor  # [R] int32
    step: PagedPass  # over the rows of the pass, as the target's layers had it


class TablesToWrite(NamedTuple):
    """Where trees go; see `tree_kernels.pass_trees.write_tables`."""

    table_slots: Tensor  # [sequences or more] int32
    trust: Tensor  # [1] float32
    tables: Tensor  # [.., TABLE] int32


class DraftingKind(NamedTuple):
    """What is done behind a pass: for how many sequences at most, whether trees are grown, and some are COUPLED."""

    sequences: int
    grows: bool
    coupled: bool


class InPassDrafter(Protocol):
    """What drafts behind passes. Its keys and values are layers of the target's cache, behind those of the target.

    For each pass `read` is called, then the target moves what it wrote of accepted rows, the drafter's layers too, and
    then `grow` is called, unless no tree is wanted. Nothing waits for the device, and tensors keep their addresses, so
    that both can be captured for each size of a pass. Where ranks share a drafter, all make the same calls.
    """

    name: str  # of the kind of drafter
    layers: tuple[int, ...]  # of the target, whose outputs it reads
    cache_shapes: Sequence[CacheShape]  # of its layers
    latent: bool  # its layers keep latents, as the target's do then
    divided: bool  # every rank of the target has a part of it; else that of the first rank drafts alone
    window: int  # tokens that it sees of the target's layers with a window; 0 for none

    def tail(self, sequences: int) -> int:
        """Keys behind those of a sequence that a tree writes, in a pass of so many sequences."""

    def prepare(self, attention: TreeAttention | LatentAttention, page_size: int, max_context: int, rows: int) -> None:
        """Make room for passes of so many rows of a cache with such pages. Once, before anything is captured."""

    def read(self, done: VerifiedPass, sequences: int) -> None:
        """Read the rows of a pass of so many sequences at most."""

    def grow(self, sequences: int, step: PagedPass, to: TablesToWrite | None, *, coupled: bool) -> None:
        """Grow trees behind the pass that was read last, which is `step`; `coupled` if sequences may be COUPLED. They
        are not written where `to` is None."""


# Loads a drafter for a target, or this rank's part of one; None where the first rank alone has one. Raises
# `outrider.errors.NotSupported` where it does not fit, and what reading weights raises.
MakeDrafter = Callable[[PassTarget], InPassDrafter | None]
