"""Stops and text over tokenizers whose tokens are words and parts of characters, whatever the model says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.sampling import FinishReason, SamplingParams
from target_service.core.sequence import Finish
from target_service.core.stopping import Detokenizer, StopChecker

CORPUS = ["a banana, an  ananas\n\nend. €9 €99 für Zoë 🙂🙂 日本 日本語 the end. the  end"] * 3
SIZE, BROKEN = 290, "\ufffd"
# Parts of the corpus, so that merged tokens are the rule.
STOPS = st.lists(
    st.sampled_from(["an", "na,", "end.", " th", "\n\n", "€", "9", "本", "🙂", "x"]), max_size=3, unique=True
)
TEXTS = st.lists(st.sampled_from([*CORPUS[0].split(" "), " ", "\n", "é"]), max_size=12).map(" ".join)
CUTS = st.lists(st.integers(1, 5), min_size=40, max_size=40)
HYPOTHESIS = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def merged() -> Any:
    """Byte-level BPE with merges across spaces and inside characters, as GPT-2's, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == SIZE
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module")
def pieces() -> Any:
    """Words with a mark for the space before them, and bytes for what no word covers, as Llama 2's and Mistral's."""
    words = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abentZ", "▁", "an", "▁an"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "n"), ("▁", "an")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def cut_into(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    rest, groups = list(ids), []
    for count in itertools.cycle(cuts):
        if not rest:
            return groups
        groups.append(rest[:count])
        rest = rest[count:]
    return groups


def read(detokenizer: Detokenizer, groups: Sequence[Sequence[int]]) -> str:
    return "".join(map(detokenizer.push, groups)) + detokenizer.finish()


def ends_at(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """The definition: as many tokens as it takes until the text, less a character under way, holds a stop string."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip(BROKEN)
        if any(one in text for one in stop):
            return count
    return None


# Fewer tokens than are held back at most, so that even bytes that never make a character are decoded as one text.
@HYPOTHESIS
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=30), cuts=CUTS)
def test_whatever_the_model_says_its_text_is_the_decoded_whole(merged: Any, ids: list[int], cuts: list[int]) -> None:
    whole = merged.decode(ids, skip_special_tokens=True)
    assert read(Detokenizer(merged), cut_into(ids, cuts)) == whole


@pytest.mark.parametrize("name", ["merged", "pieces"])
@HYPOTHESIS
@given(text=TEXTS, stop=STOPS, cuts=CUTS)
def test_stops_inside_and_across_merged_tokens_cut_where_the_definition_does(
    name: str, request: pytest.FixtureRequest, text: str, stop: list[str], cuts: list[int]
) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = ends_at(tokenizer, ids, stop)
    checker = StopChecker(SamplingParams(stop=tuple(stop)), (), 10_000, tokenizer)
    output: list[int] = []
    finish: Finish | None = None
    for group in cut_into(ids, cuts):
        kept, finish = checker.cut(len(output), group)
        output += group[:kept]
        if finish is not None:
            break
    assert output == ids[:expected]
    assert (finish is not None) == (expected is not None)
    whole = tokenizer.decode(ids[:expected], skip_special_tokens=True)
    if finish is not None:
        assert finish.reason is FinishReason.STOP and finish.stop_string in stop
        whole = whole[: whole.find(finish.stop_string)]
    assert read(Detokenizer(tokenizer, stop), cut_into(ids, cuts)) == whole


@pytest.mark.parametrize("name", ["merged", "pieces"])
def test_tokens_are_really_merged(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    assert len(tokenizer.encode("an an", add_special_tokens=False)) == 2
    assert len(tokenizer.encode("é", add_special_tokens=False)) > 1
