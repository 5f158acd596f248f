"""A draft for another tokenizer than vLLM's model has, as it is known by its files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizer_kinds import byte_level, sentence_piece
from vllm_runner import vllm_config

from outrider.heads import tokenizer_fingerprint
from outrider_vllm import Proposer, proposer
from outrider_vllm.vocabulary import model_fingerprint


def test_a_folder_is_known_as_a_target_knows_it(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    more = {tokenizer.get_vocab_size(): {"content": "<|more|>", "special": True}}
    plain = model_fingerprint(SimpleNamespace(tokenizer=str(tmp_path)))
    assert plain == tokenizer_fingerprint(tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": more}))
    assert model_fingerprint(SimpleNamespace(tokenizer=str(tmp_path))) != plain


@pytest.mark.parametrize("tokenizer", [None, "", "org/absent", "no name of a hub\n"])
def test_what_is_not_on_this_machine_refuses_nothing(tokenizer: str | None) -> None:
    assert model_fingerprint(SimpleNamespace(tokenizer=tokenizer)) == ""


def test_what_cannot_be_read_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert model_fingerprint(SimpleNamespace(tokenizer=str(tmp_path))) == ""
    assert "is not checked" in caplog.text


def test_the_draft_is_met_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a draft of the same size and another tokenizer is refused: none of its tokens would be kept."""
    tokenizer = sentence_piece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    met = list[str]()

    def connect(_address: str, _events: object, _size: int, fingerprint: str, _options: object) -> SimpleNamespace:
        met.append(fingerprint)
        return SimpleNamespace(stop=lambda: None, close=lambda _: None)

    monkeypatch.setattr(proposer, "connect_draft", connect)
    config = vllm_config(draft="127.0.0.1:1")
    config.model_config.tokenizer = str(tmp_path)
    Proposer(config).close()
    assert met == [tokenizer_fingerprint(tokenizer)]
