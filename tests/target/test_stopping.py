"""Where an output ends and what its text is, whatever steps its tokens came in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outrider.sampling import FinishReason, SamplingParams
from target_service.core.sequence import Finish
from target_service.core.stopping import StopChecker
from target_service.text.tokenizer import AnswerText

END = 2
# Few letters and whole characters of two to four bytes, so that stops, their beginnings and split characters abound.
TEXTS = st.text(alphabet="ab é€🙂", max_size=40)
STOPS = st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3, unique=True).map(tuple)
HYPOTHESIS = examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def grouped(ids: Sequence[int], seed: int) -> list[list[int]]:
    """`ids` cut into runs of random length, as steps would commit them."""
    chance, groups, at = random.Random(seed), [], 0
    while at < len(ids):
        count = chance.randint(1, 5)
        groups.append(list(ids[at : at + count]))
        at += count
    return groups


def read(answer: AnswerText, groups: Sequence[Sequence[int]]) -> str:
    return "".join(answer.push(group) for group in groups) + answer.finish()


def run(checker: StopChecker, groups: Sequence[Sequence[int]]) -> tuple[list[int], Finish | None]:
    """Commit group after group until the output ends."""
    output: list[int] = []
    for group in groups:
        kept, finish = checker.cut(len(output), group)
        output += group[:kept]
        if finish is not None:
            return output, finish
    return output, None


class TestAnswerText:
    @HYPOTHESIS
    @given(text=TEXTS, seed=st.integers(0, 99))
    def test_any_grouping_gives_the_whole_text(self, model_tokenizer: Any, text: str, seed: int) -> None:
        ids = model_tokenizer.encode(text)
        assert read(model_tokenizer.answer(), grouped(ids, seed)) == text

    @HYPOTHESIS
    @given(text=TEXTS, stop=STOPS, seed=st.integers(0, 99))
    def test_any_grouping_cuts_at_the_stop_that_is_whole_first(
        self, model_tokenizer: Any, text: str, stop: tuple[str, ...], seed: int
    ) -> None:
        ids = model_tokenizer.encode(text)
        answer = model_tokenizer.answer((), stop)
        ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
        expected = text[: min(ends)[1]] if ends else text
        assert read(answer, grouped(ids, seed)) == expected
        assert (answer.matched is not None) == bool(ends)

    @HYPOTHESIS
    @given(text=TEXTS, stop=STOPS)
    def test_nothing_said_is_ever_taken_back(self, model_tokenizer: Any, text: str, stop: tuple[str, ...]) -> None:
        answer, said = model_tokenizer.answer((), stop), ""
        for token in model_tokenizer.encode(text):
            said += answer.push([token])
            assert text.startswith(said)
            assert not any(one in said for one in stop)

    def test_a_split_character_waits_for_its_last_byte(self, model_tokenizer: Any) -> None:
        answer = model_tokenizer.answer()
        ids = model_tokenizer.encode("🙂")
        assert [answer.push([token]) for token in ids] == ["", "", "", "🙂"]

    def test_text_that_may_begin_a_stop_waits(self, model_tokenizer: Any) -> None:
        answer = model_tokenizer.answer((), ("end.",))
        assert [answer.push(model_tokenizer.encode(c)) for c in "o en end"] == [
            *["o", " ", "", ""],
            *["en ", "", "", ""],
        ]
        assert answer.finish() == "end"

    def test_an_output_that_ends_inside_a_character_shows_that(self, model_tokenizer: Any) -> None:
        ids = model_tokenizer.encode("a🙂")
        assert read(model_tokenizer.answer(), [ids[:-1]]) == "a\ufffd"

    def test_special_tokens_have_no_text(self, model_tokenizer: Any) -> None:
        ids = model_tokenizer.encode("ab")
        assert read(model_tokenizer.answer(), [[ids[0], 1, 1], [1, ids[1], END]]) == "ab"

    def test_bytes_that_never_make_a_character_are_not_held_for_ever(self, model_tokenizer: Any) -> None:
        answer = model_tokenizer.answer()
        said = answer.push([3 + 0xFF] * 500)
        assert len(said) > 400
        assert set(said) == {"\ufffd"}

    def test_nothing_comes_after_a_stop(self, model_tokenizer: Any) -> None:
        answer = model_tokenizer.answer((), ("b",))
        ids = model_tokenizer.encode("abcab")
        assert answer.push(ids) == "a"
        assert answer.push(ids) == ""
        assert answer.finish() == ""


class TestStopChecker:
    @HYPOTHESIS
    @given(
        text=TEXTS,
        stop=STOPS,
        seed=st.integers(0, 99),
        limit=st.integers(1, 60),
        min_tokens=st.integers(0, 6),
        ends=st.booleans(),
    )
    def test_the_cut_does_not_depend_on_the_grouping(
        self,
        model_tokenizer: Any,
        text: str,
        stop: tuple[str, ...],
        seed: int,
        limit: int,
        min_tokens: int,
        ends: bool,
    ) -> None:
        ids = [*model_tokenizer.encode(text), *([END] if ends else []), 100, 101]
        params = SamplingParams(stop=stop, stop_token_ids=(101,), min_tokens=min_tokens)

        def checker() -> StopChecker:
            return StopChecker(params, (END,), limit, model_tokenizer)

        one_by_one = run(checker(), [[token] for token in ids])
        assert run(checker(), grouped(ids, seed)) == one_by_one
        assert run(checker(), [ids]) == one_by_one

    @pytest.mark.parametrize(
        ("params", "limit", "ids", "expected"),
        [
            (SamplingParams(), 9, [50, END, 51], (2, Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=END))),
            (SamplingParams(ignore_eos=True), 9, [50, END, 51], (3, None)),
            (SamplingParams(stop_token_ids=(51,)), 9, [50, 51], (2, Finish(FinishReason.STOP, stop_token_id=51))),
            (SamplingParams(), 2, [50, 51, 52], (2, Finish(FinishReason.LENGTH))),
            (SamplingParams(), 2, [50, END], (2, Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=END))),
            (SamplingParams(min_tokens=2), 9, [END, END, END], (3, Finish(FinishReason.END_OF_SEQUENCE, END))),
            (
                SamplingParams(stop_token_ids=(END,), ignore_eos=True),
                9,
                [END],
                (1, Finish(FinishReason.STOP, stop_token_id=END)),
            ),
        ],
        ids=["end", "end ignored", "stop token", "length", "end at the limit", "min_tokens", "end asked for as a stop"],
    )
    def test_tokens_that_end(
        self, params: SamplingParams, limit: int, ids: list[int], expected: tuple[int, Finish | None]
    ) -> None:
        assert StopChecker(params, (END,), limit, None).cut(0, ids) == expected

    def test_a_stop_string_may_span_tokens_and_steps(self, model_tokenizer: Any) -> None:
        ids = model_tokenizer.encode("one STOP two")
        checker = StopChecker(SamplingParams(stop=("STOP",)), (END,), 99, model_tokenizer)
        assert run(checker, [ids[:5], ids[5:7], ids[7:]]) == (
            ids[:8],
            Finish(FinishReason.STOP, stop_string="STOP"),
        )

    def test_tokens_behind_a_stop_string_are_not_kept(self, model_tokenizer: Any) -> None:
        ids = model_tokenizer.encode("x.\n\ny")
        checker = StopChecker(SamplingParams(stop=("\n\n",)), (END,), 99, model_tokenizer)
        kept, finish = checker.cut(0, ids)
        assert (kept, finish) == (4, Finish(FinishReason.STOP, stop_string="\n\n"))
