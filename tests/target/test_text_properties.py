"""Text to tokens and back, over every kind of tokenizer: any cut, any border, any stop, and no special token of a
caller's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import CHAT_TEMPLATE, CONTROL, CORPUS, KINDS, SPECIAL, byte_level
from tokenizers import AddedToken, Tokenizer, decoders

from target_service.text.decoding.detokenizer import TableDetokenizer, WindowDetokenizer
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

BROKEN = "\ufffd"
FEW = settings(max_examples=60, deadline=None)
WORDS = [*CORPUS[0].split(" "), *CORPUS[2].split(" "), "", "\n", "é", " x", "hello", "<", "|", "im_end|>"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=10).map(" ".join)
ANY_TEXT = st.one_of(TEXTS, st.text(max_size=12))
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
STOPS = st.lists(
    st.sampled_from(["an", "na,", "is P", "end.", " ", "\n", "€", "9", "本", "🙂", "x", "<|im_end|>", "<|im_end|>\n"]),
    min_size=1,
    max_size=3,
    unique=True,
)
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def tokenizer_of_kind(kind: str) -> ModelTokenizer:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return ModelTokenizer(KINDS[kind](), chat_template=CHAT_TEMPLATE, special_tokens=names)


@cache
def encoder_of_kind(kind: str) -> PromptEncoder:
    return PromptEncoder(tokenizer_of_kind(kind))


def in_cuts(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    rest, groups = list(ids), []
    for count in itertools.cycle(cuts):
        if not rest:
            return groups
        groups.append(rest[:count])
        rest = rest[count:]
    return groups


def streamed(
    tokenizer: ModelTokenizer, prompt: Sequence[int], ids: Sequence[int], cuts: Sequence[int], *stop: str
) -> str:
    answer = tokenizer.answer(prompt, stop)
    return "".join(map(answer.push, in_cuts(ids, cuts))) + answer.finish()


def visible(tokenizer: ModelTokenizer, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if token not in tokenizer.special_ids]


@kinds
@FEW
@given(text=ANY_TEXT, cuts=CUTS)
def test_pieces_joined_are_the_whole_text(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = tokenizer_of_kind(kind)
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, (), ids, cuts) == tokenizer.decode(ids)


@kinds
@FEW
@given(text=ANY_TEXT, cuts=CUTS, border=st.integers(0, 40))
def test_prompt_and_answer_join_at_any_border(kind: str, text: str, cuts: list[int], border: int) -> None:
    """Also where it is inside a character: that one is the answer's."""
    tokenizer = tokenizer_of_kind(kind)
    ids = visible(tokenizer, tokenizer.encode(text))
    prompt, answer = ids[:border], ids[border:]
    whole = tokenizer.decode(ids)
    said = streamed(tokenizer, prompt, answer, cuts)
    # The library shows every byte of a character that is not whole yet, and those before it in a row of bytes.
    before = whole[: len(whole) - len(said)]
    assert before + said == whole
    shown = tokenizer.decode(prompt)
    assert shown.rstrip(BROKEN) == before[: len(shown.rstrip(BROKEN))]
    if BROKEN not in shown and BROKEN not in whole:
        assert shown == before


@FEW
@given(ids=st.lists(st.integers(0, 400), max_size=25), cuts=CUTS, border=st.integers(0, 25))
def test_any_tokens_of_a_byte_level_vocabulary(ids: list[int], cuts: list[int], border: int) -> None:
    """Also those that make no characters, as a model may say."""
    tokenizer = tokenizer_of_kind("byte-level")
    assert streamed(tokenizer, (), ids, cuts) == tokenizer.decode(ids)
    whole, shown = tokenizer.decode(ids), tokenizer.decode(ids[:border])
    said = streamed(tokenizer, ids[:border], ids[border:], cuts)
    assert whole in (shown + said, shown.rstrip(BROKEN) + said) or BROKEN in whole


