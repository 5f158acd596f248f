"""Outputs that are kept to a form: exact, alike with and without drafts, and by the law of masked sampling."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch
from chi_squared import chi_squared
from conftest import make_tiny
from engine_harness import Outcome, knowing_tree, probs_of, random_tree, request, run
from random_schemas import random_schemas
from structured_forms import SCHEMAS, VOCABULARY, trained_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from outrider.sampling import FinishReason, SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from target_service.core.sequence import SequenceRequest
from target_service.grammars.compiling import Grammars
from target_service.model.runner import ModelRunner

END = 2
PROMPT = (5, 9, 14)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = make_tiny(vocab_size=VOCABULARY, eos_token_id=END)
    return runner_for(model, trained_tokenizer(), num_pages=512, page_size=16)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(trained_tokenizer(), VOCABULARY, (END,))


def asked(form: StructuredOutput, seed: int = 1, max_tokens: int = 160, **sampling: Any) -> SequenceRequest:
    mode = sampling.pop("mode", None)
    params = SamplingParams(**({"temperature": 1.0} | sampling), seed=seed, structured_output=form)
    params.check(VOCABULARY)
    return request(PROMPT, max_tokens, sampling=params, mode=mode)


def schema_form(name: str, **more: Any) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(SCHEMAS[name]), **more)


def text_of(outcome: Outcome) -> str:
    assert outcome.finished.finish.reason is FinishReason.END_OF_SEQUENCE
    assert outcome.token_ids[-1] == END
    return str(trained_tokenizer().decode(outcome.token_ids[:-1]))


def test_outputs_of_schemas_parse_and_validate(runner: ModelRunner) -> None:
    # Some of those that `test_random_schemas.py` draws too. Quotes and closing signs are likely, so that texts end.
    likely = {trained_tokenizer().get_vocab()[sign]: 30.0 for sign in ('"', "}", "]", "n")}
    schemas = list(SCHEMAS.values()) + random_schemas(260)[::20]
    forms = [StructuredOutput(json_schema=json.dumps(schema)) for schema in schemas]
    outcomes = run(runner, [asked(form, logit_bias=likely) for form in forms])
    for schema, outcome in zip(schemas, outcomes, strict=True):
        jsonschema.validate(json.loads(text_of(outcome)), schema, jsonschema.Draft202012Validator)


MODES: list[tuple[str, dict[str, Any]]] = [
    ("coupled", {}),
    ("greedy", {"temperature": 0.0}),
    ("filtered", {"top_k": 3, "min_p": 0.05}),
    ("penalised", {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {40: 3.0}, "min_tokens": 9}),
]


@pytest.mark.parametrize("more", [more for _, more in MODES], ids=[name for name, _ in MODES])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_drafts_change_no_output(runner: ModelRunner, more: dict[str, Any], on_device: bool) -> None:
    names = ["flat", "enum-unicode", "pattern-unicode", "recursion", "array-objects", "number-bounds"]
    wanted = [asked(schema_form(name), 3, 60, **more) for name in names]
    plain = [outcome.token_ids for outcome in run(runner, wanted)]
    whole = [(*PROMPT, *tokens) for tokens in plain]
    drafted = run(runner, wanted, propose=knowing_tree(whole, VOCABULARY, 12, 0.8), on_device=on_device)
    assert [outcome.token_ids for outcome in drafted] == plain
    assert sum(outcome.finished.totals.accepted_tokens for outcome in drafted) > 0
    wild = run(runner, wanted, propose=random_tree(VOCABULARY, 12), on_device=on_device)
    assert [outcome.token_ids for outcome in wild] == plain


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.TYPICAL])
def test_other_modes_keep_to_the_form(runner: ModelRunner, mode: VerificationMode) -> None:
    names = ["flat", "nested", "union", "enum-unicode"]
    wanted = [asked(schema_form(name), 4, mode=mode) for name in names]
    outcomes = run(runner, wanted, propose=random_tree(VOCABULARY, 12))
    for name, outcome in zip(names, outcomes, strict=True):
        jsonschema.validate(json.loads(text_of(outcome)), SCHEMAS[name])


def test_regular_expressions_choices_and_grammars(runner: ModelRunner) -> None:
    choices = ("yes", "no", "y", 'a"b\\', "new\nline", "日本🙂", "\u2028")
    pattern = r"(ab|[0-4]é){2,5}🙂?-\p{Lu}{1,2}"
    nested = 'start: "(" start ")" | "x"'
    forms = [StructuredOutput(choices=choices), StructuredOutput(regex=pattern), StructuredOutput(grammar=nested)]
    outcomes = run(runner, [asked(form, seed) for form in forms for seed in range(4)])
    texts = [text_of(outcome) for outcome in outcomes]
    assert all(text in choices for text in texts[:4])
    assert all(re.fullmatch(pattern.replace(r"\p{Lu}", "[^\\W\\d_a-z]"), text) for text in texts[4:8])
    assert all(text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2) for text in texts[8:])


def test_json_objects_and_whitespace(runner: ModelRunner) -> None:
    # Quotes and closing signs are likely, so that the texts are short.
    likely = {trained_tokenizer().get_vocab()[sign]: 30.0 for sign in ('"', "}", "]")}
    forms = [StructuredOutput(json_object=True), StructuredOutput(json_object=True, free_whitespace=True)]
    outcomes = run(runner, [asked(form, seed, logit_bias=likely) for form in forms for seed in range(3)])
    for outcome in outcomes:
        assert isinstance(json.loads(text_of(outcome)), dict)
    (rigid,) = run(runner, [asked(schema_form("nested"), 5)])
    assert " " not in text_of(rigid)
    spaces = {token: 60.0 for token in trained_tokenizer().encode(" ")}
    (free,) = run(runner, [asked(schema_form("nested", free_whitespace=True), 5, 20, logit_bias=spaces)])
    assert " " in trained_tokenizer().decode(free.token_ids)


def test_the_end_of_a_form_comes_before_a_minimum(runner: ModelRunner) -> None:
    (outcome,) = run(runner, [asked(StructuredOutput(choices=("yes",)), min_tokens=100)])
    assert text_of(outcome) == "yes"


def test_an_output_is_never_longer_than_asked(runner: ModelRunner) -> None:
    (outcome,) = run(runner, [asked(StructuredOutput(regex="a{50}"), max_tokens=7)])
    assert outcome.finished.finish.reason is FinishReason.LENGTH
    assert trained_tokenizer().decode(outcome.token_ids).strip("a") == ""


def test_a_stop_string_ends_a_form_early(runner: ModelRunner) -> None:
    (outcome,) = run(runner, [asked(StructuredOutput(choices=("yes or no",)), stop=("or",))])
    assert outcome.finished.finish.stop_string == "or"


def test_logprobs_are_those_of_the_model(runner: ModelRunner) -> None:
    (outcome,) = run(runner, [asked(StructuredOutput(choices=("yes",)), logprobs=2)])
    first = outcome.verdicts[0].logprobs[0]
    # The form forced the token, and the model thought otherwise.
    assert first.logprob < 0
    assert len(first.top) == 2


def test_preempted_outputs_are_the_same(runner: ModelRunner) -> None:
    model = make_tiny(vocab_size=VOCABULARY, eos_token_id=END)
    small = runner_for(model, trained_tokenizer(), num_pages=9, page_size=4)
    wanted = [asked(schema_form("mixed"), seed, 26) for seed in range(4)]
    tight = run(small, wanted)
    assert sum(outcome.finished.totals.preemptions for outcome in tight) > 0
    assert [outcome.token_ids for outcome in tight] == [outcome.token_ids for outcome in run(runner, wanted)]


class TestTheLaw:
    """The distribution of outputs is that of drawing each token from the masked distribution, by enumeration."""

    # Several tokens begin and end them, and some are the beginning of others.
    CHOICES = ("tr", "tu", "true", "trueb", "bt", "btr", "al", "ag")
    DRAWS = 200

    def expected(self) -> dict[tuple[int, ...], float]:
        """The probability of every output, by whole forward passes of the model alone: after a text may come the
        tokens that begin the rest of a choice, and the end after a whole one."""
        found: dict[tuple[int, ...], float] = {}
        params, model = SamplingParams(temperature=1.0), make_tiny(vocab_size=VOCABULARY, eos_token_id=END)
        letters = {token: text for text, token in trained_tokenizer().get_vocab().items() if text.isalpha()}
        waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        while waiting:
            path, probability = waiting.pop()
            text, logits = "".join(letters[token] for token in path), _logits(model, path)
            allowed = [token for token in letters if any(one.startswith(text + letters[token]) for one in self.CHOICES)]
            allowed += [END] * (text in self.CHOICES)
            masked = torch.full_like(logits, -torch.inf)
            masked[allowed] = logits[allowed]
            probabilities = probs_of(params, masked)
            for token in allowed:
                after = (*path, token), probability * float(probabilities[token])
                if token == END:
                    found[after[0]] = after[1]
                else:
                    waiting.append(after)
        assert abs(sum(found.values()) - 1) < 1e-5
        return found

    @pytest.mark.parametrize("mode", [VerificationMode.COUPLED, VerificationMode.REJECTION])
    def test_drafted(self, runner: ModelRunner, mode: VerificationMode) -> None:
        law = self.expected()
        likely = [(*PROMPT, *tokens) for tokens in sorted(law, key=law.__getitem__)[-2:]]
        # Choices are another grammar than this in llguidance; the law is the same.
        form = StructuredOutput(regex="|".join(self.CHOICES))
        wanted = [asked(form, seed, 10, mode=mode) for seed in range(self.DRAWS)]
        counts: Counter[tuple[int, ...]] = Counter()
        for start in range(0, self.DRAWS, 50):
            outcomes = run(runner, wanted[start : start + 50], propose=knowing_tree(likely, VOCABULARY, 6, 0.9))
            counts.update(outcome.token_ids for outcome in outcomes)
        assert set(counts) <= set(law)
        likely_ones = [one for one, probability in law.items() if probability * self.DRAWS >= 5]
        assert len(likely_ones) >= 4
        observed, expected = [counts[one] for one in likely_ones], [law[one] * self.DRAWS for one in likely_ones]
        rest = [self.DRAWS - sum(observed)], [self.DRAWS - sum(expected)]
        # Coins of REJECTION differ from process to process.
        assert chi_squared(observed + rest[0], expected + rest[1]) > 1e-6


def _logits(model: PreTrainedModel, path: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[0, -1]
    return logits.clone()
