"""Typical acceptance does what its definition says, on vocabularies small enough to look at everything."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from engine_harness import request
from torch import Tensor

from outrider.errors import InvalidField
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import TokenTree
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.verification import DeviceVerifier, Walk, coupled_token, typical_walk

VOCABULARY = 5
RULE = TypicalAcceptance()
TYPICAL = VerificationMode.TYPICAL


def random_case(seed: int) -> tuple[TokenTree, Tensor, TypicalAcceptance]:
    """A tree of up to 12 rows, distributions [rows, V] after them, some with tokens of no probability, and a rule."""
    rng = random.Random(seed)
    tokens, parents, taken = [0], [0], set[tuple[int, int]]()
    for _ in range(rng.randrange(12)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCABULARY)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    torch.manual_seed(seed)
    logits = torch.randn(len(tokens), VOCABULARY, dtype=torch.float64) * rng.choice([0.1, 1.0, 4.0])
    logits[:, rng.randrange(VOCABULARY)] = rng.choice([-math.inf, 0.0])
    rule = TypicalAcceptance(rng.uniform(0.01, 0.99), rng.uniform(0.01, 0.99))
    return TokenTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens)), torch.softmax(logits, dim=-1), rule


def walk_with(
    tree: TokenTree, probs: Tensor, own: list[int], rule: TypicalAcceptance = RULE, *, begins: bool = False
) -> tuple[Walk, tuple[bool, ...]]:
    """The walk where the model itself would draw `own[d]` at depth d."""

    def draw(_: Tensor, depth: int) -> int:
        return own[depth]

    return typical_walk(tree.parents, tree.token_ids, lambda row: probs[row], draw, rule.threshold, begins=begins)


def path_to(tree: TokenTree, row: int) -> tuple[int, ...]:
    """Rows from below the root to `row`."""
    return (*path_to(tree, tree.parents[row]), row) if row else ()


def typical_path_by_definition(
    tree: TokenTree, probs_of: Callable[[int], Tensor], own: int | None, rule: TypicalAcceptance
) -> tuple[int, ...]:
    """The accepted rows of `typical_walk`, found by looking at every path of the tree as the paper puts it.

    `own` is the token that a first token has to be; None in the midst of an answer.
    """
    best: tuple[int, ...] = ()
    best_value = (0, 0.0)
    for leaf in range(1, len(tree)):
        path, likelihood = path_to(tree, leaf), 1.0
        for row in path:
            probs, token = probs_of(tree.parents[row]), tree.token_ids[row]
            entropy = -sum(p * math.log(p) for p in probs.tolist() if p > 0)
            typical = float(probs[token]) > min(rule.epsilon, rule.delta * math.exp(-entropy))
            if token != own if own is not None and tree.parents[row] == 0 else not typical:
                break
            likelihood *= float(probs[token])
        else:
            if (len(path), likelihood) > best_value:
                best, best_value = path, (len(path), likelihood)
    return best


class TestDefinition:
    @pytest.mark.parametrize("begins", [False, True])
    def test_every_path_is_judged_as_the_definition_judges_it(self, begins: bool) -> None:
        lengths = Counter[int]()
        for seed in range(400):
            tree, probs, rule = random_case(seed)
            for token in range(VOCABULARY):
                if begins and not probs[0, token]:
                    # What has no probability is never drawn.
                    continue
                own = [token] * (len(tree) + 1)
                walk, lossy = walk_with(tree, probs, own, rule, begins=begins)
                expected = typical_path_by_definition(tree, probs.__getitem__, token if begins else None, rule)
                assert walk.accepted_rows == expected
                assert walk.next_token == token
                assert lossy == tuple(tree.token_ids[row] != token for row in expected)
                lengths[len(expected)] += 1
        # Cases of every kind were among them.
        assert min(lengths[length] for length in range(4)) > 20

    def test_the_first_token_of_an_answer_is_the_models_own(self) -> None:
        """Whichever token the model draws, it is said: the first token has the model's distribution exactly."""
        for seed in range(200):
            tree, probs, rule = random_case(seed)
            for token in range(VOCABULARY):
                if probs[0, token]:
                    walk, _ = walk_with(tree, probs, [token] * (len(tree) + 1), rule, begins=True)
                    said = [tree.token_ids[row] for row in walk.accepted_rows] + [walk.next_token]
                    assert said[0] == token

    def test_what_is_said_in_one_step_has_the_distribution_of_the_definition(self) -> None:
        """All outcomes enumerated, each by the probability of the model's draw: the path is certain, and the token
        after it has the model's distribution there."""
        for seed in range(100):
            tree, probs, rule = random_case(seed)
            path = typical_path_by_definition(tree, probs.__getitem__, None, rule)
            last = path[-1] if path else 0
            found = Counter[tuple[int, ...]]()
            for token in range(VOCABULARY):
                walk, _ = walk_with(tree, probs, [token] * (len(tree) + 1), rule)
                found[(*walk.accepted_rows, walk.next_token)] += float(probs[last, token])  # type: ignore[assignment]
            assert found == {(*path, token): float(probs[last, token]) for token in range(VOCABULARY)}


