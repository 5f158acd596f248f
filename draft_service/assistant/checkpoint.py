"""Gemma 4's assistant on disk, as transformers writes it, in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.assistant.model import Assistant, Clusters
from draft_service.checkpoints.files import fill
from draft_service.checkpoints.target import folder_fingerprint
from outrider.checkpoints.causal_lm import configuration_of
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.heads import HeadRefused
from outrider.weights import Weights
from tree_models.families.gemma import gemma4_assistant
from tree_models.layers.placing import Placement
from tree_models.spec import FamilyRefused

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Of the vocabulary, an integer for each token: no weight.
_ORDER = "masked_embedding.token_ordering"


class AssistantCheckpoint:
    """An assistant's folder or hub id."""

    def __init__(self, source: str | Path) -> None:
        """Reads the configuration alone. Raises `HeadRefused` for one that cannot be read or is no assistant's."""
        self._weights = Weights(source)
        kind = self._weights.config.get("model_type")
        if kind not in _TYPES:
            raise HeadRefused(f"{source} is no assistant of Gemma 4: its model_type is {kind!r}, not {_TYPES[0]!r}")
        try:
            self._config: Any = configuration_of(self._weights.config)
        except CheckpointRefused as refused:
            raise HeadRefused(f"{source}: {refused}") from None
        if self._config.text_config is None:
            raise HeadRefused(f"{source}: config.json has no text_config")

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return int(self._config.text_config.vocab_size)

    @property
    def target_width(self) -> int:
        """Width of the target's states."""
        return int(self._config.backbone_hidden_size)

    def tokenizer_fingerprint(self) -> str:
        """The fingerprint of the tokenizer beside it; empty without one. Raises `HeadRefused` for one that cannot be
        read."""
        return folder_fingerprint(self._weights.folder)

    def load(self, place: Placement, places: Mapping[str, int]) -> Assistant:
        """Load the assistant, whose layers read the target's cache at `places` by type of layer. Raises `HeadRefused`
        for tensors that are missing, left over or of another shape, and for layers that are not computed."""
        try:
            description = gemma4_assistant(self._config, places)
            tensors = {name: self._weights.tensor(name) for name in self._weights.names}
            clusters = self._clusters(tensors, place.device) if self._config.use_ordered_embeddings else None
            if clusters is not None and not description.spec.tied:
                # The rows of single tokens are read.
                place = replace(place, packed=False)
            assistant = Assistant(description, self.target_width, place, clusters)
        except FamilyRefused as refused:
            raise HeadRefused(str(refused)) from None
        fill(assistant.slots(), tensors, description.names)
        return assistant.eval()

    def _clusters(self, tensors: dict[str, Tensor], device: torch.device) -> Clusters:
        """The clusters of tokens, taken out of the tensors."""
        config, count = self._config, int(self._config.num_centroids)
        order = tensors.pop(_ORDER, None)
        if order is None:
            raise HeadRefused(f"its tensors are not those of its config.json: missing are {_ORDER}")
        if order.is_floating_point() or not torch.equal(order.long().sort().values, torch.arange(self.vocab_size)):
            raise HeadRefused(f"{_ORDER} is no order of {self.vocab_size} tokens")
        selected = int(config.centroid_intermediate_top_k)
        if self.vocab_size % count or not 0 < selected <= count:
            raise HeadRefused(f"{selected} of {count} clusters of {self.vocab_size} tokens cannot be selected")
        return Clusters(order.long().view(count, -1).to(device), selected)
