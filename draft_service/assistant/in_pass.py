"""Loads an assistant for a target, in whose process it runs: behind captured passes, or on a CPU after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from draft_service.assistant.checkpoint import AssistantCheckpoint
from draft_service.assistant.config import AssistantConfig
from draft_service.assistant.drafter import NAME
from draft_service.assistant.drafting import KeylessDrafting, Known
from draft_service.assistant.model import AssistantNetwork
from draft_service.assistant.pass_trees import KeylessTrees
from draft_service.drafters.base import DraftSequence
from draft_service.drafters.hidden_states import FeatureWindow, window_of
from draft_service.in_process import InprocessLink, link_to
from draft_service.neural.cuda_graphs.pass_drafter import PassDrafter
from draft_service.neural.cuda_graphs.pass_trees import CacheSizes, PassTrees
from draft_service.neural.tree_config import TreeShape
from draft_service.neural_drafter import NeuralDrafter
from outrider.drafting.events import DraftEvents
from outrider.errors import NotSupported
from outrider.heads import head_source
from outrider.settings import SettingsError
from outrider.wire.frames import FeatureRequest
from tree_kernels.attention import TreeAttention
from tree_models.in_pass import PassTarget, SequenceKeys, VerifiedPass
from tree_models.layers.linear import can_pack
from tree_models.layers.paged import CacheShape, expanded_shape
from tree_models.layers.placing import Placement
from tree_models.spec import AttentionSpec

if TYPE_CHECKING:
    from tree_kernels.latent_attention import LatentAttention

# Where a sequence's keys lie, of all tokens before its root; None while they are not all there.
KeysOf = Callable[[int], SequenceKeys | None]
# Positions are those of the target, which bounds them.
_LAST_POSITION = (1 << 31) - 2


def prepare(config: AssistantConfig, model: str) -> Callable[[PassTarget], InPassAssistant]:
    """Read an assistant's configuration. Returns a function that loads it for a target. Raises `SettingsError` where
    none is named, and `NotSupported` for what is none; the function also where it does not fit."""
    del model
    if not config.head:
        raise SettingsError(f"the {NAME} drafter needs a head: --head names Gemma 4's assistant, a folder or a hub id")
    return partial(_load, AssistantCheckpoint(head_source(config.head)), config)


def _load(stored: AssistantCheckpoint, config: AssistantConfig, target: PassTarget) -> InPassAssistant:
    if stored.vocab_size != target.vocabulary_size:
        raise NotSupported(f"the assistant has {stored.vocab_size} tokens, its target {target.vocabulary_size}")
    if stored.target_width != target.hidden_size:
        raise NotSupported(
            f"the assistant reads states {stored.target_width} wide, the target's are {target.hidden_size}"
        )
    if target.tokenizer_fingerprint not in ("", own := stored.tokenizer_fingerprint()) and own:
        raise NotSupported("the assistant was made for another tokenizer")
    if target.embed is None:
        raise NotSupported("an assistant reads all keys of one device in Outrider's own layers: not of several ranks")
    # The last layer of each type.
    kinds = ("full_attention" if window is None else "sliding_attention" for window in target.windows)
    places = {kind: place for place, kind in enumerate(kinds)}
    place = Placement(target.device, target.dtype, can_pack(target.dtype, target.device))
    assistant = stored.load(place, places)
    window = 0
    for layer in assistant.decoder.layer_specs:
        attending = layer.attention
        assert isinstance(attending, AttentionSpec) and attending.keys_in is not None, "as an assistant's layers are"
        if expanded_shape(attending) != target.cache_shapes[attending.keys_in]:
            raise NotSupported(
                f"the assistant reads {attending.kv_heads} keys {attending.head_width} wide of a token, the target has "
                f"{target.cache_shapes[attending.keys_in]}"
            )
        window = max(window, attending.window or 0)
    assistant.prepare()
    # Trees as those of captured drafters, where they are.
    config = replace(config, cuda_graphs=target.device.type == "cuda")
    return InPassAssistant(AssistantNetwork(assistant, target.embed), config, target, window)


class InPassAssistant(PassDrafter):
    """See `tree_models.in_pass.InPassDrafter`."""

    name, latent = NAME, False
    cache_shapes: Sequence[CacheShape] = ()

    def __init__(self, network: AssistantNetwork, config: AssistantConfig, target: PassTarget, window: int) -> None:
        """`window`: the longest of its layers, in tokens; 0 where none has one."""
        super().__init__(config.tree)
        # The state after the last norm.
        self.layers, self.window = (target.layers,), window
        self._network, self._config, self._target = network, config, target

    def tail(self, sequences: int) -> int:  # noqa: ARG002
        """See `InPassDrafter.tail`: it writes no keys."""
        return 0

    def read(self, done: VerifiedPass, sequences: int) -> None:
        """See `InPassDrafter.read`."""
        self.trees_for(sequences).read(done.rows, _LAST_POSITION)
        self.grow_from(done.states, done.positions)

    def link(
        self,
        events: DraftEvents,
        vocabulary_size: int,
        fingerprint: str,
        *,
        attention: TreeAttention,
        cache: Any,
        keys_of: KeysOf,
    ) -> InprocessLink:
        """A link to the same assistant for an engine whose steps the host verifies, in whose thread it drafts;
        `attention` and `cache` are those of its passes."""
        return link_to(self.on_host(attention, cache, keys_of), events, vocabulary_size, fingerprint)

    def on_host(self, attention: TreeAttention, cache: Any, keys_of: KeysOf) -> AssistantDrafter:
        """The same assistant as a drafter that the host runs."""
        drafting = KeylessDrafting(self._network, self._config.tree, attention, cache)
        return AssistantDrafter(self._config, self._target, self.layers, drafting, keys_of)

    def _make_trees(
        self, sequences: int, shape: TreeShape, attention: TreeAttention | LatentAttention, sizes: CacheSizes
    ) -> PassTrees:
        return KeylessTrees(sequences, shape, self._network, attention, sizes)


class AssistantDrafter(NeuralDrafter[KeylessDrafting]):
    """Drafts on a CPU, between the steps of an engine in the same thread. A sequence's state is a `Known` while it is
    drafted for, and before that its newest vector [1, W], or None."""

    name = NAME
    loops = ("draft_service.neural.level_growth:compile_loops",)

    def __init__(
        self,
        config: AssistantConfig,
        target: PassTarget,
        layers: tuple[int, ...],
        drafting: KeylessDrafting,
        keys_of: KeysOf,
    ) -> None:
        config = replace(config, device=str(target.device))
        super().__init__(config, config.tree, target.vocabulary_size, config.max_context)
        # What holds the target's numbers as they are.
        dtype = "bfloat16" if target.dtype is torch.bfloat16 else "float32"
        self.features = FeatureRequest(layers, target.hidden_size, dtype, window=1)
        self._made, self._keys_of = drafting, keys_of

    def open(self, sequence: DraftSequence) -> None:
        sequence.state, sequence.features = None, FeatureWindow(self.features.width, capacity=1)

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """Nothing to do, see `FeatureDrafter.absorb`: a sequence's one vector waits for the next tree."""

    def close(self, sequence: DraftSequence) -> None:
        sequence.state = sequence.features = None

    def stats(self) -> Mapping[str, float]:
        return {f"{NAME}_missing_features_total": self._misses}

    def _load(self) -> KeylessDrafting:
        return self._made

    def _prepare(self, sequences: Sequence[DraftSequence]) -> list[int]:
        places: list[int] = []
        for place, sequence in enumerate(sequences):
            window, known = window_of(sequence), len(sequence.token_ids) - 1
            state, keys = sequence.state, self._keys_of(sequence.sequence_id)
            if len(window):
                # One vector, the newest.
                (state,) = window.pop_vectors()[1]
            elif isinstance(state, Known):
                state = state.state
            if state is not None and window.end == known and keys is not None and keys.length == known:
                state = Known(state, keys)
                places.append(place)
            sequence.state = state
        self._misses += len(sequences) - len(places)
        return places
