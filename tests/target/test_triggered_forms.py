"""Outputs that are held to a form from where they begin it: where that is, and what comes behind, whoever drafts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import make_tiny
from engine_harness import DEVICE_SEQUENCES, Outcome, knowing_tree, random_tree, request, run
from structured_forms import VOCABULARY, trained_tokenizer
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from outrider.sampling import FinishReason, SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.core.sequence import DevicePass, SequenceRequest, TriggeredForm
from target_service.engine.counted import first_tokens
from target_service.grammars.compiling import Grammars
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from tree_kernels.verification import Walk

END = 2
PROMPT = (5, 9, 14)
# Single letters, which tokens of this vocabulary also hold in their middle.
FORM = r"e(xy|zz){2,4}\."
TOKENS = 24


def make_model() -> PreTrainedModel:
    return make_tiny(vocab_size=VOCABULARY, eos_token_id=END)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_for(make_model(), trained_tokenizer(), num_pages=512, page_size=16)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(trained_tokenizer(), VOCABULARY, (END,))


def text_of(token_ids: Sequence[int]) -> str:
    return str(trained_tokenizer().decode([token for token in token_ids if token != END]))


def found_in(grammars: Grammars, form: TriggeredForm, pieces: Sequence[Sequence[int]]) -> tuple[list[int], str] | None:
    """The tokens that an output keeps, and one text of the form behind them; None where it does not begin."""
    trigger, output = grammars.trigger(form, "t"), list[int]()
    for piece in pieces:
        kept = trigger.cut(piece)
        if kept is not None:
            output += piece[:kept]
            followed, rest = trigger.begun(output), list[int]()
            while END not in rest:
                tree = TokenTree(((output + rest or [9])[-1],), (0,), (1.0,))
                words = followed.masks(tree, output + rest).words[0]
                rest.append(next(token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1))
            return output, text_of(rest)
        output += piece
    return None


def pieces_of(tokens: Sequence[int], dice: random.Random) -> list[Sequence[int]]:
    cuts = sorted(dice.sample(range(1, len(tokens)), min(dice.randrange(4), len(tokens) - 1)))
    return [tokens[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


# The trigger, what the output begins with, whether it begins in reasoning, and what is kept of it before the form.
PLACES: list[tuple[str, str, bool, str | None]] = [
    ('{"name', 'yes {"name": "Zoë', False, 'yes {"name'),
    ('{"name', 'no {"nam', False, None),
    ("日本", "x日本語", False, "x日本"),
    ("🙂", "a🙂b", False, "a🙂"),
    ("no", '<think>no</think> "no', False, '<think>no</think> "no'),
    ("no", "no</think>no", True, "no</think>no"),
    ("no", "<think>no, no", False, None),
    ("aa", "aaa", False, "aa"),
]


@pytest.mark.parametrize(("trigger", "text", "reasons", "kept"), PLACES)
def test_a_form_begins_behind_its_trigger_however_tokens_come(
    grammars: Grammars, trigger: str, text: str, reasons: bool, kept: str | None
) -> None:
    regex = StructuredOutput(regex=re.escape(trigger) + "!")
    form = TriggeredForm(regex, trigger, reasoning=("<think>", "</think>"), reasons=reasons)
    tokens = list(trained_tokenizer().encode(text))
    for seed in range(20):
        found = found_in(grammars, form, pieces_of(tokens, random.Random(seed)))
        if kept is None:
            assert found is None
        else:
            assert found is not None
            # What a token holds behind the trigger is not the output's: it, and the rest of the trigger, come anew.
            assert text_of(found[0]) + found[1] == kept + "!"


@pytest.mark.parametrize(("text", "begins"), [('  {"name', True), ('{"na{"name', False), ('x{"name', False)])
def test_a_trigger_that_only_counts_where_the_output_begins(grammars: Grammars, text: str, begins: bool) -> None:
    form = TriggeredForm(StructuredOutput(regex=r'\{"name!'), '{"name', only_first=True)
    tokens = list(trained_tokenizer().encode(text))
    for pieces in ([tokens], [[token] for token in tokens]):
        assert (found_in(grammars, form, pieces) is not None) == begins


def asked(seed: int, trigger: str = "e", **sampling: Any) -> SequenceRequest:
    mode = sampling.pop("mode", None)
    params = SamplingParams(**({"temperature": 1.0} | sampling), seed=seed)
    form = TriggeredForm(StructuredOutput(regex=FORM), trigger)
    return request(PROMPT, TOKENS, sampling=params, mode=mode, triggered_form=form)


def check_form(outcome: Outcome) -> bool:
    """Whether the form has begun; then it holds to the end."""
    _, trigger, after = text_of(outcome.token_ids).partition("e")
    if not trigger:
        return False
    ended = outcome.finished.finish.reason is FinishReason.END_OF_SEQUENCE
    assert re.fullmatch(FORM if ended else r"e(xy|zz){0,4}[xz]?\.?", "e" + after), after
    return True


# The trigger is likely.
LIKELY = {token: 4.0 for text, token in trained_tokenizer().get_vocab().items() if "e" in text}
SAMPLING: list[dict[str, Any]] = [
    {"logit_bias": LIKELY},
    {"temperature": 0.0, "logit_bias": LIKELY},
    {"top_p": 0.5, "top_k": 40, "logit_bias": LIKELY, "presence_penalty": 1.0, "logprobs": 2},
]


@pytest.mark.parametrize("more", SAMPLING, ids=["coupled", "greedy", "filtered"])
def test_outputs_are_those_of_plain_decoding_whoever_drafts(runner: ModelRunner, more: dict[str, Any]) -> None:
    wanted = [asked(seed, **more) for seed in range(4)]
    plain = run(runner, wanted)
    begun = [check_form(outcome) for outcome in plain]
    free = run(runner, [request(PROMPT, TOKENS, sampling=one.sampling, mode=one.mode) for one in wanted])
    for outcome, other, begins in zip(plain, free, begun, strict=True):
        before = text_of(outcome.token_ids).partition("e")[0]
        assert text_of(other.token_ids).startswith(before)
        assert begins == ("e" in text_of(other.token_ids))
    assert any(begun)
    expected = [outcome.token_ids for outcome in plain]
    whole = [(*PROMPT, *tokens) for tokens in expected]
    looks_up = runner_for(make_model(), trained_tokenizer(), num_pages=128, page_size=4)
    looks_up.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    known, wild = knowing_tree(whole, VOCABULARY, 12, 0.8), random_tree(VOCABULARY, 12)
    for own, propose, options in (
        (runner, known, {}),
        (runner, wild, {"on_device": True}),
        (runner, None, {"on_device": True, "passes": 4}),
        (runner, wild, {"can_launch_before_results": True}),
        (looks_up, None, {"on_device": True, "passes": 4}),
        (looks_up, known, {"on_device": True}),
    ):
        outcomes = run(own, wanted, propose=propose, **options)  # type: ignore[arg-type]
        assert [outcome.token_ids for outcome in outcomes] == expected, options
        if "logprobs" in more:
            for outcome in outcomes:
                assert sum(len(verdict.logprobs) for verdict in outcome.verdicts) == len(outcome.token_ids)


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.TYPICAL])
def test_other_modes_hold_to_the_form(runner: ModelRunner, mode: VerificationMode) -> None:
    outcomes = run(
        runner, [asked(seed, mode=mode, logit_bias=LIKELY) for seed in range(4)], propose=random_tree(VOCABULARY, 12)
    )
    assert any([check_form(outcome) for outcome in outcomes])


def test_first_tokens_of_an_outcome() -> None:
    tree = TokenTree((9, 4, 5, 6), (0, 0, 1, 2), (1.0,) * 4)
    outcome = Verified(Walk((1, 2), 7), (), (8, 3))
    wanted = [4, 5, 7, 8, 3]
    for count in range(1, 6):
        cut = first_tokens(outcome, tree, count)
        assert cut.tokens(tree) == wanted[:count]
        assert (cut.accepted, cut.passes) == (min(count - 1, 2), max(1, count - 2))
    passes = tuple(DevicePass(3, 1, n, min(n, 1), 1.0, 0.5, (), 0, tuple(range(1, n + 1))) for n in (2, 0, 1))
    outcome = Verified(Walk((), 1), (), (2, 3, 4, 5, 6), passes)
    for count in range(1, 7):
        cut = first_tokens(outcome, tree, count)
        assert cut.tokens(tree) == list(range(1, count + 1))
        assert [one.accepted for one in cut.device_passes] == [[0], [1], [2], [2, 0], [2, 0, 0], [2, 0, 1]][count - 1]
        assert all(len(one.path) == one.accepted >= one.accepted_from_table for one in cut.device_passes)
