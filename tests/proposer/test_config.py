"""Where the proposer's settings come from, and which are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.settings import SettingsError
from outrider_vllm import ProposerConfig


def test_vllms_own_configuration_goes_before_the_environment() -> None:
    environment = {"OUTRIDER_VLLM_DRAFT": "a:1", "OUTRIDER_VLLM_WAIT_MS": "7", "OUTRIDER_LOG": "x"}
    config = ProposerConfig.of({"outrider": {"draft": "b:2,c:3", "tenant": "docs"}, "other": 1}, environment)
    assert (config.draft, config.wait_seconds, config.tenant) == ("b:2,c:3", 0.007, "docs")


@pytest.mark.parametrize("nothing", [None, {}, object(), {"outrider": {}}])
def test_nothing_given_is_every_default(nothing: Any) -> None:
    assert ProposerConfig.of(nothing, {}) == ProposerConfig()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"drafts": "a:1"}, "no setting 'drafts'"),
        ("a:1", "not a mapping"),
        ({"draft": "http://a:1"}, "leave out http://"),
        ({"draft": "inprocess:trie"}, "no port"),
        ({"draft": "a:1,"}, "empty"),
        ({"draft": " a:1"}, "no host"),
        ({"wait_ms": -1}, "at least 0"),
        ({"wait_ms": "soon"}, "not a number"),
        ({"tenant": "a b"}, "tenant"),
        ({"tls_key": "key.pem"}, "go together"),
        ({"tls_key": "key.pem", "tls_certificate": "c.pem"}, "needs tls_ca"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        ProposerConfig.of({"outrider": given}, {})


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    options = ProposerConfig(token=str(tmp_path / "token")).link_options()
    assert options.metadata == (("authorization", "Bearer secret"),) and options.tls is None
    with pytest.raises(SettingsError, match="nowhere"):
        ProposerConfig(token=str(tmp_path / "nowhere")).link_options()


@pytest.mark.parametrize("content", [b"", b"  \n", b"one\ntwo", b"one two", "schl\u00fcssel".encode(), b"\xff"])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: bytes) -> None:
    """gRPC would refuse every call with it, and there would be no draft and no word of it."""
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(SettingsError, match="is not one token"):
        ProposerConfig(token=str(tmp_path / "token")).link_options()


def test_the_readme_has_every_setting_with_its_default() -> None:
    readme = (Path(__file__).parents[2] / "clients/outrider_vllm/README.md").read_text()
    rows = [line.split("|")[1:3] for line in readme.splitlines() if line.startswith("| `")]
    shown = {key: value.strip().strip("`") for keys, value in rows for key in re.findall("`([a-z_]+)`", keys)}
    for field in dataclasses.fields(ProposerConfig):
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        assert shown.pop(field.name) == default, field.name
    assert shown == {}
