"""The EAGLE drafter on a GPU, eagerly and in captured graphs, drafts the trees of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_drafting import (
    COUPLED,
    GREEDY,
    alike,
    feed,
    make_drafter,
    opened,
    same_tree,
    scores_of,
    sequence_of,
    states_of,
    text,
)
from eagle_heads import MODULES, make_head, make_module

from draft_service.checkpoints.files import fill
from draft_service.eagle.head import EagleHead
from draft_service.neural.cuda_graphs.drafting import CapturedDrafting
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from tree_models.layers.placing import Placement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# As narrow as Triton's products allow.
SHAPE = {"head_dim": 16, "num_layers": 2}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_trees_are_those_of_a_cpu(graphs: bool, topk: int, device: str) -> None:
    """On the GPU that the process works on, or on another."""
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings = {"topk": topk, "page_size": 16}
    drafters = [
        make_drafter(make_head(**SHAPE), **settings),
        make_drafter(make_head(**SHAPE).to(device), device=device, cuda_graphs=graphs, **settings),
    ]
    known = [states_of(make_head(), 60, i) for i in range(3)]
    followed = [
        [opened(drafter, sequence_of(text(7 + 9 * i, i), mode), known[i]) for i, mode in enumerate(LOSSLESS_MODES)]
        for drafter in drafters
    ]
    for step in range(6):
        chosen = [i for i in range(3) if step % 3 != i]
        of_cpu, of_gpu = (
            drafter.propose([sequences[i] for i in chosen])
            for drafter, sequences in zip(drafters, followed, strict=True)
        )
        for found, expected in zip(of_gpu, of_cpu, strict=True):
            assert expected.drafted
            same_tree(found, expected)
        for sequences in followed:
            for i in chosen:
                length = len(sequences[i].token_ids)
                sequences[i].token_ids.extend(text(1 + step % 3, step))
                feed(sequences[i], known[i][length - 1 : length + step % 3], length - 1)


@pytest.mark.parametrize("changes", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_trees_of_modules_are_those_that_grow_by_level(changes: dict[str, Any], dtype: str) -> None:
    """Of bf16 near-ties turn: half of the nodes are the same at least."""
    trees = []
    for graphs in (False, True):
        head = make_module(**changes)
        made = EagleHead(head.config, head.token_ids, Placement(torch.device("cuda"), getattr(torch, dtype)))
        fill(made.slots(), head.weights())
        drafter = make_drafter(made, page_size=16, device="cuda", dtype=dtype, cuda_graphs=graphs)
        sequences = [opened(drafter, sequence_of(text(7 + i, i)), states_of(made, 20, i)) for i in range(3)]
        trees.append(drafter.propose(sequences))
    for found, expected in zip(*trees, strict=True):
        one, other = scores_of(found), scores_of(expected)
        assert len(other) > 5
        if dtype == "float32":
            alike(found, expected)
        assert len(one.keys() & other.keys()) >= len(other) // 2


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("nodes", [60, 239])
@pytest.mark.parametrize(
    ("steps", "topk", "frontier", "rows"),
    [
        (1, 4, 0, 0),
        (3, 1, 0, 0),
        (3, 4, 0, 0),
        (6, 16, 0, 0),
        (11, 8, 24, 0),
        (11, 8, 24, 32),
        (4, 2, 9, 0),
        (5, 8, 2, 4),
    ],
    ids=lambda size: str(size),
)
def test_captured_trees_of_every_shape(
    steps: int, topk: int, frontier: int, rows: int, nodes: int, mode: VerificationMode
) -> None:
    """The device's noise is that of the host, tails fill more than a word of a mask, and pages end anywhere."""
    settings = {"topk": topk, "num_steps": steps, "num_draft_tokens": nodes, "page_size": 16, "gumbel_candidates": 40}
    settings |= {"frontier": frontier, "rows_per_level": rows or 1 << 16, "kv_tokens": 8192}
    drafters = [
        make_drafter(make_head(**SHAPE).cuda(), device="cuda", cuda_graphs=graphs, **settings)
        for graphs in (False, True)
    ]
    assert isinstance(drafters[1].drafting, CapturedDrafting)
    for count in (1, 3, 8):
        texts = [(text(5 + 6 * i + count, i), states_of(make_head(), 60, i)) for i in range(count)]
        of_eager, of_graphs = (
            drafter.propose([opened(drafter, sequence_of(tokens, mode), states) for tokens, states in texts])
            for drafter in drafters
        )
        for found, expected in zip(of_graphs, of_eager, strict=True):
            alike(found, expected)
