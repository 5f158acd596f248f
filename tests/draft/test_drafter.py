"""The seam: every listed drafter fits it, in every mode, and none needs to be known to be used."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from eagle_heads import make_head
from medusa_heads import make_heads
from mtp_modules import MIMO, checkpoint_tensors, write

from benchmarks.drafters.random_trees import RANDOM
from draft_service.causal_lm.drafter import ModelConfig
from draft_service.drafters.base import DRAFTERS, Drafter, DraftSequence, create, drafter_spec, features_of, tree_limits
from draft_service.eagle.checkpoint import save_head
from draft_service.eagle.config import EagleConfig
from draft_service.medusa.checkpoint import save_heads
from draft_service.medusa.config import MedusaConfig
from draft_service.mtp.drafter import MtpConfig
from outrider.errors import NotSupported
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.settings import add_flags, load
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits

VOCABULARY = 50
# Those that draft in a service. An assistant reads its target's keys: `test_assistant.py`.
SERVED = [name for name in DRAFTERS if name != "assistant"]


def made(name: str, folder: Path) -> Drafter:
    """A drafter as it comes, with a tiny model where it needs one."""

    def settings_of(part: str) -> Any:
        if part == "model":
            make_tiny(vocab_size=VOCABULARY).save_pretrained(folder)
            return ModelConfig(draft_model=str(folder), dtype="float32")
        if part == "medusa":
            heads = make_heads(vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY)
            return MedusaConfig(head=str(save_heads(heads, folder)), dtype="float32")
        if part == "mtp":
            tensors = checkpoint_tensors(MIMO | {"vocab_size": VOCABULARY})
            return MtpConfig(base_model=str(write(folder, MIMO | {"vocab_size": VOCABULARY}, tensors)), dtype="float32")
        if part != "eagle":
            return drafter_spec(part).config()
        head = save_head(make_head(vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY), folder, embedding=True)
        return EagleConfig(head=str(head), dtype="float32", projection="draft")

    return create(name, settings_of)


def tell(drafter: Drafter, sequence: DraftSequence, position: int) -> None:
    """The hidden states from `position` on that a target knows, where the drafter wants them."""
    wanted = features_of(drafter)
    if wanted is not None:
        assert sequence.features is not None
        sequence.features.append(torch.randn(len(sequence.token_ids) - 1 - position, wanted.width), position)


@pytest.mark.parametrize("mode", list(LOSSLESS_MODES), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", [*SERVED, pytest.param(RANDOM, id="random")])
def test_every_drafter_lives_through_a_session(name: str, mode: VerificationMode, tmp_path: Path) -> None:
    coins = random.Random(1)
    drafter = made(name, tmp_path)
    drafter.start()
    assert drafter.name == ("random" if name == RANDOM else name)
    sequences = [
        DraftSequence(k, coins.choices(range(VOCABULARY), k=20) * 2, 40, VOCABULARY, seed=k, mode=mode)
        for k in range(4)
    ]
    for sequence in sequences:
        drafter.open(sequence)
        tell(drafter, sequence, 0)
    drafted = 0
    for _ in range(10):
        trees = drafter.propose(sequences)
        for sequence, tree in zip(sequences, trees, strict=True):
            assert tree.token_ids[0] == sequence.root
            assert tree.drafted <= drafter.limits.max_nodes
            TokenTree.checked(tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=VOCABULARY)
            committed = [*tree.token_ids[1:2], coins.randrange(VOCABULARY)]
            drafted += tree.drafted
            before = len(sequence.token_ids)
            sequence.token_ids.extend(committed)
            tell(drafter, sequence, before - 1)
            drafter.advance(sequence, committed)
    assert drafted
    for sequence in sequences:
        drafter.close(sequence)
    assert all(isinstance(value, float | int) for value in drafter.stats().values())
    drafter.stop()


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_configured_by_its_own_section(name: str) -> None:
    spec = drafter_spec(name)
    parser = argparse.ArgumentParser()
    add_flags(parser, spec.config)
    assert load(spec.config, spec.name, parser.parse_args([]), {}) == spec.config()
    assert spec.name == name


def test_an_unlisted_name_is_refused() -> None:
    with pytest.raises(NotSupported, match="prompt_lookup"):
        create("oracle")


@pytest.mark.parametrize(
    ("asked", "limits"),
    [((0, 0), (32, 8)), ((5, 0), (5, 8)), ((0, 3), (32, 3)), ((99, 99), (32, 8))],
    ids=str,
)
def test_limits(asked: tuple[int, int], limits: tuple[int, int]) -> None:
    assert tree_limits(TreeLimits(32, 8), TreeLimits(*asked)) == TreeLimits(*limits)


def test_the_random_drafter_repeats_itself_from_its_seed() -> None:
    def trees() -> list[TokenTree]:
        drafter = create(RANDOM)
        return [drafter.propose([DraftSequence(1, [1, 2], 2, VOCABULARY)])[0] for _ in range(20)]

    assert trees() == trees()
    assert len({len(tree) for tree in trees()}) > 3
