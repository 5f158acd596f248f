"""The EAGLE drafter: an EAGLE head over the target's features, with trees that grow as EAGLE-2's do.

Entry i of a sequence's cache pairs the feature of token i with the embedding of token i + 1 at rotary position i, and
guesses token i + 2. With L tokens there are L - 1 features and as many entries, and the last one speaks of what
follows the root. Entries are made of the target's own features; those of a tree's nodes, made of the head's, are
overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.base import DrafterSpec, DraftSequence
from draft_service.drafters.hidden_states import FeatureWindow
from draft_service.eagle.checkpoint import load_head, projection_fingerprint, read_config, read_token_map
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.fused_head import MAX_ROWS, fused
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig, HeadRefused
from draft_service.eagle.target_checkpoint import TargetCheckpoint
from draft_service.neural.cuda_graphs.attention import StaticAttend
from draft_service.neural.cuda_graphs.drafting import FIRST_PROMPTS
from draft_service.neural.devices import launching_on
from draft_service.neural.network import Network, RowOutput
from draft_service.neural.tail_attention import Attend
from draft_service.neural.tree_drafting import Extension
from draft_service.neural_drafter import NeuralDrafter
from outrider.errors import InvalidField, UnknownModel
from outrider.heads import head_source
from outrider.model_store import model_source
from outrider.settings import SettingsError
from outrider.wire.frames import FeatureRequest


class HeadNetwork:
    """A head as `neural.tree_drafting.Network`."""

    def __init__(self, head: EagleHead) -> None:
        config, weight = head.config, head.embed_tokens.weight
        self._head, self._fused = head, fused(head)
        self.layers, self.kv_heads, self.head_dim = config.num_layers, config.num_kv_heads, config.head_dim
        self.dtype, self.device = weight.dtype, weight.device
        ids = head.token_ids
        self.token_ids = None if ids is None else ids.cpu().numpy().astype(np.int32)

    def read(self, token_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> RowOutput:
        """See `Network.read`; carried are features [R, H]."""
        assert carried is not None, "an EAGLE head reads features"
        if self._fused is not None and isinstance(attend, StaticAttend) and len(token_ids) <= MAX_ROWS:
            return RowOutput(*self._fused.forward(token_ids, carried, positions, attend))
        return RowOutput(*self._head(token_ids, carried, positions, attend))

    def logits(self, lm_input: Tensor) -> Tensor:
        """See `Network.logits`."""
        return self._head.logits(lm_input)


class EagleDrafter(NeuralDrafter):
    """See `EagleConfig` for what can be set, and `FeatureDrafter` for how features come in."""

    name = "eagle"
    # Entry i is of token i + 1.
    children_at = -1
    first_prompts = FIRST_PROMPTS

    def __init__(self, config: EagleConfig, head: EagleHead | None = None) -> None:
        """Reads the head's configuration; its weights follow in `start`, unless a `head` is given.

        Raises:
            SettingsError: no head is named.
            NotSupported: there is no such head, or it cannot be served.
            UnknownModel: there is no such target.
        """
        if head is None and not config.head:
            raise SettingsError(
                "the eagle drafter needs a head: a name from `outrider head list`, a folder or a hub id"
            )
        self._config = config
        self._head = head
        # Empty where the head was given.
        self._source = head_source(config.head) if head is None else ""
        shape = read_config(self._source) if head is None else head.config
        self._target, self._no_target = _target_of(config, shape)
        super().__init__(config, shape.vocab_size, config.max_context)
        self.tokenizer_fingerprint = shape.tokenizer_fingerprint
        self.features: FeatureRequest | None = self._request(shape)
        self._misses = 0

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        assert self.features is not None
        sequence.features = FeatureWindow(self.features.width, self._config.feature_window)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:  # noqa: ARG002
        """Raises `InvalidField` when there are more features than tokens that can have one."""
        known, end = len(sequence.token_ids) - 1, _window(sequence).end
        if end > known:
            raise InvalidField("features", f"are {end}, and {known} tokens can have one")

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """See `FeatureDrafter.absorb`."""
        # A feature's entry needs the token after its own.
        paired = [one for one in sequences if _window(one).end < len(one.token_ids)]
        with launching_on(self.device):
            self._read([one for one in paired if self._has_room(one, len(_window(one)))])

    def stats(self) -> Mapping[str, float]:
        return {
            "eagle_cache_used_tokens": self._cached_tokens,
            "eagle_feature_rows_total": self._rows,
            "eagle_missing_features_total": self._misses,
            "eagle_cache_full_total": self._full,
        }

    @property
    def head(self) -> EagleHead:
        """The head, once it is loaded."""
        assert self._head is not None, "the drafter was not started"
        return self._head

    def _load(self) -> Network:
        if self._head is None:
            self._head = self._loaded()
        return HeadNetwork(self._head)

    def _loaded(self) -> EagleHead:
        config = self._config
        token_map = read_token_map(config.token_map) if config.token_map else None
        dtype = getattr(torch, config.dtype)
        try:
            return load_head(self._source, target=self._target, token_map=token_map, dtype=dtype, device=config.device)
        except HeadRefused as refused:
            if not self._no_target:
                raise
            raise HeadRefused(f"{refused}; the one that its record names is not here: {self._no_target}") from None

    def _request(self, shape: HeadConfig) -> FeatureRequest:
        config = self._config
        layers = shape.feature_layers
        if layers is None:
            if self._target is None:
                raise HeadRefused("which layers the head reads depends on its target: name it (embeddings)")
            layers = shape.layers_of(self._target.facts().num_layers)
        projected = config.projection == "target" and shape.kind == "eagle3"
        width = shape.hidden_size if projected else shape.num_features * shape.target_hidden_size
        return FeatureRequest(
            layers,
            width,
            config.feature_dtype,
            projected,
            window=config.feature_window,
            projection_fingerprint=projection_fingerprint(self._source) if projected and self._source else "",
        )

    def _ready(self, sequence: DraftSequence) -> bool:
        """Whether features reach the token before the root, and the cache has room."""
        known, window = len(sequence.token_ids) - 1, _window(sequence)
        if window.end != known or not (len(window) or sequence.state.entries):
            self._misses += 1
            return False
        return self._has_room(sequence, len(window))

    @torch.inference_mode()
    def _read(self, sequences: Sequence[DraftSequence]) -> None:
        assert self.features is not None
        waiting = [sequence for sequence in sequences if len(_window(sequence))]
        taken = [_window(sequence).take() for sequence in waiting]
        if not taken:
            return
        # In one copy to the device, and one pass of the projection.
        staging, device = self.drafting.staging, self.drafting.network.device
        vectors = staging.join([vectors for _, vectors in taken])
        features = vectors if self.features.projected else self.head.project(vectors.to(device, non_blocking=True))
        extensions = []
        for sequence, (begin, own) in zip(waiting, taken, strict=True):
            tokens = sequence.token_ids[begin + 1 : begin + 1 + len(own)]
            extensions.append(Extension(sequence.state, tokens, begin))
        self._rows += len(vectors)
        self.drafting.extend(extensions, features)
        staging.sent()


def _window(sequence: DraftSequence) -> FeatureWindow:
    assert sequence.features is not None, "an EAGLE drafter's sequences have a window"
    return sequence.features


def _target_of(config: EagleConfig, shape: HeadConfig) -> tuple[TargetCheckpoint | None, str]:
    """The target's checkpoint, where one is named. What a head's record names need not be here: then why it is not."""
    if config.embeddings:
        return TargetCheckpoint(model_source(config.embeddings)), ""
    if not shape.target:
        return None, ""
    try:
        return TargetCheckpoint(model_source(shape.target)), ""
    except (HeadRefused, UnknownModel) as refused:
        return None, refused.message


SPEC = DrafterSpec("eagle", EagleConfig, lambda config, _: EagleDrafter(config))
"""Named in `DRAFTERS`."""
