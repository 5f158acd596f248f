"""The Medusa drafter: K heads over the target's last hidden state, and no pass but theirs.

The state of the token before the root, the last that the target knows, is all that the heads read. So nothing of a
prompt is followed and there is no cache: the newest vector of a sequence replaces the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draft_service.drafters.base import Drafter, DrafterSpec, DraftSequence
from draft_service.drafters.grown import Computed, Pending, among, warm_up
from draft_service.drafters.hidden_states import FeatureWindow
from draft_service.eagle.checkpoint import read_token_map
from draft_service.eagle.head_config import HeadRefused
from draft_service.eagle.target_checkpoint import TargetCheckpoint
from draft_service.medusa.checkpoint import load_heads, read_shape
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafting import MedusaDrafting
from draft_service.medusa.fixed_trees import FIXED_TREES, FixedTree
from draft_service.medusa.head import MedusaHead, MedusaShape
from draft_service.neural.devices import launching_on
from draft_service.neural.tree_config import TreeShape
from outrider.devices import check_device
from outrider.errors import InvalidField, UnknownModel
from outrider.heads import head_source
from outrider.model_store import model_source
from outrider.runtime import in_passing_thread
from outrider.sampling import LOSSLESS_MODES
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import FeatureRequest, TreeLimits


class MedusaDrafter(Drafter):
    """See `MedusaConfig` for what can be set, and `FeatureDrafter` for how features come in. A sequence's state is its
    newest vector, [1, H], or None."""

    name = "medusa"

    def __init__(self, config: MedusaConfig, heads: MedusaHead | None = None) -> None:
        """Reads the heads' configuration; their weights follow in `start`, unless `heads` are given.

        Raises:
            SettingsError: no heads are named, or the device is not there.
            NotSupported: there are no such heads, or they cannot be served.
            UnknownModel: there is no such target.
        """
        if heads is None and not config.head:
            raise SettingsError("the medusa drafter needs heads: --head names a folder or a hub id")
        check_device(config.device)
        self._config, self._heads = config, heads
        self._source = head_source(config.head) if heads is None else ""
        shape = read_shape(self._source) if heads is None else heads.config
        self._target = TargetCheckpoint(model_source(config.base_model)) if config.base_model else None
        self._tree: FixedTree | None = FIXED_TREES.get(config.tree)
        self._shape = _tree_shape(config, shape, self._tree)
        self.limits = TreeLimits(self._shape.num_draft_tokens, self._shape.num_steps)
        self.device = config.device
        self.vocabulary_size, self.max_context = shape.vocab_size, config.max_context
        self.tokenizer_fingerprint = shape.tokenizer_fingerprint
        layers = shape.layers_of(_layers_of_target(shape, self._target))
        self.features: FeatureRequest | None = FeatureRequest(layers, shape.hidden_size, config.feature_dtype, window=1)
        self._drafting: MedusaDrafting | None = None
        self._rows = self._misses = 0

    @property
    def heads(self) -> MedusaHead:
        """The heads, once they are loaded."""
        assert self._heads is not None, "the drafter was not started"
        return self._heads

    def start(self) -> None:
        """Load the weights, and compile and run once what drafting runs."""
        in_passing_thread(self._start)

    def open(self, sequence: DraftSequence) -> None:
        assert self.features is not None
        sequence.state, sequence.features = None, FeatureWindow(self.features.width, capacity=1)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:  # noqa: ARG002
        """Raises `InvalidField` when there are more features than tokens that can have one."""
        known, end = len(sequence.token_ids) - 1, _window(sequence).end
        if end > known:
            raise InvalidField("features", f"are {end}, and {known} tokens can have one")

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """See `FeatureDrafter.absorb`; what waits is at most one vector of each sequence, for the next tree."""

    def close(self, sequence: DraftSequence) -> None:
        sequence.state = sequence.features = None

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = [TokenTree.root_only(sequence.root) for sequence in sequences]
        with launching_on(self.device):
            places, states = self._ready(sequences)
            if states is not None:
                own = [sequences[place] for place in places]
                for place, tree in zip(places, self._loaded.trees(own, states), strict=True):
                    trees[place] = tree
        return trees

    def begin(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.begin`."""
        with launching_on(self.device):
            places, states = self._ready(sequences)
            if states is None:
                return among(sequences, places, None)
            own = [sequences[place] for place in places]
            return among(sequences, places, Computed(self._loaded.grown(own, states)))

    def stats(self) -> Mapping[str, float]:
        return {"medusa_feature_rows_total": self._rows, "medusa_missing_features_total": self._misses}

    @property
    def _loaded(self) -> MedusaDrafting:
        assert self._drafting is not None, "the drafter was not started"
        return self._drafting

    def _ready(self, sequences: Sequence[DraftSequence]) -> tuple[list[int], Tensor | None]:
        """Where those stand that have the vector of the token before their root, and these vectors, [n, H]."""
        places: list[int] = []
        for place, sequence in enumerate(sequences):
            window = _window(sequence)
            if len(window):
                sequence.state = window.take()[1]
                self._rows += 1
            if window.end == len(sequence.token_ids) - 1 and sequence.state is not None:
                places.append(place)
            else:
                self._misses += 1
        if not places:
            return places, None
        return places, torch.cat([sequences[place].state.float() for place in places])

    def _start(self) -> None:
        config = self._config
        with launching_on(self.device):
            if config.threads:
                torch.set_num_threads(config.threads)
            if self._heads is None:
                token_map = read_token_map(config.token_map) if config.token_map else None
                self._heads = load_heads(
                    self._source,
                    target=self._target,
                    token_map=token_map,
                    dtype=getattr(torch, config.dtype),
                    device=config.device,
                )
            self._drafting = MedusaDrafting(self._heads, self._shape, self._tree)
            self._warm_up()
            self._rows = self._misses = 0

    def _warm_up(self) -> None:
        """Draft once in every mode for a sequence that nobody has."""
        assert self.features is not None
        for mode in LOSSLESS_MODES:
            sequence = DraftSequence(0, [0, 0], 1, self.vocabulary_size, mode=mode)
            self.open(sequence)
            _window(sequence).append(torch.zeros(1, self.features.width), 0)
            warm_up(self, [sequence])
            self.close(sequence)


