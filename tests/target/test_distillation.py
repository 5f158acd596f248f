"""A model that writes text with the engine and reads it back, against transformers alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from teaching_model import END, VOCABULARY, save_teaching_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.distillation import Teacher, TeacherSettings, WritingOrder, WrittenText, load_teacher
from outrider.settings import SettingsError
from target_service.distillation import writing

ORDER = WritingOrder((), True, (0.0, 1.0), max_length=48, max_prompt=24, max_answer=48, turns=1, sequences=8, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teaching_model(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    # By its entry point, as a trainer finds it.
    return load_teacher("local", TeacherSettings(str(folder), "cpu", "float32"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def written(teacher: Teacher) -> list[WrittenText]:
    return some(teacher.write(ORDER), 12)


def some(texts: Iterator[WrittenText], count: int) -> list[WrittenText]:
    return list(itertools.islice(texts, count))


def test_facts_are_the_models_own(teacher: Teacher, folder: Path) -> None:
    facts = teacher.facts
    config = json.loads((folder / "config.json").read_text())
    assert (facts.vocab_size, facts.num_layers) == (VOCABULARY, 6)
    assert (facts.hidden_size, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (48, 4, 2, 12)
    assert facts.max_context == config["max_position_embeddings"]
    assert facts.tokenizer_fingerprint


def test_a_greedy_answer_is_what_the_model_says(written: list[WrittenText], model: Any) -> None:
    texts = [text for text in written if text.temperature == 0]
    assert len(texts) > 2
    for text in texts:
        ids = torch.tensor([text.token_ids])
        said = model(ids).logits[0].argmax(-1)
        assert ids[0, text.prompt_length :].tolist() == said[text.prompt_length - 1 : -1].tolist()


def test_writing_ends_in_time_though_no_text_is_whole(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's minutes had been looked at once for each text, and a slow machine's first one took hours."""
    steps = itertools.count()
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: 60.0 * next(steps)))
    assert list(teacher.write(replace(ORDER, seconds=300.0))) == []
    # The first look is the beginning; of the others each is before a step.
    assert next(steps) == 6


def test_texts_are_whole_conversations_within_their_bounds(written: list[WrittenText], tokenizer: Any) -> None:
    texts = written[:10]
    assert len({text.number for text in texts}) == 10
    prompts = [text.token_ids[: text.prompt_length] for text in texts]
    assert len(set(prompts)) == 10
    for text, prompt in zip(texts, prompts, strict=True):
        assert len(text.token_ids) <= ORDER.max_length
        words = tokenizer.decode(prompt[2:-3], skip_special_tokens=True)
        assert words.strip() == words != ""
        turns = [{"role": "user", "content": words}]
        assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
            tokenizer.decode(prompt)
        )
        answer = text.token_ids[text.prompt_length :]
        assert answer[-1] == END or len(text.token_ids) == ORDER.max_length
        assert END not in answer[:-1]
        assert text.temperature == ORDER.temperatures[text.number % 2]


def test_a_text_is_a_function_of_seed_and_number(teacher: Teacher, written: list[WrittenText]) -> None:
    alone = {text.number: text for text in some(teacher.write(replace(ORDER, sequences=2)), 5)}
    together = {text.number: text for text in written}
    both = alone.keys() & together.keys()
    assert len(both) > 3
    assert all(alone[number] == together[number] for number in both)
    other = {text.number: text for text in some(teacher.write(replace(ORDER, seed=6)), 4)}
    assert other.keys() & together.keys()
    assert all(other[number] != together[number] for number in other.keys() & together.keys())


def test_writers_take_turns_with_numbers(teacher: Teacher) -> None:
    numbers = {text.number for text in some(teacher.write(replace(ORDER, first=1, stride=3)), 6)}
    assert all(number % 3 == 1 for number in numbers)


def test_given_conversations_are_answered_once_per_temperature_turn_by_turn(teacher: Teacher, tokenizer: Any) -> None:
    order = replace(ORDER, conversations=(("ab", "cd"), ("ef",)), sampled_prompts=False, max_length=200, max_answer=200)
    texts = sorted(teacher.write(order), key=lambda text: (text.number, len(text.token_ids)))
    first_turns = [text for text in texts if text.prompt_length == 7]
    assert [text.number for text in first_turns] == [0, 1, 2, 3]
    assert [text.temperature for text in first_turns] == [0.0, 1.0, 0.0, 1.0]
    ended = [text for text in first_turns if text.number < 2 and text.token_ids[-1] == END]
    assert len(texts) == 4 + len(ended) > 4
    for text in ended:
        later = next(one for one in texts if one.number == text.number and one.prompt_length > 7)
        answer = tokenizer.decode(text.token_ids[7:-1], skip_special_tokens=True).strip()
        turns = [("user", "ab"), ("assistant", answer), ("user", "cd")]
        asked = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(later.token_ids[: later.prompt_length]) == asked


