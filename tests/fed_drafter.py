"""An EAGLE drafter that reads the target's hidden states off a copy of the model, where no target sends them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draft_service.drafter import DraftSequence
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[tokens, F * W] as a target captures them: outputs of layers, the last one's after the norm."""
    hidden = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[min(layer + 1, len(hidden) - 1)][0] for layer in layers], dim=-1)


class FedDrafter(EagleDrafter):
    """Reads the hidden states off a model of its own, in place of a target that sends them."""

    def __init__(self, config: EagleConfig, head: EagleHead, model: PreTrainedModel) -> None:
        super().__init__(config, head)
        self._model = model

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        self._tell(sequence, 0)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        self._tell(sequence, len(sequence.token_ids) - 1 - len(committed))
        super().advance(sequence, committed)

    def _tell(self, sequence: DraftSequence, position: int) -> None:
        assert self.features is not None and sequence.features is not None
        if len(sequence.token_ids) > 1:
            states = states_of(self._model, sequence.token_ids[:-1], self.features.layers)
            sequence.features.append(states[position:], position)
