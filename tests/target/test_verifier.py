"""One sequence's verification: the walk follows the target, and parameters follow the path."""

from __future__ import annotations

import pytest
import torch
from engine_harness import request

from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from target_service.sampling.verifier import SequenceVerifier, Verified

VOCABULARY = 5
TREE = TokenTree((0, 1, 2, 3, 1), (0, 0, 0, 1, 3), (1.0,) * 5)


def verify(sampling: SamplingParams, logits: torch.Tensor, *, step: int = 0, **options: object) -> Verified:
    verifier = SequenceVerifier(request([4, 0], sampling=sampling, **options), ())
    return verifier.verify(TREE, logits, [], step)


def pointing(*tokens: int) -> torch.Tensor:
    """[rows, vocabulary] logits whose rows are sure of these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float() * 9


def test_the_walk_goes_as_deep_as_the_target_agrees() -> None:
    walk = verify(SamplingParams(), pointing(1, 3, 0, 1, 2)).walk
    assert walk.accepted_rows == (1, 3, 4)
    assert walk.next_token == 2


def test_penalties_count_the_rows_own_path() -> None:
    """Row 4 would say 1 again; its own path holds 1 already, and the penalty makes 2 the better token."""
    logits = pointing(1, 3, 0, 1, 1)
    logits[4, 2] = 8.5
    assert verify(SamplingParams(), logits).walk.next_token == 1
    assert verify(SamplingParams(frequency_penalty=0.5), logits).walk.next_token == 2


def test_logprobs_belong_to_the_row_before_each_token() -> None:
    logits = pointing(1, 3, 0, 1, 2)
    verified = verify(SamplingParams(logprobs=1), logits)
    distribution = torch.log_softmax(logits, dim=-1)
    expected = [float(distribution[row, token]) for row, token in ((0, 1), (1, 3), (3, 1), (4, 2))]
    assert [one.logprob for one in verified.logprobs] == pytest.approx(expected)
    assert [one.top[0][0] for one in verified.logprobs] == [1, 3, 1, 2]


def test_coupled_says_what_plain_seeded_sampling_says_row_by_row() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, VOCABULARY)
    sampling = SamplingParams(temperature=1.0, seed=7)
    whole = verify(sampling, logits).walk
    verifier = SequenceVerifier(request([4, 0], sampling=sampling), ())
    row, output = 0, []
    for accepted in (*whole.accepted_rows, None):
        alone = verifier.verify(TokenTree.root_only(TREE.token_ids[row]), logits[row : row + 1], output, 0)
        if accepted is None:
            assert alone.walk.next_token == whole.next_token
            break
        assert alone.walk.next_token == TREE.token_ids[accepted]
        row, output = accepted, [*output, alone.walk.next_token]


def test_rejection_tosses_fresh_coins_every_step() -> None:
    logits = torch.zeros(5, VOCABULARY)
    sampling = SamplingParams(temperature=1.0, seed=7)
    mode = VerificationMode.REJECTION
    walks = {verify(sampling, logits, step=step, mode=mode).walk for step in range(40)}
    assert len(walks) > 5
    assert verify(sampling, logits, step=3, mode=mode) == verify(sampling, logits, step=3, mode=mode)
