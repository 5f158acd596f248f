"""Shaped logits and distributions against a slow, plain definition, ties and extremes included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_harness import probs_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling import SamplingParams
from target_service.sampling.distribution import LogitShaper, logprobs_of

VOCABULARY = 12


def plain_shaped(
    params: SamplingParams, prompt: Sequence[int], ends: Sequence[int], logits: Sequence[float], output: Sequence[int]
) -> list[float]:
    """The definition, token by token."""
    shaped = []
    for token, value in enumerate(logits):
        value += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        times = output.count(token)
        value -= params.presence_penalty * (times > 0) + params.frequency_penalty * times
        held = token in params.stop_token_ids or (token in ends and not params.ignore_eos)
        shaped.append(-math.inf if held and len(output) < params.min_tokens else value)
    return shaped


def plain_probs(params: SamplingParams, shaped: Sequence[float]) -> list[float]:
    """The definition: filters one after the other, each over what the one before has left."""
    if params.temperature == 0:
        best = max(range(len(shaped)), key=lambda token: (shaped[token], -token))
        return [float(token == best) for token in range(len(shaped))]
    top = max(shaped)
    weights = [math.exp((value - top) / params.temperature) for value in shaped]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept = [token for token in ranked if weights[token] >= params.min_p * weights[ranked[0]]]
    kept = kept[: params.top_k] if params.top_k else kept
    total, before, nucleus = math.fsum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if before < params.top_p * total or params.top_p == 1:
            nucleus.append(token)
        before += weights[token]
    total = math.fsum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(weights))]


def shaper_of(params: SamplingParams, prompt: Sequence[int] = (), ends: Sequence[int] = ()) -> LogitShaper:
    return LogitShaper(params, prompt, ends)


TOKENS = st.integers(0, VOCABULARY - 1)
# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.5]), min_size=VOCABULARY, max_size=VOCABULARY)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.sampled_from([1e-9, 0.111, 0.523, 0.917, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.61, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.9]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


@examples(400)
@given(params=PARAMS, logits=LOGITS, prompt=st.lists(TOKENS, max_size=4), output=st.lists(TOKENS, max_size=6))
def test_shaped_logits_and_distribution_equal_the_definition(
    params: SamplingParams, logits: list[float], prompt: list[int], output: list[int]
) -> None:
    ends = (3, 7)
    shaper = shaper_of(params, prompt, ends)
    shaped = shaper.shaped(torch.tensor(logits), output)
    expected = plain_shaped(params, prompt, ends, logits, output)
    assert shaped.dtype is torch.float32
    torch.testing.assert_close(shaped, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    # From the same logits, so that rounding does not part tokens that are tied.
    probs = probs_of(params, shaped)
    assert probs.dtype is torch.float64
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(
        probs, torch.tensor(plain_probs(params, shaped.tolist()), dtype=torch.float64), rtol=1e-9, atol=1e-12
    )


def test_logits_that_nothing_shapes_are_handed_on_unchanged() -> None:
    logits = torch.randn(VOCABULARY, dtype=torch.bfloat16)
    assert torch.equal(shaper_of(SamplingParams(temperature=1.0)).shaped(logits, [1]), logits.float())


def test_shaping_leaves_the_row_it_was_given() -> None:
    logits = torch.randn(VOCABULARY)
    before = logits.clone()
    shaper_of(SamplingParams(logit_bias={2: 5.0}, presence_penalty=1.0)).shaped(logits, [1])
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0])
    assert probs_of(SamplingParams(), logits).tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.500001}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.5}, [0, 1]),
        ({"top_k": 1, "top_p": 0.01}, [0]),
    ],
    ids=["top_k", "top_p exactly reached", "top_p just not reached", "top_p of what top_k left", "one token stays"],
)
def test_ties_are_kept_by_lowest_id(filters: dict[str, float], kept: list[int]) -> None:
    params = SamplingParams(temperature=1.0, **filters)  # type: ignore[arg-type]
    probs = probs_of(params, torch.zeros(4))
    assert probs.nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("top_k", [0, 50, 5000], ids=["no top_k", "small top_k", "large top_k"])
@pytest.mark.parametrize("spread", [0.0, 0.01, 6.0], ids=["all equal", "flat", "peaked"])
def test_a_large_vocabulary_takes_the_same_distribution_as_the_definition(top_k: int, spread: float) -> None:
    torch.manual_seed(3)
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=0.93, min_p=1e-6)
    logits = torch.randn(6000) * spread
    probs = probs_of(params, logits)
    expected = torch.tensor(plain_probs(params, logits.tolist()), dtype=torch.float64)
    # One token at the edge of the nucleus may fall either way: sums of thousands differ in their last bit.
    assert int(((probs > 0) != (expected > 0)).sum()) <= 1
    torch.testing.assert_close(probs, expected, rtol=1e-3, atol=1.1 / 5000)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-310),
        SamplingParams(temperature=1e308),
        SamplingParams(temperature=1.0, repetition_penalty=1e308),
        SamplingParams(temperature=1.0, repetition_penalty=1e-308),
        SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(VOCABULARY), -100.0)),
    ],
    ids=["coldest", "hottest", "largest penalty", "smallest penalty", "all biased down"],
)
def test_extremes_still_make_a_distribution(params: SamplingParams) -> None:
    shaper = shaper_of(params, prompt=range(VOCABULARY))
    probs = probs_of(params, shaper.shaped(torch.linspace(-4, 4, VOCABULARY), [1, 2, 0]))
    assert bool(torch.isfinite(probs).all())
    assert float(probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("length", [0, 2, 3], ids=["none yet", "one short", "enough"])
def test_ends_have_no_probability_until_min_tokens(length: int) -> None:
    params = SamplingParams(temperature=1.0, min_tokens=3, stop_token_ids=(5,))
    shaper = shaper_of(params, ends=(7,))
    probs = probs_of(params, shaper.shaped(torch.zeros(VOCABULARY), [1] * length))
    assert (float(probs[5]) == 0.0) == (float(probs[7]) == 0.0) == (length < 3)


def test_logprobs_are_of_the_raw_row_and_ranked() -> None:
    row = torch.tensor([1.0, 3.0, -400.0, 3.0, 2.0])
    expected = torch.log_softmax(row, dim=-1)
    (entry,) = logprobs_of(row[None], torch.tensor([4]), [5])
    assert entry.logprob == pytest.approx(float(expected[4]))
    assert [token for token, _ in entry.top] == [1, 3, 4, 0, 2]
    assert [value for _, value in entry.top] == pytest.approx([float(expected[token]) for token in (1, 3, 4, 0, 2)])
    assert logprobs_of(row[None], torch.tensor([0]), [0])[0].top == ()


def test_a_form_comes_before_tokens_that_are_held_back() -> None:
    shaper = LogitShaper(SamplingParams(min_tokens=3, stop_token_ids=(1,)), (), (33,))
    ends, more = (np.array(words, np.int32) for words in ([0b10, 0b10], [0b110, 0b10]))
    assert shaper.allows_held_alone(ends, 2)
    assert not shaper.allows_held_alone(more, 2) and not shaper.allows_held_alone(ends, 3)
    logits = torch.arange(40.0)
    found = shaper.shaped(logits, [5, 5], ends)
    assert torch.isfinite(found).nonzero().flatten().tolist() == [1, 33], "both may come, by their own logits"
    assert torch.isfinite(shaper.shaped(logits, [5, 5], more)).nonzero().flatten().tolist() == [2]
