"""The EAGLE drafter on a GPU, eagerly and in captured graphs, drafts the trees of a CPU."""

from __future__ import annotations

import pytest
import torch
from eagle_drafting import feed, make_drafter, opened, same_tree, sequence_of, states_of, text
from eagle_heads import make_head

from outrider.sampling import VerificationMode


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
def test_trees_are_those_of_a_cpu(graphs: bool, topk: int) -> None:
    # As narrow as Triton's products allow.
    shape = {"head_dim": 16, "num_layers": 2}
    settings = {"topk": topk, "page_size": 16}
    drafters = [
        make_drafter(make_head(**shape), **settings),
        make_drafter(make_head(**shape).cuda(), device="cuda", cuda_graphs=graphs, **settings),
    ]
    known = [states_of(make_head(), 60, i) for i in range(3)]
    followed = [
        [opened(drafter, sequence_of(text(7 + 9 * i, i), mode), known[i]) for i, mode in enumerate(VerificationMode)]
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