def _window(sequence: DraftSequence) -> FeatureWindow:
    assert sequence.features is not None, "a Medusa drafter's sequences have a window"
    return sequence.features


def _tree_shape(config: MedusaConfig, shape: MedusaShape, tree: FixedTree | None) -> TreeShape:
    """As `config` has it; a fixed tree says by itself how many nodes and ranks there are."""
    if config.num_steps > shape.num_heads:
        raise SettingsError(f"num_steps is {config.num_steps}, and there are {shape.num_heads} heads")
    steps = config.num_steps or shape.num_heads
    return TreeShape(
        num_steps=steps if tree is None else min(steps, tree.depth),
        topk=config.topk if tree is None else 1 + int(tree.ranks.max()),
        num_draft_tokens=config.num_draft_tokens if tree is None else len(tree.parents) - 1,
        min_score=config.min_score,
        race_entrants=config.race_entrants,
        race_sharpness=config.race_sharpness,
    )


def _layers_of_target(shape: MedusaShape, target: TargetCheckpoint | None) -> int:
    """How many decoder layers the target has, which says what its last state is called."""
    if target is not None:
        return target.facts().num_layers
    if shape.target_layers:
        return shape.target_layers
    if not shape.target:
        raise HeadRefused("how many layers the heads' target has is not said: name it (--base-model)")
    try:
        return TargetCheckpoint(model_source(shape.target)).facts().num_layers
    except (HeadRefused, UnknownModel) as refused:
        raise HeadRefused(
            f"how many layers {shape.target} has is not known here ({refused.message}): name the target (--base-model)"
        ) from None


SPEC = DrafterSpec("medusa", MedusaConfig, lambda config, _: MedusaDrafter(config))
"""Named in `DRAFTERS`."""