@kinds
@FEW
@given(text=TEXTS, cuts=CUTS, stop=STOPS, at=st.integers(0, 12), prompt=st.sampled_from(["", "hello"]))
def test_stop_strings_are_found_at_every_split(
    kind: str, text: str, cuts: list[int], stop: list[str], at: int, prompt: str
) -> None:
    """By the definition: the first token with which the text, special tokens shown, holds one ends it."""
    tokenizer = tokenizer_of_kind(kind)
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    special = tokenizer.get_vocab()["<|im_end|>"]
    ids.insert(min(at, len(ids)), special)
    # Token by token, without stops, and the special one as it is written.
    answer = tokenizer.answer(before)
    shown = hidden = ""
    expected, ended = "", False
    for token in ids:
        more = answer.push([token])
        hidden += more
        shown += "<|im_end|>" if token == special else more
        found = [(hidden.find(one), one) for one in stop if one in hidden]
        found += [
            (len(shown[: shown.find(one)].replace("<|im_end|>", "")), one)
            for one in stop
            if "<|im_end|>" in one and one in shown
        ]
        if found:
            expected, ended = hidden[: min(found)[0]], True
            break
    if not ended:
        expected = hidden + answer.finish()
        # The last bytes of no character may make a stop string; no model means that.
        if any(one in expected for one in stop):
            return
    assert streamed(tokenizer, before, ids, cuts, *stop) == expected


@kinds
@FEW
@given(text=TEXTS, cuts=CUTS, stop=STOPS, places=st.lists(st.integers(0, 12), max_size=3))
def test_a_text_that_shows_special_tokens_ends_where_the_other_does(
    kind: str, text: str, cuts: list[int], stop: list[str], places: list[int]
) -> None:
    tokenizer, ids = tokenizer_of_kind(kind), tokenizer_of_kind(kind).encode(text)
    names = ("<|im_end|>", "<s>")
    for number, place in enumerate(places):
        ids.insert(min(place, len(ids)), tokenizer.get_vocab()[names[number % 2]])

    def answer(*, show: bool, stop: Sequence[str] = stop) -> tuple[str, str | None]:
        answer = tokenizer.answer((), stop, show_special=show)
        return "".join(map(answer.push, in_cuts(ids, cuts))) + answer.finish(), answer.matched

    def hidden(shown: str) -> str:
        return shown.replace(names[0], "").replace(names[1], "")

    (said, matched), (whole, _) = answer(show=True), answer(show=True, stop=())
    assert (hidden(said), matched) == answer(show=False)
    # What follows is the stop string; special tokens inside of it are passed over, and those before it are text.
    rest = whole.removeprefix(said)
    assert said + rest == whole
    if matched is None:
        assert rest == ""
    else:
        assert rest.startswith(matched) or (hidden(rest).startswith(matched) and not rest.startswith(names))


def test_shown_special_tokens_are_where_the_library_has_them() -> None:
    tokenizer = tokenizer_of_kind("byte-level")
    for text in ("<|im_end|>hello world<|im_end|>\n<s>", "<s><s>", "na\u00efve<|im_end|> x"):
        ids = tokenizer.encode(text)
        answer = tokenizer.answer((), ["<|im_start|>", "never"], show_special=True)
        assert "".join(answer.push([token]) for token in ids) + answer.finish() == text
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text


@kinds
@pytest.mark.parametrize("stop", ["<|im_end|>", "world<|im_end|>", "<|im_end|>hello"])
def test_a_stop_string_with_a_special_token_matches_the_token(kind: str, stop: str) -> None:
    tokenizer = tokenizer_of_kind(kind)
    special = tokenizer.get_vocab()["<|im_end|>"]
    ids = [*tokenizer.encode("hello world"), special, *tokenizer.encode("hello again")]
    answer = tokenizer.answer((), [stop])
    text = "".join(answer.push([token]) for token in ids) + answer.finish()
    if stop.endswith("hello") and kind != "byte-level":
        # Its words have their space before them, also behind a special token.
        assert answer.matched is None
        return
    assert answer.matched == stop
    assert text == ("hello " if stop.startswith("world") else "hello world")


