"""What drafters keep of texts that they have read: the same trees behind it, for whoever may share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from eagle_drafting import SETTINGS, feed, make_drafter, opened, plain_growth, plain_tree, same_tree, sequence_of
from eagle_drafting import states_of as head_states
from eagle_drafting import text as tokens_of
from eagle_heads import make_head
from mtp_modules import MIMO, checkpoint_tensors, plain_logits, write

from draft_service.causal_lm.drafter import ModelConfig, ModelDrafter
from draft_service.drafters.base import DraftSequence
from draft_service.mtp.drafter import MtpConfig, MtpDrafter
from draft_service.neural_drafter import CachingDrafter
from tree_kernels.growth import GREEDY_TEMPERATURE

PAGE = SETTINGS["page_size"]


def rows_read(drafter: CachingDrafter) -> int:
    return drafter._rows


def hits(drafter: CachingDrafter) -> int:
    return int(drafter.stats()[f"{drafter.name}_prefix_hit_rows_total"])


def check_pages(drafter: CachingDrafter, *sequences: DraftSequence) -> None:
    prefixes = drafter.drafting.prefixes
    assert prefixes is not None
    drafter.drafting.cache.check_integrity([one.state.pages for one in sequences], prefixes.pages())


def test_a_head_reads_a_prompt_once() -> None:
    """Trees behind a hit are the plain head's, for texts that part at any token, and while the first one is open."""
    head = make_head()
    drafter = make_drafter(head)
    known, shared = head_states(head, 40), tokens_of(40)
    held = opened(drafter, sequence_of(shared[:30]), known)
    drafter.propose([held])
    before = rows_read(drafter)
    for common in (29, 25, 24, 17, 16, 9):
        own = [*shared[:common], (shared[common] + 1) % 40, *tokens_of(3, common)]
        states = torch.cat([known[:common], head_states(head, len(own) - common, common)])
        sequence = opened(drafter, sequence_of(own), states)
        # A row of the head is of its token's successor too, and the last row is always read.
        expected = min(common - 1, len(own) - 2) // PAGE * PAGE
        assert sequence.state.entries == expected
        (tree,) = drafter.propose([sequence])
        same_tree(tree, plain_tree(head, own, states))
        assert rows_read(drafter) - before == len(own) - 1 - expected
        before = rows_read(drafter)
        check_pages(drafter, held, sequence)
        drafter.close(sequence)
    drafter.close(held)
    check_pages(drafter)


def test_a_conversation_finds_what_was_committed_behind_its_prompt() -> None:
    head = make_head()
    drafter = make_drafter(head)
    tokens, known = tokens_of(60), head_states(head, 60)
    sequence = opened(drafter, sequence_of(tokens[:5]), known)
    for length in range(6, 40, 3):
        sequence.token_ids = tokens[:length]
        assert sequence.features is not None
        feed(sequence, known[sequence.features.end : length - 1], sequence.features.end)
        drafter.propose([sequence])
    drafter.close(sequence)
    following = opened(drafter, sequence_of(tokens[:50]), known)
    assert following.state.entries == 32
    same_tree(drafter.propose([following])[0], plain_tree(head, tokens[:50], known))


@pytest.mark.parametrize("change", [{"tenant": "other"}, {"model_version": 2}, {"stream": 2}])
def test_others_share_nothing(change: dict[str, Any]) -> None:
    """Neither tenants, nor texts of other weights or another target."""
    head = make_head()
    drafter = make_drafter(head)
    tokens, known = tokens_of(30), head_states(head, 30)
    drafter.propose([opened(drafter, sequence_of(tokens), known)])
    other = opened(drafter, replace(sequence_of(tokens), **change), known)
    assert other.state.entries == 0 and hits(drafter) == 0
    same_tree(drafter.propose([other])[0], plain_tree(head, tokens, known))
    assert opened(drafter, replace(sequence_of(tokens), **change), known).state.entries == 24


def test_states_before_a_hit_are_not_needed() -> None:
    """Where the target sends none of them, or some late: it read less than the draft, or more."""
    head = make_head()
    drafter = make_drafter(head)
    tokens, known = tokens_of(40), head_states(head, 40)
    drafter.propose([opened(drafter, sequence_of(tokens[:30]), known)])
    for first in (24, 16, 3):
        sequence = sequence_of(tokens)
        drafter.open(sequence)
        feed(sequence, known[first:39], first)
        same_tree(drafter.propose([sequence])[0], plain_tree(head, tokens, known))
    # A gap behind the hit costs guesses. What is read behind it is nobody's.
    gapped = sequence_of([*tokens[:31], *tokens_of(40, 9)])
    drafter.open(gapped)
    feed(gapped, head_states(head, 71, 9)[50:70], 50)
    assert drafter.propose([gapped])[0].drafted
    assert gapped.state.prefix_pages == 3