def test_given_conversations_come_before_sampled_ones(teacher: Teacher) -> None:
    order = replace(ORDER, conversations=(("ab",),))
    by_number = {text.number: text for text in some(teacher.write(order), 8)}
    assert [by_number[number].prompt_length for number in (0, 1)] == [7, 7]
    assert any(number > 1 for number in by_number)


def test_a_conversation_without_room_for_an_answer_is_passed_over(teacher: Teacher) -> None:
    order = replace(ORDER, conversations=(("a" * 60,), ("ef",)), sampled_prompts=False)
    assert {text.number for text in teacher.write(order)} == {2, 3}


def test_prompts_cannot_be_sampled_without_a_chat_template(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    save_teaching_model(bare)
    (bare / "chat_template.jinja").unlink()
    teacher = load_teacher("local", TeacherSettings(str(bare), "cpu", "float32"))
    with pytest.raises(SettingsError, match="--prompts"):
        teacher.write(ORDER)
    texts = list(teacher.write(replace(ORDER, conversations=(("abc",),), sampled_prompts=False)))
    assert [text.prompt_length for text in texts] == [3, 3]


def test_too_many_sequences_or_too_long_texts_are_refused(teacher: Teacher) -> None:
    with pytest.raises(SettingsError, match="1 to"):
        teacher.write(replace(ORDER, sequences=5000))
    with pytest.raises(SettingsError, match="context"):
        teacher.write(replace(ORDER, max_length=100_000))


@pytest.mark.parametrize("wanted", [None, torch.arange(5, 200, 3)], ids=["all tokens", "some tokens"])
def test_states_and_distributions_are_transformers_own(
    teacher: Teacher, model: Any, wanted: torch.Tensor | None
) -> None:
    texts = [torch.randint(3, VOCABULARY, (length,)) for length in (9, 14, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    rows = torch.tensor([0, 8, 14 + 3, 28 + 4])
    layers = (1, 2, 6)
    lesson = teacher.reader(layers).read(padded, rows, wanted)
    assert lesson.states.shape == (3, 14, 3 * 48)
    for place, text in enumerate(texts):
        output = model(text[None], output_hidden_states=True)
        # Entry 0 are the embeddings; the last is normed.
        states = torch.cat([output.hidden_states[layer + (layer < 6)] for layer in layers], dim=-1)[0]
        torch.testing.assert_close(lesson.states[place, : len(text)], states, rtol=1e-4, atol=1e-4)
        for probs, row in zip(lesson.probs, rows.tolist(), strict=True):
            if row // 14 == place:
                distribution = output.logits[0, row % 14].softmax(-1)
                torch.testing.assert_close(
                    probs, distribution if wanted is None else distribution[wanted], rtol=1e-4, atol=1e-6
                )


def test_weights_are_the_models_own(teacher: Teacher, model: Any) -> None:
    weights = teacher.reader((0,)).weights()
    torch.testing.assert_close(weights.embedding, model.model.embed_tokens.weight)
    torch.testing.assert_close(weights.lm_head, model.lm_head.weight)


def test_a_model_that_scales_its_logits_is_refused(folder: Path, tmp_path: Path) -> None:
    from conftest import make_tiny

    scaled = tmp_path / "scaled"
    make_tiny("granite", vocab_size=VOCABULARY, logits_scaling=4.0).save_pretrained(scaled)
    AutoTokenizer.from_pretrained(folder).save_pretrained(scaled)
    teacher = load_teacher("local", TeacherSettings(str(scaled), "cpu", "float32"))
    with pytest.raises(ValueError, match="lm_head"):
        teacher.reader((0,))


def test_a_model_without_rotary_positions_is_refused(folder: Path, tmp_path: Path) -> None:
    from conftest import make_tiny

    make_tiny("gpt2", vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="gpt2: a head has its target"):
        load_teacher("local", TeacherSettings(str(tmp_path), "cpu", "float32"))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="no/such-model"):
        load_teacher("local", TeacherSettings("/no/such-model", "cpu", "float32"))


def test_sampled_conversations_go_on_for_as_many_turns(teacher: Teacher, tokenizer: Any) -> None:
    order = replace(ORDER, turns=2, max_length=400, max_prompt=80, max_answer=80, temperatures=(1.0,))
    texts = some(teacher.write(order), 12)
    later = [text for text in texts if _asked(text, tokenizer) == 2]
    assert later
    assert {text.number % 2 for text in later} == {1}
    assert {_asked(text, tokenizer) for text in texts if text.number % 2 == 0} == {1}
    for text in later:
        before = next(one for one in texts if one.number == text.number and one.prompt_length < text.prompt_length)
        # The end that a turn was told by is the template's own.
        assert before.token_ids[-1] == END
        assert len(text.token_ids) - text.prompt_length <= order.max_answer


def _asked(text: WrittenText, tokenizer: Any) -> int:
    """User turns before the answer."""
    return str(tokenizer.decode(text.token_ids[: text.prompt_length])).count("<s>u")
