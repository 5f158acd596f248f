"""Texts into batches, rows that teach, what validation counts; and the token map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draft_service.training.batches import BatchPlan, make_batch
from draft_service.training.corpus import Texts, answer_counts, choose_tokens, coverage
from draft_service.training.validation import DEPTH, acceptance_of, hold_out

STEPS = 3


def texts_of(shapes: Sequence[tuple[int, int]], temperatures: Sequence[float] = (0.0, 1.0)) -> Texts:
    """Texts of these (length, prompt length); token k of text i is 100 * i + k."""
    lengths = [length for length, _ in shapes]
    return Texts(
        np.concatenate([100 * i + np.arange(length) for i, length in enumerate(lengths)]).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.asarray([prompt for _, prompt in shapes], np.int32),
        np.asarray([temperatures[i % len(temperatures)] for i in range(len(shapes))], np.float32),
        np.arange(len(shapes)),
    )


def rows_by_definition(length: int, prompt: int, step: int) -> list[tuple[int, int]]:
    """(row, place of the distribution) of a text: row i of a step guesses token i + 2 + step, and that stands in the
    answer.

    The rows of later steps follow from those of step 0: a draft begins where its first guess is in the answer.
    """
    starts = [row for row in range(length) if row + 2 >= prompt]
    return [(row, row + 1 + step) for row in starts if row + 2 + step < length]


@pytest.mark.parametrize("size", [0, 5], ids=["full", "with empty rows"])
def test_a_row_teaches_where_its_guess_stands_in_the_answer(size: int) -> None:
    shapes = [(10, 4), (7, 1), (12, 11), (6, 2)]
    texts, chosen, padded = texts_of(shapes), np.asarray([2, 0, 3]), 16
    batch = make_batch(texts, chosen, padded, STEPS, size=size)
    assert batch.token_ids.shape == (size or 3, padded)
    found = [[] for _ in range(STEPS)]  # type: ignore[var-annotated]
    step_of = np.repeat(np.arange(STEPS), batch.counts)
    for step, row, distribution, said in zip(step_of, batch.rows, batch.distributions, batch.next_tokens, strict=True):
        place = int(batch.distribution_rows[distribution])
        within = int(row) - step * len(batch.token_ids) * padded
        found[step].append((within, place))
        assert int(said) == int(batch.token_ids.reshape(-1)[place + 1])
    for step in range(STEPS):
        expected = [
            (place * padded + row, place * padded + distribution)
            for place, index in enumerate(chosen)
            for row, distribution in rows_by_definition(*shapes[index], step)
        ]
        assert found[step] == expected, step


def test_validation_counts_whole_chains_from_roots_in_the_answer() -> None:
    length, prompt = 20, 5
    batch = make_batch(texts_of([(length, prompt)]), np.asarray([0]), 32, STEPS, whole=True)
    roots = [row for row in range(length) if row + 1 >= prompt and row + 1 + STEPS < length]
    assert batch.counts == (len(roots),) * STEPS
    assert batch.rows.view(STEPS, -1).tolist() == [[step * 32 + row for row in roots] for step in range(STEPS)]
    assert batch.next_tokens.view(STEPS, -1).tolist() == [[row + 2 + step for row in roots] for step in range(STEPS)]


def test_a_text_that_is_too_short_for_a_chain_has_none() -> None:
    batch = make_batch(texts_of([(6, 4)]), np.asarray([0]), 8, 5, whole=True)
    assert batch.counts == (0,) * 5


def test_a_pass_holds_every_text_once_in_batches_of_few_shapes() -> None:
    lengths = [(int(length), 2) for length in np.random.default_rng(1).integers(3, 700, 90)]
    plan = BatchPlan(texts_of(lengths), batch_tokens=1536, max_length=700, seed=4)
    batches = plan.batches(0)
    assert sorted(int(index) for _, chosen in batches for index in chosen) == list(range(90))
    assert len(batches) == plan.per_epoch()
    for padded, chosen in batches:
        assert len(chosen) * padded <= 1536
        assert all(lengths[index][0] <= padded for index in chosen)
    assert {padded for padded, _ in batches} <= {128, 256, 512, 768}
    again = [(padded, chosen.tolist()) for padded, chosen in plan.batches(0)]
    assert again == [(padded, chosen.tolist()) for padded, chosen in batches]
    assert again != [(padded, chosen.tolist()) for padded, chosen in plan.batches(1)]


def test_texts_in_order_are_all_there() -> None:
    plan = BatchPlan(texts_of([(90, 2), (300, 2), (5, 2), (120, 2)]), batch_tokens=384, max_length=384, seed=0)
    assert [(padded, chosen.tolist()) for padded, chosen in plan.in_order()] == [(128, [2, 0, 3]), (384, [1])]


def test_validation_takes_greedy_texts_and_training_none_of_their_questions() -> None:
    texts = texts_of([(5, 2)] * 24, temperatures=(0.0, 0.7, 1.0))
    learnt, held = hold_out(texts, wanted=50, temperatures=3)
    assert held.numbers.tolist() == [0, 3]
    assert learnt.numbers.tolist() == list(range(6, 24))
    assert hold_out(texts, wanted=1, temperatures=3)[1].numbers.tolist() == [0]


def test_acceptance_is_how_far_chains_come() -> None:
    matches = torch.zeros(4, DEPTH, dtype=torch.bool)
    matches[0, :3] = True
    matches[1, :1] = True
    # A right guess behind a wrong one is never reached.
    matches[2, 1] = True
    found = acceptance_of(matches, torch.tensor([True, True, True, False]))
    assert found.reached[:4] == (0.5, 0.25, 0.25, 0.0)
    assert found.by_depth[:4] == (0.5, 0.5, 1.0, 0.0)
    assert found.mean_length == 2.0
    assert (found.roots, found.agreement) == (4, 0.75)


def test_tokens_are_counted_in_answers_alone() -> None:
    texts = texts_of([(5, 3), (4, 1)])
    counts = answer_counts(texts, 200)
    assert np.flatnonzero(counts).tolist() == [3, 4, 101, 102, 103]


@pytest.mark.parametrize("size", [0, 5, 9], ids=["asked for", "as large", "larger"])
def test_the_whole_vocabulary_needs_no_map(size: int) -> None:
    assert choose_tokens(np.ones(5, np.int64), size) is None


def test_a_token_map_holds_the_most_frequent_tokens_and_lower_ids_among_equals() -> None:
    counts = np.asarray([2, 9, 2, 0, 5, 2])
    tokens = choose_tokens(counts, 3)
    assert tokens is not None
    assert tokens.tolist() == [0, 1, 4]
    assert coverage(counts, tokens) == 16 / 20
    assert coverage(counts, None) == 1.0