def test_those_that_begin_together_share_what_the_first_has_read() -> None:
    """Opened before anything is read; the second is asked for later."""
    head = make_head()
    drafter = make_drafter(head)
    tokens, known = tokens_of(30), head_states(head, 30)
    first, second = (opened(drafter, sequence_of(tokens), known) for _ in range(2))
    drafter.propose([first])
    (tree,) = drafter.propose([second])
    assert hits(drafter) == 24
    same_tree(tree, plain_tree(head, tokens, known))
    # In one pass both read it, and one page stays.
    others = [opened(drafter, replace(sequence_of(tokens), tenant="other"), known) for _ in range(2)]
    for tree in drafter.propose(others):
        same_tree(tree, plain_tree(head, tokens, known))
    assert others[0].state.pages[:3] == others[1].state.pages[:3]
    check_pages(drafter, first, second, *others)


def test_kept_pages_give_way_to_open_sequences() -> None:
    head = make_head()
    drafter = make_drafter(head, kv_tokens=12 * PAGE)
    for seed in range(6):
        tokens, known = tokens_of(30, seed), head_states(head, 30, seed)
        sequence = opened(drafter, sequence_of(tokens), known)
        same_tree(drafter.propose([sequence])[0], plain_tree(head, tokens, known))
        check_pages(drafter, sequence)
        drafter.close(sequence)
    assert drafter.stats()["eagle_cache_full_total"] == 0
    assert opened(drafter, sequence_of(tokens), known).state.entries == 24


def test_without_the_cache_everything_is_read() -> None:
    head = make_head()
    drafter = make_drafter(head, prefix_cache=False)
    tokens, known = tokens_of(30), head_states(head, 30)
    for _ in range(2):
        drafter.propose([opened(drafter, sequence_of(tokens), known)])
    assert rows_read(drafter) == 58 and "eagle_prefix_hit_rows_total" not in drafter.stats()


@pytest.mark.parametrize("modules", [1, 3])
def test_modules_read_a_prompt_once(modules: int, tmp_path: Path) -> None:
    """Each module's rows of a page are there; those of later ones are of later tokens."""
    tensors = checkpoint_tensors(MIMO, modules=modules)
    own = {name: value for name, value in SETTINGS.items() if name != "projection"}
    folder = write(tmp_path, MIMO, tensors)
    drafter = MtpDrafter(MtpConfig(**(own | {"base_model": str(folder), "num_modules": modules})))
    drafter.start()
    tokens = tokens_of(40)
    known = torch.randn(40, drafter.features.width, generator=torch.Generator().manual_seed(1))
    first = opened(drafter, sequence_of(tokens[:32]), known)
    drafter.propose([first])
    drafter.close(first)
    for length, found in ((24 + modules, 16), (25 + modules, 24), (32, 24)):
        sequence = opened(drafter, sequence_of(tokens[:length]), known)
        # As many rows are read again as there are modules, so that each has read the root.
        assert sequence.state.entries == found
        (tree,) = drafter.propose([sequence])
        after = plain_logits(MIMO, tensors, modules, tokens[:length], known)
        greedy = lambda path, a=after: torch.softmax(a(path).double() / GREEDY_TEMPERATURE, -1)  # noqa: E731
        same_tree(tree, plain_growth(tokens[length - 1], greedy))
        check_pages(drafter, sequence)
        drafter.close(sequence)


def test_a_language_model_reads_a_prompt_once(tmp_path: Path) -> None:
    """Whatever the target's weights, since it reads tokens alone."""
    make_tiny("llama").save_pretrained(tmp_path)
    own = {name: value for name, value in SETTINGS.items() if name not in ("projection", "feature_dtype")}
    own["draft_model"] = str(tmp_path)
    alone, drafter = (ModelDrafter(ModelConfig(**(own | {"prefix_cache": shares}))) for shares in (False, True))
    tokens = tokens_of(40)
    for one in (alone, drafter):
        one.start()
    drafter.open(first := sequence_of(tokens[:32]))
    drafter.propose([first])
    drafter.close(first)
    for length, found in ((32, 24), (33, 32), (40, 32)):
        sequence, other = (replace(sequence_of(tokens[:length]), model_version=version) for version in (2, 3))
        alone.open(other)
        drafter.open(sequence)
        assert sequence.state.entries == found
        same_tree(drafter.propose([sequence])[0], alone.propose([other])[0])
        check_pages(drafter, sequence)
        drafter.close(sequence)
