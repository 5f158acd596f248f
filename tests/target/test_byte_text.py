"""The table says what the tokenizer says, for any tokens, and knows which tokenizers it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from target_service.api.byte_text import ByteText, Detokenizers, token_bytes
from target_service.core.stopping import Detokenizer

CORPUS = ["a banana, an  ananas\n\nend. €9 €99 für Zoë 🙂🙂 日本 日本語 the end."] * 3
HYPOTHESIS = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = st.lists(st.integers(0, 294), max_size=30)
CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def plain() -> Any:
    """Byte-level BPE with merges inside characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == 290
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def merged(plain: Any) -> Any:
    """The same with special tokens, and added ones that are text."""
    tokenizer = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<|a b|>", special=True)])
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("naïve\u3000"), AddedToken("plain")])
    assert tokenizer.get_vocab_size() == 295
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def read(text: ByteText | Detokenizer, ids: list[int], cuts: list[int]) -> str:
    said, begin, turn = "", 0, 0
    while begin < len(ids):
        count = cuts[turn % len(cuts)]
        said += text.push(ids[begin : begin + count])
        begin, turn = begin + count, turn + 1
    return said + text.finish()


@HYPOTHESIS
@given(IDS, CUTS)
def test_any_tokens_in_any_groups(merged: Any, ids: list[int], cuts: list[int]) -> None:
    text = Detokenizers(merged).new(())
    assert isinstance(text, ByteText)
    assert read(text, ids, cuts) == merged.decode(ids, skip_special_tokens=True)


@HYPOTHESIS
@given(IDS, CUTS)
def test_special_tokens_are_shown_as_the_tokenizer_shows_them(merged: Any, ids: list[int], cuts: list[int]) -> None:
    text = Detokenizers(merged).new((), special=True)
    assert isinstance(text, ByteText)
    assert read(text, ids, cuts) == merged.decode(ids, skip_special_tokens=False)
    assert read(Detokenizer(merged, special=True), ids, cuts) == merged.decode(ids, skip_special_tokens=False)


@HYPOTHESIS
@given(
    st.lists(st.sampled_from(CORPUS[0].split(" ")), max_size=10).map(" ".join),
    st.lists(st.sampled_from(["an", "end.", " th", "\n\n", "€", "本", "🙂"]), max_size=3, unique=True),
    CUTS,
)
def test_stop_strings_cut_as_they_do_token_by_token(merged: Any, said: str, stop: list[str], cuts: list[int]) -> None:
    ids = merged.encode(said)
    quick, plain = Detokenizers(merged).new(stop), Detokenizer(merged, stop)
    assert read(quick, ids, cuts) == read(plain, ids, [1])
    assert quick._stops.matched == plain.matched


def test_characters_wait_for_their_bytes(merged: Any) -> None:
    table = token_bytes(merged)
    assert table is not None
    byte_ids = {piece: token for token, piece in table.items() if len(piece) == 1}
    text = ByteText(table)
    assert [text.push((byte_ids[bytes([byte])],)) for byte in "a🙂".encode()] == ["a", "", "", "", "🙂"]


FRONT = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]


def with_decoder(vocabulary: Any, decoder: Any, **options: Any) -> Any:
    """A tokenizer of the same tokens that decodes otherwise."""
    tokenizer = Tokenizer.from_str(vocabulary.backend_tokenizer.to_str())
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@HYPOTHESIS
@given(st.lists(st.integers(0, 289), max_size=30), CUTS)
def test_decoders_that_find_nothing_are_passed_over(plain: Any, ids: list[int], cuts: list[int]) -> None:
    """As in a vocabulary that was converted from GGUF."""
    tokenizer = with_decoder(plain, decoders.Sequence([*FRONT, decoders.ByteLevel()]))
    text = Detokenizers(tokenizer).new(())
    assert isinstance(text, ByteText)
    assert read(text, ids, cuts) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("decoder", "options"),
    [
        (decoders.Metaspace(), {}),
        (decoders.Sequence(FRONT), {}),
        (decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]), {}),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteLevel()]), {}),
        (decoders.ByteLevel(), {"clean_up_tokenization_spaces": True}),
    ],
    ids=["metaspace", "byte_fallback", "replaces", "strips", "tidies"],
)
def test_tokenizers_that_need_neighbours_are_left_to_themselves(plain: Any, decoder: Any, options: Any) -> None:
    tokenizer = with_decoder(plain, decoder, **options)
    assert token_bytes(tokenizer) is None
    assert isinstance(Detokenizers(tokenizer).new(()), Detokenizer)


@pytest.mark.parametrize("added", ["two words", "<0x41>", "na▁ve"])
def test_tokens_that_a_decoder_in_front_would_find(plain: Any, added: str) -> None:
    tokenizer = with_decoder(plain, decoders.Sequence([*FRONT, decoders.ByteLevel()]))
    tokenizer.add_tokens([added])
    assert token_bytes(tokenizer) is None