class TestRule:
    def test_an_unsure_model_takes_less(self) -> None:
        """Four tokens equally likely: H = ln 4, so that 0.3 / 4 = 0.075 is enough, less than epsilon."""
        assert RULE.threshold(math.log(4)) == pytest.approx(0.075)
        assert RULE.threshold(0.0) == 0.09
        tree = TokenTree((0, 1), (0, 0), (1.0, 1.0))
        even = torch.full((2, 4), 0.25, dtype=torch.float64)
        assert walk_with(tree, even, [3, 2]) == (Walk((1,), 2), (True,))

    def test_the_threshold_itself_is_not_enough(self) -> None:
        tree = TokenTree((0, 1), (0, 0), (1.0, 1.0))
        sure = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
        at, below = TypicalAcceptance(0.25, 0.99), TypicalAcceptance(0.249, 0.99)
        assert walk_with(tree, sure, [0, 0], at)[0].accepted_rows == ()
        assert walk_with(tree, sure, [0, 0], below)[0].accepted_rows == (1,)

    def test_the_longest_path_comes_first_and_then_the_most_probable(self) -> None:
        """Rows 1 and 2 below the root; row 3 below the less probable of them, then row 4 below the other."""
        probs = torch.tensor([[0.0, 0.3, 0.7]] + [[0.4, 0.3, 0.3]] * 4, dtype=torch.float64)
        longer = TokenTree((0, 1, 2, 0), (0, 0, 0, 1), (1.0,) * 4)
        assert walk_with(longer, probs, [0] * 5)[0].accepted_rows == (1, 3)
        as_long = TokenTree((0, 1, 2, 0, 0), (0, 0, 0, 1, 2), (1.0,) * 5)
        assert walk_with(as_long, probs, [0] * 5)[0].accepted_rows == (2, 4)

    def test_the_most_probable_token_is_always_typical(self) -> None:
        for seed in range(300):
            _, probs, rule = random_case(seed)
            for row in probs:
                assert float(row.max()) > rule.threshold(float(torch.special.entr(row).sum()))

    @pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
    @pytest.mark.parametrize("name", ["epsilon", "delta"])
    def test_limits(self, name: str, value: float) -> None:
        with pytest.raises(InvalidField) as caught:
            TypicalAcceptance(**{name: value}).check("speculation.typical")
        assert caught.value.field == f"speculation.typical.{name}"


def verify(sampling: SamplingParams, tree: TokenTree, logits: Tensor, output: list[int], **options: object) -> Verified:
    verifier = SequenceVerifier(request([4, 0], sampling=sampling, mode=TYPICAL, **options), ())
    return verifier.verify(tree, logits, output, 0)


class TestVerifier:
    def test_at_temperature_zero_it_is_greedy(self) -> None:
        lengths = Counter[int]()
        for seed in range(300):
            tree, probs, rule = random_case(seed)
            logits = probs.log().float()
            greedy = SequenceVerifier(request([4, 0], sampling=SamplingParams()), ())
            expected = greedy.verify(tree, logits, [1], 0).walk
            found = verify(SamplingParams(), tree, logits, [1], typical=rule)
            assert found.walk == expected
            assert not any(found.lossy)
            lengths[len(expected.accepted_rows)] += 1
        assert lengths[2] > 0

    def test_the_device_is_asked_for_the_same(self) -> None:
        """By the loop over sequences that the kernels are held to."""
        lengths, lossy_rows = Counter[int](), 0
        for seed in range(200):
            tree, probs, rule = random_case(seed)
            logits, output = probs.log().float(), [1] * (seed % 2)
            sampling = SamplingParams(temperature=0.8, seed=seed)
            asked = request([4, 0], sampling=sampling, mode=TYPICAL, typical=rule)
            verifier = SequenceVerifier(asked, ())
            expected = verifier.verify(tree, logits, output, 0)
            device = DeviceVerifier("cpu", VOCABULARY, 1, len(tree))
            packed = torch.from_numpy(device.pack([verifier.rows_to_verify(tree, 0, 2 + len(output), 0)]))
            integers = [torch.tensor(values, dtype=torch.int32) for values in (tree.token_ids, tree.parents)]
            found = device.sampled(logits, *integers, packed)
            count = int(found.accepted_counts[0])
            assert tuple(found.accepted_rows[:count].tolist()) == expected.walk.accepted_rows
            assert int(found.next_tokens[0]) == expected.walk.next_token
            assert tuple(map(bool, device.lossy_rows[:count].tolist())) == expected.lossy
            lengths[count] += 1
            lossy_rows += sum(expected.lossy)
        assert lengths[2] > 10 and lossy_rows > 10

    def test_tokens_after_the_path_are_the_draws_of_the_requests_seed(self) -> None:
        """And of an answer's first token, so is that: over seeds it has the distribution of plain sampling, token by
        token, whatever is drafted."""
        tree, probs, _ = random_case(3)
        logits = probs.log().float()
        drawn = torch.softmax(logits[0].double() / 0.8, dim=-1)
        for seed in range(200):
            sampling = SamplingParams(temperature=0.8, seed=seed)
            found = verify(sampling, tree, logits, [])
            said = [tree.token_ids[row] for row in found.walk.accepted_rows] + [found.walk.next_token]
            assert said[0] == coupled_token(drawn, seed, 2)
            later = verify(sampling, tree, logits, [1])
            rows = (0, *later.walk.accepted_rows)
            last = torch.softmax(logits[rows[-1]].double() / 0.8, dim=-1)
            assert later.walk.next_token == coupled_token(last, seed, 3 + len(rows) - 1)

    def test_filters_hold(self) -> None:
        """A token that top_k leaves out has no probability, and is not typical at any threshold."""
        tree = TokenTree((0, 1, 2), (0, 0, 0), (1.0,) * 3)
        logits = torch.tensor([[0.0, 1.0, 1.1, -9.0, -9.0]] * 3)
        rule = TypicalAcceptance(0.01, 0.01)
        sampling = SamplingParams(temperature=1.0, top_k=1)
        assert verify(sampling, tree, logits, [1], typical=rule).walk.accepted_rows == (2,)
        only = TokenTree((0, 1), (0, 0), (1.0,) * 2)
        assert verify(sampling, only, logits[:2], [1], typical=rule).walk.accepted_rows == ()
