"""Drafts whole trees with the Triton attention in place of a graph's, of levels and of whole tails, and writes them and
a CPU's as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import static_drafting
import torch
from eagle_drafting import (
    COUPLED,
    GREEDY,
    REJECTION,
    SETTINGS,
    feed,
    make_drafter,
    opened,
    sequence_of,
    states_of,
    text,
)
from eagle_heads import make_head

from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.cuda_graphs import level_passes
from tree_kernels.attention.triton_backend import TritonAttention, TritonSettings
from tree_kernels.level_attention import LevelAttention
from tree_kernels.level_attention.triton_backend import TritonLevelAttention
from tree_models.layers import paged

SHAPE = {"topk": 3, "num_steps": 3, "page_size": 16, "kv_tokens": 512}


class InterpretedDrafting(static_drafting.StaticDrafting):
    """Words of masks and schedules are what the kernels make of a plan's integers."""

    def _capturable(self) -> TritonAttention:
        return TritonAttention(torch.device("cpu"), TritonSettings(processors=2))


class InterpretedLevels(LevelAttention):
    """Levels alone have a query, in parts of 16 keys."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._launched = TritonLevelAttention(device, processors=40, least_keys=16)


def main() -> None:
    paged.write_kv = static_drafting.write_taken
    head = make_head(head_dim=16)
    config = EagleConfig(**(SETTINGS | SHAPE))
    drafters = [make_drafter(head, **SHAPE) for _ in range(3)]
    for drafter in drafters[1:]:
        drafter._drafting = InterpretedDrafting(HeadNetwork(head), config)
    expected, whole = drafted(drafters[0]), drafted(drafters[1])
    level_passes.LevelAttention = InterpretedLevels  # type: ignore[misc]
    json.dump([expected, whole, drafted(drafters[2])], sys.stdout)


def drafted(drafter: EagleDrafter) -> list[Any]:
    """Two rounds of trees of three sequences: tokens, parents and scores."""
    known = [states_of(drafter._head, 40, i) for i in range(3)]
    modes = [COUPLED, GREEDY, REJECTION]
    sequences = [opened(drafter, sequence_of(text(14 + 3 * i, i), modes[i]), known[i]) for i in range(3)]
    found = []
    for _ in range(2):
        found += [[tree.token_ids, tree.parents, tree.scores] for tree in drafter.propose(sequences)]
        for i, sequence in enumerate(sequences):
            length = len(sequence.token_ids)
            sequence.token_ids.extend(text(2, i))
            feed(sequence, known[i][length - 1 : length + 1], length - 1)
    return found


if __name__ == "__main__":
    main()
