"""Sampled output has the target's distribution, whatever was drafted: counted over many seeds on seven tokens."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from conftest import make_tiny
from engine_harness import Propose, engine_config, make_runner, request, run
from sampled_outputs import LENGTH, PROMPT, VOCABULARY, assert_follow, distribution, samples_drawn
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import DraftDistribution, TokenTree

# Of COUPLED outputs `make test` counts those without a draft: with one they are these token for token, which
# `test_lossless.py` shows.
pytestmark = pytest.mark.values


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return make_tiny(vocab_size=VOCABULARY)


def drawn_tree(children: int) -> Propose:
    """A tree of depth two, children drawn without replacement from one that has little to do with the target's."""

    def propose(tokens: Sequence[int], rng: random.Random) -> TokenTree:
        token_ids, parents, distributions = [tokens[-1]], [0], {}
        for row in range(1 + children):
            weights = dict(zip(rng.sample(range(VOCABULARY), 5), rng.choices(range(1, 9), k=5), strict=True))
            distributions[row] = DraftDistribution(tuple(weights), tuple(weights.values()))
            left = dict(weights)
            for _ in range(children):
                token = rng.choices(list(left), list(left.values()))[0]
                del left[token]
                token_ids.append(token)
                parents.append(row)
        return TokenTree(tuple(token_ids), tuple(parents), (1.0,) * len(token_ids), distributions)

    return propose


def fixed_tree(tokens: Sequence[int], _: random.Random) -> TokenTree:
    """The same guesses always: point masses, no distribution."""
    return TokenTree((tokens[-1], 3, 5, 0, 3), (0, 0, 0, 1, 2), (1.0, 0.5, 0.5, 0.5, 0.5))


@samples_drawn
@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.COUPLED], ids=lambda m: m.value)
@pytest.mark.parametrize(
    "propose",
    [drawn_tree(1), None, drawn_tree(2), drawn_tree(3), fixed_tree],
    ids=["chain", "no draft", "two children", "three children", "point masses"],
)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.3, ignore_eos=True),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.95, ignore_eos=True),
    ],
    ids=["plain", "filtered"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["one step after the other", "launched before tokens go out"])
def test_outputs_have_the_targets_distribution(
    small: PreTrainedModel,
    mode: VerificationMode,
    propose: Propose | None,
    sampling: SamplingParams,
    ahead: bool,
    samples: int,
) -> None:
    exact = distribution(small, sampling)
    config = replace(engine_config(max_running=64, disable_above=64), max_waiting=samples)
    # Seeds spread as callers' would: consecutive ones must do as well as random ones.
    wanted = [replace(request(PROMPT, LENGTH, sampling=sampling, mode=mode), seed=seed) for seed in range(samples)]
    outcomes = run(
        make_runner(small, kv_tokens=4096), wanted, propose=propose, config=config, can_launch_before_results=ahead
    )
    assert_follow(outcomes, exact)
    if propose is not None:
        assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > samples / 20


@samples_drawn
@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.COUPLED], ids=lambda m: m.value)
@pytest.mark.parametrize("propose", [None, drawn_tree(2)], ids=["no draft", "two children"])
def test_predictions_leave_the_distribution_as_it_is(
    small: PreTrainedModel, mode: VerificationMode, propose: Propose | None, samples: int
) -> None:
    """The likeliest output, one that is unlikely, and what begins in the middle of one."""
    sampling = SamplingParams(temperature=1.3, ignore_eos=True)
    exact = distribution(small, sampling)
    falling = sorted(exact, key=exact.__getitem__, reverse=True)
    predictions = (falling[0], falling[len(falling) // 2], (3, *falling[1], *falling[2]))
    config = replace(engine_config(max_running=64, disable_above=64), max_waiting=samples)
    wanted = [
        replace(request(PROMPT, LENGTH, sampling=sampling, mode=mode), seed=seed, prediction=predictions[seed % 3])
        for seed in range(samples)
    ]
    outcomes = run(make_runner(small, kv_tokens=4096), wanted, propose=propose, config=config)
    assert_follow(outcomes, exact)
    # The first token comes with the prompt, and the last is the target's own: one of three can be a predicted one.
    assert sum(outcome.finished.totals.accepted_predicted_tokens for outcome in outcomes) > samples / 100


def test_the_distribution_test_would_notice() -> None:
    """A drafter that understates its own weights does skew rejection sampling, and the statistic sees it."""
    model = make_tiny(vocab_size=VOCABULARY)
    sampling = SamplingParams(temperature=1.3, ignore_eos=True)
    exact = distribution(model, sampling)
    first = Counter({token: 0.0 for token in range(VOCABULARY)})
    for path, mass in exact.items():
        first[path[0]] += mass
    unlikely = min(first, key=first.__getitem__)
    lie = DraftDistribution(
        tuple([unlikely, *(t for t in range(VOCABULARY) if t != unlikely)]),
        (1, *(60000 for _ in range(VOCABULARY - 1))),
    )

    def propose(tokens: Sequence[int], _: random.Random) -> TokenTree:
        return TokenTree((tokens[-1], unlikely), (0, 0), (1.0, 1.0), {0: lie})

    wanted = [
        replace(request((*PROMPT, 1), 3, sampling=sampling, mode=VerificationMode.REJECTION), seed=seed)
        for seed in range(400)
    ]
    config = replace(engine_config(max_running=64, disable_above=64), max_waiting=400)
    outcomes = run(make_runner(model, kv_tokens=4096), wanted, propose=propose, config=config)
    accepted = sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)
    assert accepted > 390


def test_enumeration_is_whole(small: PreTrainedModel) -> None:
    exact = distribution(small, SamplingParams(temperature=1.3))
    assert sum(exact.values()) == pytest.approx(1.0)
    assert len(exact) == len(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
