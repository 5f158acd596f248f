"""The EAGLE drafter: an EAGLE head, in any published layout, over the target's features."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.drafters.base import DrafterSpec
from draft_service.eagle.checkpoint import EagleCheckpoint
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig, LayeredShape
from draft_service.eagle.head_drafter import HeadDrafter
from outrider.errors import UnknownModel
from outrider.heads import HeadRefused, head_source
from outrider.model_store import model_source
from outrider.settings import SettingsError
from outrider.wire.frames import FeatureRequest


class EagleDrafter(HeadDrafter):
    """See `EagleConfig` for the settings."""

    name = "eagle"

    def __init__(self, config: EagleConfig, head: EagleHead | None = None) -> None:
        """Reads the head's configuration; `start` loads its weights, unless a `head` is given. Raises `SettingsError`
        if none is named, `NotSupported` if there is none or it is not supported, and `UnknownModel` for its target."""
        if head is None and not config.head:
            raise SettingsError(
                "the eagle drafter needs a head: a name from `outrider head list`, a folder or a hub id"
            )
        self._given = EagleCheckpoint(head_source(config.head), config.window) if head is None else head
        shape = self._given.config
        self._target, self._no_target = _target_of(config, shape)
        super().__init__(config, shape, self._request(config, shape))

    def _load_head(self, token_map: Sequence[int] | None) -> EagleHead:
        if isinstance(self._given, EagleHead):
            return self._given
        try:
            return self._given.load(self._place, target=self._target, token_map=token_map)
        except HeadRefused as refused:
            if not self._no_target:
                raise
            raise HeadRefused(f"{refused}; the one that its record names was not found: {self._no_target}") from None

    def _request(self, config: EagleConfig, shape: LayeredShape) -> FeatureRequest:
        layers = shape.feature_layers
        if layers is None:
            if self._target is None:
                raise HeadRefused("the layers that the head reads depend on its target: name it (embeddings)")
            layers = shape.layers_of(self._target.num_layers)
        projected = config.projection == "target" and shape.is_projected
        width = shape.hidden_size if projected else shape.num_features * shape.target_hidden_size
        found = self._given
        copied = found.projection_fingerprint() if projected and isinstance(found, EagleCheckpoint) else ""
        window = config.feature_window
        if isinstance(shape, HeadConfig) and shape.window is not None:
            # What its attention sees no more is not sent either. Each layer sees as far back of the one before.
            window = min(window, 1 + shape.num_layers * (shape.window - 1))
        return FeatureRequest(
            layers, width, config.feature_dtype, projected, window=window, projection_fingerprint=copied
        )


def _target_of(config: EagleConfig, shape: LayeredShape) -> tuple[TargetCheckpoint | None, str]:
    """The target's checkpoint, None if there is none; and why the one that the head's record names cannot be found."""
    if config.embeddings:
        return TargetCheckpoint(model_source(config.embeddings)), ""
    if not shape.target:
        return None, ""
    try:
        return TargetCheckpoint(model_source(shape.target)), ""
    except (HeadRefused, UnknownModel) as refused:
        return None, refused.message


SPEC = DrafterSpec("eagle", EagleConfig, EagleDrafter)
