"""The Medusa drafter: one pass of K heads over the target's last hidden state.

The heads read the state of the token before the root, the last one that the target has. So there is no cache and no
pass over prompts: a sequence's newest vector replaces the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.checkpoints.vocabulary import read_token_map
from draft_service.drafters.base import DrafterSpec, DraftSequence
from draft_service.drafters.hidden_states import FeatureWindow, window_of
from draft_service.medusa.checkpoint import MedusaCheckpoint
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafting import MedusaDrafting
from draft_service.medusa.head import MedusaHead, MedusaShape
from draft_service.neural.tree_config import TreeShape
from draft_service.neural_drafter import NeuralDrafter
from outrider.errors import UnknownModel
from outrider.heads import HeadRefused, head_source
from outrider.model_store import model_source
from outrider.settings import SettingsError
from outrider.wire.frames import FeatureRequest


class MedusaDrafter(NeuralDrafter[MedusaDrafting]):
    """See `MedusaConfig` for the settings, and `FeatureDrafter` for how features arrive. A sequence's state is its
    newest vector, [1, H], or None."""

    name = "medusa"
    _config: MedusaConfig

    def __init__(self, config: MedusaConfig, heads: MedusaHead | None = None) -> None:
        """Reads the heads' configuration; `start` loads their weights, unless `heads` are given. Raises `SettingsError`
        if none are named, `NotSupported` if there are none or they are not supported, and `UnknownModel`."""
        if heads is None and not config.head:
            raise SettingsError("the medusa drafter needs heads: --head names a folder or a hub id")
        self._heads = MedusaCheckpoint(head_source(config.head)) if heads is None else heads
        shape = self._heads.config
        self._target = TargetCheckpoint(model_source(config.base_model)) if config.base_model else None
        self._tree = _tree_shape(config, shape)
        super().__init__(config, self._tree, shape.vocab_size, config.max_context)
        self.tokenizer_fingerprint = shape.tokenizer_fingerprint
        layers, width = shape.layers_of(_layers_of_target(shape, self._target)), shape.target_hidden_size
        self.features = FeatureRequest(layers, width, config.feature_dtype, window=1)

    def open(self, sequence: DraftSequence) -> None:
        sequence.state, sequence.features = None, FeatureWindow(self.features.width, capacity=1)

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """Nothing to do, see `FeatureDrafter.absorb`: a sequence's one vector waits for the next tree."""

    def close(self, sequence: DraftSequence) -> None:
        sequence.state = sequence.features = None

    def stats(self) -> Mapping[str, float]:
        return {"medusa_feature_rows_total": self._rows, "medusa_missing_features_total": self._misses}

    def _load(self) -> MedusaDrafting:
        if isinstance(self._heads, MedusaCheckpoint):
            token_map = read_token_map(self._config.token_map)
            self._heads = self._heads.load(self._place, target=self._target, token_map=token_map)
        return MedusaDrafting(self._heads, self._tree)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> list[int]:
        places: list[int] = []
        for place, sequence in enumerate(sequences):
            window = window_of(sequence)
            if len(window):
                # One vector, the newest.
                (sequence.state,) = window.pop_vectors()[1]
                self._rows += 1
            if window.end == len(sequence.token_ids) - 1 and sequence.state is not None:
                places.append(place)
            else:
                self._misses += 1
        return places


def _tree_shape(config: MedusaConfig, shape: MedusaShape) -> TreeShape:
    if config.num_steps > shape.num_heads:
        raise SettingsError(f"num_steps is {config.num_steps}, and there are {shape.num_heads} heads")
    return TreeShape(
        num_steps=config.num_steps or shape.num_heads,
        topk=config.topk,
        num_draft_tokens=config.num_draft_tokens,
        min_score=config.min_score,
        gumbel_candidates=config.gumbel_candidates,
        gumbel_sharpness=config.gumbel_sharpness,
    )


def _layers_of_target(shape: MedusaShape, target: TargetCheckpoint | None) -> int:
    """The number of the target's decoder layers, which is the index of its last state."""
    if target is not None:
        return target.num_layers
    if shape.target_layers:
        return shape.target_layers
    if not shape.target:
        raise HeadRefused("the number of the target's layers is unknown: name the target (--base-model)")
    try:
        return TargetCheckpoint(model_source(shape.target)).num_layers
    except (HeadRefused, UnknownModel) as refused:
        raise HeadRefused(
            f"the number of layers of {shape.target} is unknown ({refused.message}): name the target (--base-model)"
        ) from None


SPEC = DrafterSpec("medusa", MedusaConfig, MedusaDrafter)
