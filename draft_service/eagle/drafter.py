"""The EAGLE drafter: an EAGLE head over the target's features, with trees that grow as EAGLE-2's do.

Entry i of a sequence's cache pairs the feature of token i with the embedding of token i + 1 at rotary position i, and
guesses token i + 2. With L tokens there are L - 1 features and as many entries, and the last one speaks of what
follows the root. Entries are made of the target's own features; those of a tree's nodes, made of the head's, are
overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.base import Drafter, DrafterSpec, DraftSequence, MakePart
from draft_service.drafters.grown import Pending, among, warm_up
from draft_service.drafters.hidden_states import FeatureWindow
from draft_service.eagle.checkpoint import load_head, projection_fingerprint, read_config, read_token_map
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.fused_head import MAX_ROWS, fused
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig, HeadRefused
from draft_service.eagle.target_checkpoint import TargetCheckpoint
from draft_service.neural.cuda_graphs.attention import StaticAttend
from draft_service.neural.cuda_graphs.drafting import FIRST_PROMPTS, drafting_on, first_batches
from draft_service.neural.network import RowOutput
from draft_service.neural.tail_attention import Attend
from draft_service.neural.threads import in_passing_thread, launching_on
from draft_service.neural.tree_drafting import CacheEntry, Extension, TreeDrafting, Wanted
from outrider.errors import InvalidField, UnknownModel
from outrider.heads import head_source
from outrider.model_store import model_source
from outrider.sampling import VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
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


@dataclass(slots=True, eq=False)
class _State:
    """A sequence as the head follows it."""

    followed: CacheEntry
    window: FeatureWindow


class EagleDrafter:
    """See `EagleConfig` for what can be set, and `FeatureDrafter` for how features come in."""

    name = "eagle"

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
        self.limits = config.tree.limits
        self.device = config.device
        self.max_context = config.max_context
        self.vocabulary_size = shape.vocab_size
        self.tokenizer_fingerprint = shape.tokenizer_fingerprint
        self.features: FeatureRequest | None = self._request(shape)
        self._drafting: TreeDrafting | None = None
        self._misses = self._full = self._rows = 0

    def start(self) -> None:
        """Load the weights, and compile and run once what drafting runs."""
        in_passing_thread(self._start)

    def stop(self) -> None:
        """Nothing to keep."""

    def open(self, sequence: DraftSequence) -> None:
        assert self.features is not None
        sequence.features = FeatureWindow(self.features.width, self._config.feature_window)
        sequence.state = _State(CacheEntry(), sequence.features)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:  # noqa: ARG002
        """Raises `InvalidField` when there are more features than tokens that can have one."""
        known, end = len(sequence.token_ids) - 1, sequence.state.window.end
        if end > known:
            raise InvalidField("features", f"are {end}, and {known} tokens can have one")

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self.drafting.forget(sequence.state.followed)
            sequence.state = sequence.features = None

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """See `FeatureDrafter.absorb`."""
        # A feature's entry needs the token after its own.
        paired = [one for one in sequences if one.state.window.end < len(one.token_ids)]
        with launching_on(self._config.device):
            self._read([sequence for sequence in paired if self._has_room(sequence)])

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = [TokenTree.root_only(sequence.root) for sequence in sequences]
        with launching_on(self._config.device):
            places, wanted = self._prepare(sequences)
            if wanted:
                for place, tree in zip(places, self.drafting.trees(wanted), strict=True):
                    trees[place] = tree
        return trees

    def begin(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.begin`."""
        with launching_on(self._config.device):
            places, wanted = self._prepare(sequences)
            return among(sequences, places, self.drafting.begin(wanted) if wanted else None)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> tuple[list[int], list[Wanted]]:
        """Read what arrived of those that can be drafted for. Returns where they stand, and their trees-to-be."""
        places = [place for place, sequence in enumerate(sequences) if self._ready(sequence)]
        ready = [sequences[place] for place in places]
        self._read(ready)
        return places, [Wanted(one.state.followed, one, len(one.token_ids) - 1) for one in ready]

    def stats(self) -> Mapping[str, float]:
        pages = self._drafting.cache.used_pages if self._drafting is not None else 0
        return {
            "eagle_cache_used_tokens": pages * self._config.page_size,
            "eagle_feature_rows_total": self._rows,
            "eagle_missing_features_total": self._misses,
            "eagle_cache_full_total": self._full,
        }

    @property
    def head(self) -> EagleHead:
        """The head, once it is loaded."""
        assert self._head is not None, "the drafter was not started"
        return self._head

    @property
    def drafting(self) -> TreeDrafting:
        """What drafts with the head, once it is loaded."""
        assert self._drafting is not None, "the drafter was not started"
        return self._drafting

    def _start(self) -> None:
        with launching_on(self._config.device):
            self._load()
            self._warm_up()

    def _load(self) -> None:
        config = self._config
        if config.threads:
            torch.set_num_threads(config.threads)
        if self._head is None:
            self._head = self._loaded()
        self._drafting = drafting_on(HeadNetwork(self._head), config)

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
        state: _State = sequence.state
        known, window = len(sequence.token_ids) - 1, state.window
        if window.end != known or not (len(window) or state.followed.entries):
            self._misses += 1
            return False
        return self._has_room(sequence)

    def _has_room(self, sequence: DraftSequence) -> bool:
        state: _State = sequence.state
        if self.drafting.reserve(state.followed, len(state.window)):
            return True
        self._full += 1
        return False

    @torch.inference_mode()
    def _read(self, sequences: Sequence[DraftSequence]) -> None:
        """Extend the cache by what arrived."""
        assert self.features is not None
        waiting = [sequence for sequence in sequences if len(sequence.state.window)]
        taken = [sequence.state.window.take() for sequence in waiting]
        if not taken:
            return
        # In one copy to the device, and one pass of the projection.
        staging, device = self.drafting.staging, self.drafting.network.device
        vectors = staging.join([vectors for _, vectors in taken])
        features = vectors if self.features.projected else self.head.project(vectors.to(device, non_blocking=True))
        extensions = []
        for sequence, (begin, own) in zip(waiting, taken, strict=True):
            tokens = sequence.token_ids[begin + 1 : begin + 1 + len(own)]
            extensions.append(Extension(sequence.state.followed, tokens, begin))
        self._rows += len(vectors)
        self.drafting.extend(extensions, features)
        staging.sent()

    def _warm_up(self) -> None:
        """Draft once for throw-away sequences, see `first_batches`."""
        assert self.features is not None
        prompts = [(VerificationMode.GREEDY, 1, rows) for rows in FIRST_PROMPTS]
        for mode, count, rows in prompts + [(*batch, 1) for batch in first_batches(self.drafting, self._config)]:
            tokens = [0] * (rows + 1)
            sequences = [DraftSequence(i, [*tokens], 1, self.vocabulary_size, mode=mode) for i in range(count)]
            for sequence in sequences:
                self.open(sequence)
                assert sequence.features is not None
                sequence.features.append(torch.zeros(rows, self.features.width), 0)
            warm_up(self, sequences)
            for sequence in sequences:
                self.close(sequence)
        self._rows = self._full = 0


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


def _create(config: EagleConfig, _: MakePart) -> Drafter:
    return EagleDrafter(config)


SPEC = DrafterSpec("eagle", "eagle", EagleConfig, _create)
"""Named in `DRAFTERS`."""
