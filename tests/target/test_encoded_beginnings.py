"""Conversations whose beginning was encoded before: ids of the whole text, and only what is new is encoded."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import CHAT_TEMPLATE, CONTROL, CORPUS, KINDS, SPECIAL, byte_level
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from target_service.text import encoded_beginnings
from target_service.text.encoded_beginnings import EncodedBeginnings, cutting_tokens
from target_service.text.jobs import EncodeChat
from target_service.text.processes import TextProcess
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

START, END = "<|im_start|>", "<|im_end|>"
PIECES = st.sampled_from([*SPECIAL, *CONTROL, *CORPUS[0].split(" "), " ", "  ", "\n", "é", "<", "<|im_", "|>", "日本"])


def first_space() -> Tokenizer:
    """A tokenizer that puts a space before the text alone, and not behind its special tokens."""
    tokenizer = KINDS["unigram"]()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


@cache
def tokenizer_of(kind: str) -> ModelTokenizer:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = first_space() if kind == "first" else KINDS[kind]()
    return ModelTokenizer(made, chat_template=CHAT_TEMPLATE, special_tokens=names)


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_beginnings, "_SHORT", 0)


class Noted:
    """Beginnings over a tokenizer, and the texts that it encodes."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()
        self.beginnings = EncodedBeginnings(self._encode, cutting_tokens(tokenizer.backend, (START, END)))

    def _encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return self._tokenizer.encode(text)

    def new(self, text: str, owner: str = "a") -> str:
        """What it encodes of a text, whose ids are right."""
        self.texts.clear()
        assert self.beginnings.encode(text, owner) == self._tokenizer.encode(text)
        return "".join(self.texts)


@pytest.mark.parametrize("kind", [*KINDS, "first"])
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=1, max_size=6), back=st.integers(0, 40))
def test_ids_are_those_of_the_whole_text(kind: str, turns: list[str], back: int) -> None:
    """Whatever stands around the marks, and where a conversation parts from an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoded_beginnings, "_SHORT", 0)
        noted, text = Noted(tokenizer_of(kind)), ""
        for turn in turns:
            text = text[: len(text) - back] + turn
            noted.new(text)


@pytest.mark.usefixtures("any_length")
def test_of_a_next_turn_what_follows_the_last_mark_is_encoded() -> None:
    noted = Noted(tokenizer_of("byte-level"))
    asked = f"{START}user\nhello{END}\n{START}assistant\n"
    assert noted.new(asked) == asked
    further = f"world{END}\n{START}user\nagain{END}\n{START}assistant\n"
    assert noted.new(asked + further) == f"{START}assistant\n" + further
    # The same once more, another answer, and somebody else's.
    assert noted.new(asked + further) == f"{START}assistant\n"
    assert noted.new(f"{asked}no{END}\n{START}user\n") == f"{START}assistant\nno{END}\n{START}user\n"
    assert noted.new(asked + further, "b") == asked + further


def test_short_texts_are_encoded_as_they_are() -> None:
    noted = Noted(tokenizer_of("byte-level"))
    text = f"{START}user\nhello{END}\n{START}assistant\n"
    assert noted.new(text) == noted.new(text) == text


@pytest.mark.usefixtures("any_length")
def test_what_was_used_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(tokenizer_of("byte-level"))
    texts = [f"{name * 40}{START}assistant\n" for name in "abc"]
    monkeypatch.setattr(encoded_beginnings, "_MOST_CHARACTERS", 80)
    for text in texts[:2]:
        noted.new(text)
    assert noted.new(texts[0]) == f"{START}assistant\n"
    noted.new(texts[2])
    assert noted.new(texts[1]) == texts[1] and noted.new(texts[2]) == f"{START}assistant\n"


@pytest.mark.usefixtures("any_length")
def test_a_part_that_cannot_be_encoded() -> None:
    def encode(text: str) -> list[int] | None:
        return None if "no" in text else [len(text)]

    beginnings = EncodedBeginnings(encode, (START,))
    assert beginnings.encode(f"yes{START}yes", "a") == [3, 15]
    assert beginnings.encode(f"no{START}yes", "a") is None and beginnings.encode(f"yes{START}no", "a") is None
    assert beginnings.encode(f"yes{START}well", "a") == [3, 16]


@pytest.mark.parametrize(
    ("token", "cut"),
    [
        (AddedToken("[OTHER]", normalized=False), (START, END)),
        # It may begin before a mark, and end in it.
        (AddedToken("x<|im", normalized=False), ()),
        (AddedToken("\n<|im_end|>", normalized=False), (START,)),
        # It is found in place of a mark, and takes the space before it.
        (AddedToken("<|im_end|>\n", normalized=False, lstrip=True), (START,)),
        (AddedToken("<|im_start|>user", normalized=False, single_word=True), (END,)),
        (AddedToken("<|im_start|>user", normalized=False), (START, END)),
    ],
)
def test_marks_at_which_a_tokenizer_always_cuts(token: AddedToken, cut: tuple[str, ...]) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([token])
    assert cutting_tokens(tokenizer, (START, END, "hello")) == list(cut)


@pytest.mark.parametrize(
    "mark",
    [
        AddedToken("<|x|>", normalized=True),
        AddedToken("<|x|>", normalized=False, lstrip=True),
        AddedToken("<|x|>", normalized=False, single_word=True),
        AddedToken("word", normalized=False),
        AddedToken(" <|x|>", normalized=False),
        AddedToken("<<", normalized=False),
    ],
)
def test_marks_that_depend_on_what_is_before_them(mark: AddedToken) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([mark])
    assert cutting_tokens(tokenizer, (mark.content,)) == []


def test_a_text_process_encodes_conversations_as_a_new_one_does() -> None:
    tokenizer = tokenizer_of("byte-level")
    process, turns = TextProcess(tokenizer), list[dict[str, str]]()
    try:
        for number in range(4):
            turns.append({"role": "user", "content": f"{number} {CORPUS[number]} " * 30})
            job = EncodeChat(turns, owner="a")
            assert process.encode(job) == PromptEncoder(tokenizer).chat(turns) == process.encode(job)
            turns.append({"role": "assistant", "content": CORPUS[-number] * 20})
    finally:
        process.close()
