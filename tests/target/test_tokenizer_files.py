"""What a model folder's files say of its tokenizer, whatever transformers would make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import CHAT_TEMPLATE, KINDS, byte_level, sentence_piece
from tokenizers import AddedToken, Tokenizer

from outrider.checkpoints.tokenizer_files import TokenizerRefused
from outrider.heads import tokenizer_fingerprint
from target_service.text.loading import load_tokenizer
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

TEXT = "The capital of France is Paris, and  a banana\n is yellow. <|im_end|> é"
CLASSES = (
    "LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizerFast", "T5TokenizerFast", "GPT2TokenizerFast",
    "Qwen2Tokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "NoSuchTokenizer",
)  # fmt: skip


def folder_of(path: Path, tokenizer: Tokenizer, settings: dict[str, Any] | None = None, **config: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_and_not_the_name_of_a_class(kind: str, name: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    found = load_tokenizer(folder_of(tmp_path, made, {"tokenizer_class": name}))
    assert found.encode(TEXT, begin=True) == made.encode(TEXT).ids
    ids = found.encode(TEXT)
    answer = found.answer()
    assert answer.push(ids) + answer.finish() == made.decode(ids)
    assert tokenizer_fingerprint(found) == tokenizer_fingerprint(made)


def test_a_folder_without_settings(tmp_path: Path) -> None:
    made = byte_level()
    found = load_tokenizer(folder_of(tmp_path, made))
    assert found.encode(TEXT) == made.encode(TEXT).ids
    assert found.chat_template == "" and found.special_tokens == {}


def test_a_file_that_cuts_and_pads_does_neither(tmp_path: Path) -> None:
    made = byte_level()
    whole = made.encode(TEXT).ids
    made.enable_truncation(4)
    made.enable_padding(length=64)
    assert load_tokenizer(folder_of(tmp_path, made)).encode(TEXT, begin=True) == whole


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_beginnings_and_ends_that_the_settings_ask_for(
    kind: Any, bos: bool | None, eos: bool | None, tmp_path: Path
) -> None:
    made = kind()
    start, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    plain, own = made.encode("hello", add_special_tokens=False).ids, made.encode("hello").ids
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": bos, "add_eos_token": eos}
    found = load_tokenizer(folder_of(tmp_path, made, settings)).encode("hello", begin=True)
    begins = own[0] == start if bos is None else bos
    assert found == [*([start] if begins else []), *plain, *([end] if eos else [])]


def test_settings_without_an_effect_on_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = byte_level()
    settings = {"clean_up_tokenization_spaces": True, "add_prefix_space": True}
    found = load_tokenizer(folder_of(tmp_path, made, settings))
    ids = made.encode("do not , he 's").ids
    assert found.encode("do not , he 's", begin=True) == ids
    assert found.answer().push(ids) == "do not , he 's"
    assert "add_prefix_space" in caplog.text


def test_tokens_that_only_the_settings_have(tmp_path: Path) -> None:
    made = byte_level()
    number = made.get_vocab_size()
    entry = {"content": "<|new|>", "special": True, "lstrip": False, "rstrip": True, "normalized": False}
    found = load_tokenizer(folder_of(tmp_path, made, {"added_tokens_decoder": {str(number): entry}}))
    assert found.encode("<|new|>  hello") == [number, *made.encode("hello").ids]
    assert number in found.special_ids


def test_tokens_with_a_number_of_their_own_are_refused(tmp_path: Path) -> None:
    entry = {"content": "<|new|>", "special": True}
    with pytest.raises(TokenizerRefused, match=r"gives the token '<\|new\|>' the id 7"):
        load_tokenizer(folder_of(tmp_path, byte_level(), {"added_tokens_decoder": {"7": entry}}))


def test_spaces_around_added_tokens_are_as_the_file_has_them(tmp_path: Path) -> None:
    made = byte_level()
    made.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True)])
    found = load_tokenizer(folder_of(tmp_path, made, {"tokenizer_class": "LlamaTokenizer"}))
    text = "hello <left> world <right> again"
    assert found.encode(text) == made.encode(text).ids


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", CHAT_TEMPLATE),
        ("chat_template.json", json.dumps({"chat_template": CHAT_TEMPLATE})),
        ("tokenizer_config.json", json.dumps({"chat_template": CHAT_TEMPLATE})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "chatml", "template": CHAT_TEMPLATE}]})),
        ("tokenizer_config.json", json.dumps({"chat_template": {"default": CHAT_TEMPLATE, "rag": "x"}})),
        ("additional_chat_templates/chatml.jinja", CHAT_TEMPLATE),
        (
            "tokenizer_config.json",
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "x"},
                        {"name": "default", "template": CHAT_TEMPLATE},
                    ]
                }
            ),
        ),
    ],
)
def test_where_a_chat_template_may_stand(name: str, content: str, tmp_path: Path) -> None:
    folder_of(tmp_path, byte_level())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    found = load_tokenizer(tmp_path)
    assert PromptEncoder(found).chat([{"role": "user", "content": "hello"}]) == found.encode(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("place", ["list", "object", "folder"])
def test_a_template_of_its_own_for_tools(place: str, tmp_path: Path) -> None:
    with_tools = "  {% for t in tools %}{{ t.function.name }}{% endfor %}\n" + CHAT_TEMPLATE + "\n  "
    default = "\n  " + CHAT_TEMPLATE + "  \n"
    named = {"default": default, "tool_use": with_tools, "rag": "x"}
    folder_of(tmp_path, byte_level())
    if place == "folder":
        (tmp_path / "chat_template.jinja").write_text(default)
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    else:
        listed = [{"name": name, "template": text} for name, text in named.items()]
        settings = {"chat_template": named if place == "object" else listed}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = load_tokenizer(tmp_path)
    turns, tools = [{"role": "user", "content": "hello"}], [{"type": "function", "function": {"name": "add"}}]
    for own, given in ((default, ()), (with_tools, tools)):
        alone = ModelTokenizer(found.backend, chat_template=own)
        assert PromptEncoder(found).chat(turns, tools=given) == PromptEncoder(alone).chat(turns, tools=given)
    assert found.reads_tools


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder cannot be read"),
    ],
)
def test_broken_files_are_one_line(name: str, content: str, reason: str, tmp_path: Path) -> None:
    folder_of(tmp_path, byte_level(), {})
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerRefused, match=reason) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def older_files(folder: Path, made: Tokenizer, name: str, model_type: str) -> Path:
    """A folder of the time before tokenizer.json."""
    model = json.loads(made.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    return folder


def test_older_files_are_converted(tmp_path: Path) -> None:
    made = byte_level()
    found = load_tokenizer(older_files(tmp_path, made, "GPT2Tokenizer", "gpt2"))
    text = "The capital of France is Paris"
    assert found.encode(text) == made.encode(text).ids
    assert found.answer().push(found.encode(text)) == text


def test_older_files_of_another_kind_than_their_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerRefused, match=r"no tokenizer\.json, and as a "):
        load_tokenizer(older_files(tmp_path, byte_level(), "LlamaTokenizer", "llama"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TokenizerRefused, match=r"there is no tokenizer\.json"):
        load_tokenizer(tmp_path)
