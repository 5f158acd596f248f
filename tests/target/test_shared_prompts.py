"""The file of what prompts of all tenants may begin with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizer_kinds import CHAT_TEMPLATE, byte_level

from outrider.settings import SettingsError
from target_service.shared_prompts import encoded_beginning, read_shared_prompts
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("question", ["a", "one\n\n", " b", "ünd", "1"])
def test_prompts_begin_with_what_the_file_lists(question: str, tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    path.write_text(f"{json.dumps({'messages': [SYSTEM]})}\n\n{json.dumps({'text': 'Once upon a time'})}\n")
    encoder = PromptEncoder(ModelTokenizer(byte_level(), chat_template=CHAT_TEMPLATE))
    chat, text = (encoded_beginning(encoder, prompt) for prompt in read_shared_prompts(str(path)))
    asked = encoder.chat([SYSTEM, {"role": "user", "content": question}])
    assert len(chat) > len(SYSTEM["content"]) and asked[: len(chat)] == chat
    told = encoder.text(f"Once upon a time, {question}")
    assert len(text) > 5 and told[: len(text)] == text


def test_no_file_lists_nothing() -> None:
    assert read_shared_prompts("") == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "one of messages and text"),
        ('{"text": "a", "messages": [{"role": "user", "content": "a"}]}', "one of messages and text"),
        ('{"messages": [{"role": "system"}]}', "a role and a content"),
        ('{"messages": [{"role": "system", "content": 5}]}', "a role and a content"),
        ('{"prompt": "a"}', "unknown field `prompt`"),
        ('{"text": "\udcff"}', "utf-8"),
    ],
)
def test_a_wrong_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(SettingsError, match=rf"shared\.jsonl:2: .*{reason}"):
        read_shared_prompts(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_shared_prompts(str(tmp_path / "none"))
