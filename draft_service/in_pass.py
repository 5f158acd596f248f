"""An EAGLE head, MTP module or assistant that drafts behind the target's own passes, on its stream and in its cache:
the root of a tree is then known, and neither the host nor a wire lies between a pass and its drafts.

What a drafter of its own process knows of a sequence, this one reads of the pass: which rows were accepted, the hidden
states, the pages. It keeps nothing of a sequence beside its keys and values, which are layers of the target's cache; so
they are shared, kept and moved as the target's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from draft_service.assistant.drafter import NAME as ASSISTANT
from draft_service.assistant.in_pass import prepare as prepare_assistant
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.checkpoints.vocabulary import read_token_map
from draft_service.config import named_in_target
from draft_service.drafters.base import drafter_spec
from draft_service.eagle.checkpoint import EagleCheckpoint
from draft_service.eagle.config import EagleConfig, HeadDrafterConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import LayeredShape
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.mtp.checkpoint import MtpCheckpoint
from draft_service.mtp.drafter import MtpConfig, MtpDrafter
from draft_service.neural.cuda_graphs.pass_drafter import PassDrafter
from draft_service.neural.cuda_graphs.pass_trees import CacheSizes, PassTrees
from draft_service.neural.tree_config import TreeShape
from outrider.errors import NotSupported
from outrider.heads import head_source
from outrider.model_store import model_source
from outrider.settings import SettingsError
from tree_models.in_pass import MakeDrafter, PassTarget, VerifiedPass
from tree_models.layers.placing import Placement
from tree_models.spec import FamilyRefused

if TYPE_CHECKING:
    from tree_kernels.attention import TreeAttention
    from tree_kernels.latent_attention import LatentAttention

log = logging.getLogger(__name__)


def connect(argument: str, model: str) -> MakeDrafter:
    """Take the EAGLE head, MTP module or assistant of the drafter that `argument` names, see `named_in_target`, or of a
    merged one, whose other parts are left out. `model` is the target, whose modules are meant where no other is named.
    Returns a function that loads it for a target. Raises `NotSupported` or `SettingsError`; the function also what
    reading weights raises."""
    name, settings_of = named_in_target(argument)
    parts = drafter_spec(name).parts(settings_of(name)) or (name,)
    found = next((part for part in parts if part in _KINDS), None)
    if found is None:
        raise SettingsError(f"{name!r} does not run in the target's passes, {' and '.join(map(repr, _KINDS))} do")
    if others := [part for part in parts if part != found]:
        log.info("left out of the target's passes: %s", ", ".join(others))
    return _KINDS[found](settings_of(found), model)


class _StoredHead(NamedTuple):
    """A head that is not loaded yet."""

    shape: LayeredShape
    tokenizer_fingerprint: str  # empty for any
    # Where it lies, behind how many layers in the cache, and its draft vocabulary.
    load: Callable[[Placement, int, Sequence[int] | None], EagleHead]


def _eagle(config: EagleConfig, model: str) -> _StoredHead:
    found = EagleCheckpoint(head_source(config.head), config.window)

    def load(place: Placement, kept: int, token_map: Sequence[int] | None) -> EagleHead:
        own = TargetCheckpoint(model_source(config.embeddings or model))
        return found.load(place, target=own, token_map=token_map, kept=kept)

    return _StoredHead(found.config, found.config.tokenizer_fingerprint, load)


def _mtp(config: MtpConfig, model: str) -> _StoredHead:
    if config.num_modules > 1:
        raise SettingsError(
            f"num_modules {config.num_modules}: one drafts in the target's passes, several in a service"
        )
    named = config.base_model or model
    found = MtpCheckpoint(model_source(named), num_modules=1)

    def load(place: Placement, kept: int, token_map: Sequence[int] | None) -> EagleHead:
        return found.load(place, token_map=token_map, kept=kept)[0]

    return _StoredHead(found.configs[0], "" if named == model else found.tokenizer_fingerprint(), load)


def _prepare(read: Callable[[Any, str], _StoredHead], config: HeadDrafterConfig, model: str) -> MakeDrafter:
    # Trees as those of captured drafters.
    captured = replace(config, cuda_graphs=True)
    return partial(_load, read(captured, model), captured)


# By the drafter's name, what reads its head's configuration, with the drafter's settings and the target's name.
_KINDS: Mapping[str, Callable[[Any, str], MakeDrafter]] = {
    EagleDrafter.name: partial(_prepare, _eagle),
    MtpDrafter.name: partial(_prepare, _mtp),
    ASSISTANT: prepare_assistant,
}


def _load(stored: _StoredHead, config: HeadDrafterConfig, target: PassTarget) -> InPassHead | None:
    shape, fingerprint = stored.shape, stored.tokenizer_fingerprint
    if shape.vocab_size != target.vocabulary_size:
        raise NotSupported(f"the head's target has {shape.vocab_size} tokens, this one {target.vocabulary_size}")
    if target.tokenizer_fingerprint not in ("", fingerprint) and fingerprint:
        raise NotSupported("the head was made for another tokenizer")
    if shape.target_hidden_size != target.hidden_size:
        width = shape.target_hidden_size
        raise NotSupported(f"the head reads states {width} wide, the target's are {target.hidden_size}")
    place = Placement(target.device, target.dtype, packed=False, latent=target.latent, ranks=target.ranks)
    of_head = target.cached_layers, read_token_map(config.token_map)
    try:
        head = stored.load(place, *of_head)
    except FamilyRefused as refused:
        if target.ranks is None:
            raise
        if target.ranks.rank:
            return None
        log.warning("the head is not divided, and drafts on the first rank alone: %s", refused)
        head = stored.load(replace(place, ranks=None), *of_head)
    head.share(target.vocabulary_weights)
    head.prepare(int8=config.head_weights == "int8")
    return InPassHead(head, shape.feature_layers or shape.layers_of(target.layers), config)


class InPassHead(PassDrafter):
    """An EAGLE head or MTP module, or this rank's part of one. Its layers are of the cache, behind those of the
    target."""

    def __init__(self, head: EagleHead, layers: tuple[int, ...], config: HeadDrafterConfig) -> None:
        shape = head.config
        self.name = MtpDrafter.name if shape.kind == "mtp" else EagleDrafter.name
        self.layers = layers
        self._head, self._network = head, HeadNetwork(head)
        self.cache_shapes, self.latent = self._network.cache_shapes, head.latent
        self.divided = head.place.ranks is not None
        self.leaves_out = head.ends_at_once
        self._last_position = shape.max_positions - 1
        super().__init__(config.tree)

    def read(self, done: VerifiedPass, sequences: int) -> None:
        """See `InPassDrafter.read`."""
        trees, rows = self.trees_for(sequences), len(done.positions)
        trees.read(done.rows, self._last_position)
        features: Tensor = self._head.project(done.states)
        # Of the head's own keys all are kept, also where the target's layers with a window forget.
        step = replace(done.step, windowed=None)
        # Of prompts, and of rows that were not accepted, only keys are read later, a quarter of the head's arithmetic.
        self._head.read_rows(trees.tails.next_tokens[:rows], features, done.positions, step)
        self.grow_from(features, done.positions)

    def _make_trees(
        self, sequences: int, shape: TreeShape, attention: TreeAttention | LatentAttention, sizes: CacheSizes
    ) -> PassTrees:
        return PassTrees(sequences, shape, self._network, attention, sizes, self._head.place.ranks)
