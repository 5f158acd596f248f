"""Drafts whole trees with the Triton attention in place of a graph's, and writes them and a CPU's as JSON."""

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
from tree_kernels.attention.triton_backend import TritonAttention, TritonSettings
from tree_models.layers import paged

SHAPE = {"topk": 3, "num_steps": 3, "page_size": 16, "kv_tokens": 512}


class InterpretedDrafting(static_drafting.StaticDrafting):
    """Words of masks and schedules are what the kernels make of a plan's integers."""

    def _capturable(self) -> TritonAttention:
        return TritonAttention(torch.device("cpu"), TritonSettings(processors=2))


def main() -> None:
    paged.write_kv = static_drafting.write_taken
    head = make_head(head_dim=16)
    config = EagleConfig(**(SETTINGS | SHAPE))
    drafters = [make_drafter(head, **SHAPE), make_drafter(head, **SHAPE)]
    drafters[1]._drafting = InterpretedDrafting(HeadNetwork(head), config)
    json.dump([drafted(drafter) for drafter in drafters], sys.stdout)


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