@kinds
@FEW
@given(
    parts=st.lists(
        st.sampled_from([*SPECIAL, *CONTROL, "hello", " ", "\n", "<", "|>", "<|", "im_end|>", "é"]), max_size=6
    )
)
def test_no_special_token_comes_from_a_content(kind: str, parts: list[str]) -> None:
    tokenizer, content = tokenizer_of_kind(kind), "".join(parts)
    ids = encoder_of_kind(kind).chat([{"role": "user", "content": content}])
    vocabulary = tokenizer.get_vocab()
    control = {vocabulary[text]: text for text in (*SPECIAL, *CONTROL)}
    assert [control[token] for token in ids if token in control] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    unknown = [vocabulary.get(name) for name in ("<unk>", "[UNK]")]
    if kind in ("byte-level", "sentencepiece") and not set(unknown) & set(ids):
        assert content in tokenizer.decode(ids).replace("  ", " ") or content.replace(" ", "") in (
            tokenizer.decode(ids).replace(" ", "")
        )


@kinds
@FEW
@given(content=TEXTS.filter(lambda text: "im_end" not in text))
def test_harmless_contents_are_encoded_as_the_library_does(kind: str, content: str) -> None:
    tokenizer = tokenizer_of_kind(kind)
    whole = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert encoder_of_kind(kind).chat([{"role": "user", "content": content}]) == (
        tokenizer.backend.encode(whole, add_special_tokens=False).ids
    )


@kinds
def test_every_kind_is_decoded_by_a_table(kind: str) -> None:
    assert isinstance(tokenizer_of_kind(kind).detokenizer(), TableDetokenizer)


FRONT = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]


def decoding_by(decoder: Any, added: str = "") -> ModelTokenizer:
    """Byte-level tokens that are decoded otherwise."""
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    if added:
        tokenizer.add_tokens([AddedToken(added)])
    return ModelTokenizer(tokenizer)


@FEW
@given(ids=st.lists(st.integers(0, 400), max_size=20), cuts=CUTS)
def test_decoders_that_find_nothing_are_passed_over(ids: list[int], cuts: list[int]) -> None:
    """As in a vocabulary that was converted from GGUF."""
    tokenizer = _converted()
    assert isinstance(tokenizer.detokenizer(), TableDetokenizer)
    assert streamed(tokenizer, (), ids, cuts) == tokenizer.decode(ids)


@cache
def _converted() -> ModelTokenizer:
    state = byte_level()
    state.decoder = decoders.Sequence([*FRONT, decoders.ByteLevel()])
    # Its added tokens are found by no decoder.
    return ModelTokenizer(state)


@pytest.mark.parametrize(
    ("decoder", "added"),
    [
        (decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]), ""),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteLevel()]), ""),
        (decoders.BPEDecoder(), ""),
        (decoders.CTC(), ""),
        (decoders.Sequence([*FRONT, decoders.ByteLevel()]), "<0x41>"),
        (decoders.Sequence([*FRONT, decoders.ByteLevel()]), "na▁ve"),
    ],
    ids=["replaces", "strips", "suffixes", "ctc", "byte token", "mark"],
)
def test_tokens_that_need_neighbours_are_decoded_with_them(decoder: Any, added: str) -> None:
    tokenizer = decoding_by(decoder, added)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    ids = tokenizer.encode("The capital of France")
    assert streamed(tokenizer, (), ids, [1]) == tokenizer.decode(ids)


@FEW
@given(
    words=st.lists(st.sampled_from(["aa</w>", "b", "c</w>"]), max_size=8),
    cuts=CUTS,
    border=st.integers(0, 8),
)
def test_suffixed_words_are_joined_across_the_border(words: list[str], cuts: list[int], border: int) -> None:
    tokenizer = _suffixed()
    ids = [tokenizer.get_vocab()[word] for word in words]
    said = streamed(tokenizer, ids[:border], ids[border:], cuts)
    assert tokenizer.decode(ids[:border]) + said == tokenizer.decode(ids)


@cache
def _suffixed() -> ModelTokenizer:
    from tokenizers import models

    tokenizer = Tokenizer(models.WordLevel({"aa</w>": 0, "b": 1, "c</w>": 2, "?": 3}, unk_token="?"))
    tokenizer.decoder = decoders.BPEDecoder()
    return ModelTokenizer(tokenizer)
