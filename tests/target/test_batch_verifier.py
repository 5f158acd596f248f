"""All sequences of a step that are verified apart: the same as each by its own verifier."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from engine_harness import request

from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import DraftDistribution, TokenTree
from target_service.sampling import batch_verifier
from target_service.sampling.batch_verifier import Asked, BatchVerifier
from target_service.sampling.distribution import _most_probable
from target_service.sampling.verifier import SequenceVerifier
from tree_kernels.verification import DeviceVerifier

VOCABULARY = 40
ENDS = (2, 5)


def random_sampling(rng: random.Random, mode: VerificationMode, seed: int) -> SamplingParams:
    some: dict[str, Any] = {
        "seed": seed,
        "repetition_penalty": rng.choice([1.0, 1.3, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.9, -0.5]),
        "frequency_penalty": rng.choice([0.0, 0.4]),
        "logit_bias": {} if rng.random() < 0.5 else {rng.randrange(VOCABULARY): rng.uniform(-9, 9) for _ in range(4)},
        "min_tokens": rng.choice([0, 0, 4, 30]),
        "logprobs": rng.choice([None, None, 0, 3, 20]),
        "stop_token_ids": (7,) if rng.random() < 0.3 else (),
    }
    if mode is not VerificationMode.GREEDY:
        some |= {"temperature": 0.8, "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 12])}
    return SamplingParams(**some)


def random_tree(rng: random.Random, logits: torch.Tensor, *, drawn: bool) -> TokenTree:
    """Up to 9 rows, half of them the likeliest token after their parent; siblings differ."""
    tokens, parents = [rng.randrange(VOCABULARY)], [0]
    for _ in range(rng.randrange(9)):
        parent = rng.randrange(len(tokens))
        best = int(logits[parent].argmax())
        token = best if rng.random() < 0.5 else rng.randrange(VOCABULARY)
        if all(parents[row] != parent or tokens[row] != token for row in range(1, len(tokens))):
            tokens.append(token)
            parents.append(parent)
    distributions = {}
    for row in range(len(tokens)):
        children = tuple(tokens[child] for child in range(1, len(tokens)) if parents[child] == row)
        if drawn and children and rng.random() < 0.7:
            distributions[row] = DraftDistribution(children, tuple(rng.randrange(1, 9) for _ in children))
    return TokenTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens), distributions)


def random_step(seed: int) -> tuple[list[Asked], torch.Tensor]:
    """Sequences of every mode, and logits of all their rows with some rows of nobody between."""
    rng = random.Random(seed)
    logits = torch.randn(80, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    asked: list[Asked] = []
    first = 1
    for number in range(rng.randrange(1, 6)):
        mode = rng.choice(list(VerificationMode))
        sampling = random_sampling(rng, mode, seed + number)
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
        output = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(6))]
        typical = TypicalAcceptance(0.05, 0.9)
        wanted = request(prompt, sampling=sampling, mode=mode, typical=typical)
        tree = random_tree(rng, logits[first:], drawn=mode is VerificationMode.REJECTION)
        verifier = SequenceVerifier(wanted, ENDS)
        asked.append(Asked(verifier, tree, first, output, step=rng.randrange(50)))
        first += len(tree) + rng.randrange(2)
    return asked, logits


@pytest.mark.parametrize(("dtype", "most_rows"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float32, 8)])
def test_each_outcome_is_that_of_the_sequence_alone(
    dtype: torch.dtype, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_verifier, "_MOST_ROWS", most_rows)
    lengths, lossy, listed = Counter[int](), 0, 0
    batch = BatchVerifier(DeviceVerifier("cpu", VOCABULARY, 6, 80), typical=True)
    for seed in range(150):
        asked, logits = random_step(seed)
        logits = logits.to(dtype)
        found = batch.verify(asked, logits)
        for one, outcome in zip(asked, found, strict=True):
            own = logits[one.first_row : one.first_row + len(one.tree)]
            expected = one.verifier.verify(one.tree, own, list(one.output), one.step)
            assert (outcome.walk, outcome.lossy) == (expected.walk, expected.lossy)
            assert len(outcome.logprobs) == len(expected.logprobs)
            for entry, wanted in zip(outcome.logprobs, expected.logprobs, strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-5)
                assert [token for token, _ in entry.top] == [token for token, _ in wanted.top]
                assert [value for _, value in entry.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)
                listed += len(entry.top)
            lengths[len(outcome.walk.accepted_rows)] += 1
            lossy += sum(outcome.lossy)
    # Of every kind there were some.
    assert min(lengths[length] for length in range(4)) > 3 and lossy > 3 and listed > 300


def test_the_logits_are_left_as_they_are() -> None:
    asked, logits = random_step(3)
    before = logits.clone()
    BatchVerifier(DeviceVerifier("cpu", VOCABULARY, 6, 80), typical=True).verify(asked, logits)
    assert torch.equal(logits, before)


def test_kernels_get_the_same_alignment_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled for it; for another they would be compiled while requests wait."""
    sampled, offsets = DeviceVerifier.sampled, []

    def noted(verifier: DeviceVerifier, logits: torch.Tensor, *integers: torch.Tensor | None, **options: Any) -> Any:
        offsets.extend(one.storage_offset() * one.element_size() % 16 for one in integers if one is not None)
        return sampled(verifier, logits, *integers, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceVerifier, "sampled", noted)
    batch = BatchVerifier(DeviceVerifier("cpu", VOCABULARY, 6, 80), typical=True)
    for seed in range(12):
        batch.verify(*random_step(seed))
    assert set(offsets) == {0} and len(offsets) > 36


def test_the_most_probable_of_equals_are_the_first() -> None:
    logprobs = torch.tensor([[-1.0, -0.5, -0.5, -torch.inf, 0.0, -1.0], [-2.0] * 5 + [-0.0]])
    listed = [[token for token, _ in row] for row in _most_probable(logprobs, 6)]
    assert listed == [[4, 1, 2, 0, 5], [5, 0, 1, 2, 3, 4]], "one has no probability"
    noise = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    found = torch.log_softmax(noise, dim=-1)
    expected = torch.sort(found, dim=-1, descending=True, stable=True).indices[:, :20]
    for count in (1, 20):
        rows = _most_probable(found, count)
        assert [[token for token, _ in row] for row in rows] == expected[:, :count].tolist()
        assert [[value for _, value in row] for row in rows] == found.gather(1, expected)[:, :count].tolist()
    # As many equals as there are tokens.
    assert _most_probable(torch.full((1, 200), -5.0), 3) == [[(0, -5.0), (1, -5.0), (2, -5.0)]]
