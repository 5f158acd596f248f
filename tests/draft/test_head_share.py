"""Ranks that have a part of a head each compute together what the whole head computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from eagle_heads import KINDS, MODULES, fuse, make_head, make_module
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor

from draft_service.checkpoints.vocabulary import tensors_of
from draft_service.eagle.checkpoint import make_head as head_from
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_share import share_of_head
from outrider.heads import HeadRefused
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_models.layers.paged import PagedPass
from tree_models.layers.placing import Placement
from tree_models.spec import FamilyRefused

ROWS = 5
HEADS: dict[str, Callable[[], EagleHead]] = {
    **{name: partial(make_head, **changes) for name, changes in KINDS.items()},
    **{f"module, {name}": partial(make_module, **changes) for name, changes in MODULES.items()},
}


def part_of(head: EagleHead, rank: ThreadRank) -> EagleHead:
    """A rank's part, from the whole head's tensors as a checkpoint has them."""
    tensors = dict(head.weights())
    if head.token_ids is not None:
        tensors["d2t"] = tensors_of(head.token_ids, head.config.vocab_size)["d2t"]
    return head_from(head.config, tensors, Placement(torch.device("cpu"), torch.float32, ranks=rank), None, None)


@torch.inference_mode()
def outputs_of(head: EagleHead) -> tuple[Tensor, Tensor]:
    """What a row passes on, and its logits, of a text's first rows."""
    generator = torch.Generator().manual_seed(2)
    config = head.config
    features = torch.randn(ROWS, config.hidden_size, generator=generator)
    tokens = torch.randint(config.vocab_size, (ROWS,), generator=generator)
    keys = [torch.zeros(1, ROWS, shape.heads, shape.key_width) for shape in head.cache_shapes]
    values = [torch.zeros(1, ROWS, shape.heads, shape.value_width) for shape in head.cache_shapes]
    attention, batch = TreeAttention("torch"), AttentionBatch((0, ROWS), (0,), ((0,),), ROWS, (None,))
    cache = SimpleNamespace(keys=keys, values=values)
    step = PagedPass(attention, attention.plan(batch), torch.arange(ROWS), cache)
    output = head(tokens, features, torch.arange(ROWS), step)
    return output.carried, head.logits(output.lm_input)


@pytest.mark.parametrize("fused", [False, True], ids=["modules", "kernels"])
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_ranks_compute_what_the_whole_head_does(make: Callable[[], EagleHead], *, fused: bool) -> None:
    whole = make()
    expected = outputs_of(whole)
    # Two have a key head each, and of four two have one in common.
    for size in (2, 4):

        def outputs(rank: ThreadRank) -> tuple[EagleHead, Tensor, Tensor]:
            part = part_of(whole, rank)
            if fused:
                fuse(part)
            return part, *outputs_of(part)

        parts = on_ranks(size, outputs)
        for _, carried, _ in parts:
            torch.testing.assert_close(carried, expected[0], rtol=1e-4, atol=1e-4)
        joined = torch.cat([logits for *_, logits in parts], dim=-1)
        torch.testing.assert_close(joined, expected[1], rtol=1e-4, atol=1e-4)
        held = sum(weight.numel() for weight in parts[0][0].weights().values())
        assert held < sum(weight.numel() for weight in whole.weights().values())


def test_what_ranks_cannot_divide() -> None:
    for size, changes, problem in (
        (3, {}, "4 attention heads cannot be divided"),
        (2, {"intermediate_size": 25}, "25 numbers of an MLP cannot be divided"),
        (2, {"draft_vocab_size": 59}, "59 draft tokens cannot be divided"),
    ):
        config = make_head().config
        for name, value in changes.items():
            object.__setattr__(config, name, value)
        with pytest.raises(FamilyRefused, match=f"{size} ranks: {problem}"):
            on_ranks(size, lambda rank, config=config: share_of_head(config, rank))  # type: ignore[misc]


def test_parts_of_a_wrong_shape_are_refused() -> None:
    """Also where the ranks' parts would fit."""
    head = make_head()
    weights = head.weights()
    weights["layers.0.self_attn.q_proj.weight"] = weights["layers.0.self_attn.q_proj.weight"][:-2]
    head.weights = lambda: weights  # type: ignore[method-assign]
    with pytest.raises(HeadRefused, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        on_ranks(2, lambda rank: part_of(head, rank))
