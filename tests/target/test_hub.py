"""Models of a hub: fetched once and only what loading reads, refused in one line and before the weights come."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from fake_hub import COMMIT, FakeHub, fake_hub
from huggingface_hub import constants
from safetensors.torch import save

from draft_service.causal_lm.drafter import ModelConfig, ModelDrafter
from outrider import hub as hub_module
from outrider.distillation import TeacherSettings, load_teacher
from outrider.errors import NotSupported
from outrider.settings import SettingsError
from outrider.weights import Weights
from target_service.config import TargetConfig
from target_service.model.head_projection import read_draft_head
from target_service.model.loading import store
from target_service.model.loading.hub import HubId, HubUnreachable, PullFailed
from target_service.model.loading.loader import load_runner
from target_service.preflight import EngineRefused, check_head
from target_service.shared_engine import SharedEngine

NAME = "organisation/tiny"
CONFIG = make_tiny().config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
WEIGHTS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = json.dumps({"weight_map": {"a.weight": WEIGHTS[0], "b.weight": WEIGHTS[1]}}).encode()


def config(**settings: Any) -> bytes:
    return json.dumps(CONFIG | settings).encode()


FILES = {
    "config.json": config(),
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "model.safetensors.index.json": INDEX,
    WEIGHTS[0]: save({"a.weight": torch.zeros(250)}),
    WEIGHTS[1]: save({"b.weight": torch.zeros(125)}),
}
# What nobody reads here.
OTHERS = {
    "pytorch_model.bin": b"pickled",
    "modeling_tiny.py": b"code",
    "original/model.safetensors": b"twice",
    "consolidated.safetensors": b"twice",
    "README.md": b"words",
}


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> str:
    endpoint = f"http://127.0.0.1:{unused_tcp_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return endpoint


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub that takes every connection, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield endpoint


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "outrider"))
    with fake_hub(monkeypatch, tmp_path / "hub", NAME, FILES | OTHERS) as hub:
        yield hub


def test_a_hub_that_does_not_answer(no_hub: str) -> None:
    with pytest.raises(HubUnreachable, match="does not answer") as refused:
        load_runner(TargetConfig(model="nobody/nothing"))
    assert no_hub in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_teacher_of_a_hub_that_does_not_answer(no_hub: str) -> None:
    with pytest.raises(SettingsError, match="does not answer") as refused:
        load_teacher("local", TeacherSettings("nobody/nothing", "cpu", "float32"))
    assert no_hub in str(refused.value)


def test_a_hub_that_answers_never(no_hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_hub

    class Hanging:
        def head(self, *_: object, **__: object) -> None:
            threading.Event().wait()

    # As a name does that nobody resolves, or a host with many addresses.
    monkeypatch.setattr("huggingface_hub.get_session", Hanging)
    monkeypatch.setattr(hub_module, "_HUB_SECONDS", 0.1)
    with pytest.raises(HubUnreachable, match="does not answer"):
        store.pull(NAME)


@pytest.mark.parametrize("read", [Weights, lambda source: read_draft_head(source, 30, 576)], ids=["draft", "target"])
def test_a_head_of_a_hub_that_does_not_answer(no_hub: str, read: Callable[[str], object]) -> None:
    with pytest.raises((NotSupported, OSError), match="does not answer") as refused:
        read("nobody/no-head")
    assert no_hub in str(refused.value)


def test_a_draft_model_of_a_hub_that_takes_the_call_and_answers_never(
    silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_HUB_SECONDS", 0.5)
    with pytest.raises(NotSupported, match="does not answer") as refused:
        ModelDrafter(ModelConfig(draft_model="nobody/nothing"))
    assert silent_hub in str(refused.value)
    assert "\n" not in str(refused.value) and "nobody/nothing" in str(refused.value)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("nobody/no-head", "nobody/no-head: it is no folder, it was not fetched before, and http"),
        ("/absent/head", "/absent/head: no such folder"),
        ("no-such-head", "no-such-head: no such folder, no hub id, and no head that comes with Outrider"),
        ("a/b/c", "a/b/c: Repo id must be"),
    ],
    ids=["hub-id", "folder", "name", "no-hub-id"],
)
def test_a_head_that_is_not_there_is_refused_before_a_model_is_loaded(no_hub: str, head: str, said: str) -> None:
    assert no_hub
    # Nor is the model looked for, which is not there either.
    config = TargetConfig(model="/absent/model", draft_head=head)
    with pytest.raises(EngineRefused) as refused:
        asyncio.run(SharedEngine(config).load())
    assert refused.value.reason.startswith(f"error: --draft-head: {said}") and "\n" not in refused.value.reason
    assert refused.value.status == 2


def test_a_folder_without_a_configuration_is_no_head(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match=r"--draft-head: .*no config\.json"):
        check_head(str(tmp_path), "model")
    # It comes with the model, which is yet to be fetched.
    check_head("nobody/model@v1", "nobody/model@v1")
    check_head("", "model")


def test_a_head_is_fetched_before_a_model_is_loaded(
    hub: FakeHub, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineRefused, match=r"--draft-head: nobody/no-head is not at .*or it is private"):
        check_head("nobody/no-head", "model")
    check_head(NAME, "model")
    assert hub.fetched[WEIGHTS[0]] == hub.fetched["config.json"] == 1
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused_tcp_port}")
    check_head(NAME, "model")


def test_a_pull_from_a_hub_that_does_not_answer_is_one_line(no_hub: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert store.main(["pull", "nobody/nothing"]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1) and no_hub in err and err.startswith("nobody/nothing: ")


@pytest.mark.parametrize("folder", ["/absent/model", "./absent"])
def test_a_folder_that_is_not_there(no_hub: str, folder: str) -> None:
    assert no_hub
    with pytest.raises(FileNotFoundError, match="no such folder"):
        store.resolve(folder)


def test_what_is_here_needs_no_hub(no_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_hub
    assert store.resolve(str(tmp_path)) == tmp_path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set"):
        store.resolve("nobody/nothing")


def test_only_what_loading_reads_is_fetched_and_once(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    folder = store.pull(NAME)
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == FILES
    capfd.readouterr()
    assert store.main(["pull", NAME]) == 0
    out, err = capfd.readouterr()
    assert Path(out.strip()) == folder and "LlamaForCausalLM" in err and "can be served" in err
    assert hub.fetched == dict.fromkeys(FILES, 1)


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_a_revision_is_found_again_without_a_hub(
    hub: FakeHub, revision: str, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.pull(f"{NAME}@{revision}")
    assert folder.name == COMMIT
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused_tcp_port}")
    assert store.resolve(f"{NAME}@{revision}") == store.pull(f"{NAME}@{revision}") == folder
    assert hub.fetched == dict.fromkeys(FILES, 1)


def test_a_pull_that_broke_off_is_gone_on_with(hub: FakeHub) -> None:
    hub.refused = {WEIGHTS[1]}
    with pytest.raises(PullFailed, match="pull it again"):
        store.pull(NAME)
    assert store.located(NAME) is None
    hub.refused = set()
    assert store.pull(NAME) == store.located(NAME)
    assert hub.fetched == dict.fromkeys(FILES, 1)


def test_what_does_not_fit_is_not_begun(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.said_sizes = dict(zip(WEIGHTS, (12 * 10**9, 4 * 10**9), strict=True))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 3 * 10**9))
    with pytest.raises(PullFailed, match=r"16\.0 GB more, and .* has 3\.0 GB free") as refused:
        store.pull(NAME)
    assert str(tmp_path / "hub") in str(refused.value) and "\n" not in str(refused.value)
    assert not hub.fetched


def test_what_is_here_already_needs_no_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.pull(NAME)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 1000, 0))
    assert store.pull(NAME) == folder
    hub.files = {**FILES, WEIGHTS[1]: b"c"}
    shutil.rmtree(folder)
    with pytest.raises(PullFailed, match="0 MB free"):
        store.pull(NAME)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights (gptq)"),
        ({"index_topk": 64}, "attention to a choice of tokens"),
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "custom code"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
    ],
    ids=["quantised", "sparse", "unknown", "own-code", "head"],
)
def test_what_cannot_be_served_is_refused_before_its_weights_come(
    hub: FakeHub, settings: dict[str, Any], reason: str
) -> None:
    hub.files = FILES | {"config.json": config(**settings)}
    with pytest.raises(PullFailed, match="cannot be served") as refused:
        store.pull(NAME)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert hub.fetched == {"config.json": 1}


def test_pickled_weights_are_not_fetched(hub: FakeHub) -> None:
    hub.files = {"config.json": config()} | OTHERS
    del hub.files["consolidated.safetensors"]
    with pytest.raises(PullFailed, match="no safetensors"):
        store.pull(NAME)
    assert not hub.fetched


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "is a LoRA adapter"),
        ({"config.json": config(), "model.Q4_K_M.gguf": b"x"}, "GGUF files are not read"),
    ],
    ids=["adapter", "gguf"],
)
def test_repositories_of_other_kinds_are_named(hub: FakeHub, files: dict[str, bytes], said: str) -> None:
    hub.files = files
    with pytest.raises(PullFailed, match=said) as refused:
        store.pull(NAME)
    assert "\n" not in str(refused.value) and not hub.fetched


def test_what_the_hub_refuses_is_said_in_a_line(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    for model, said in (("nobody/nothing", "HF_TOKEN"), (f"{NAME}@v2", "no revision v2"), ("a/b/c", "a/b/c")):
        assert store.main(["pull", model]) == 1
        err = capfd.readouterr().err
        assert said in err and err.count("\n") == 1
    hub.gated = True
    assert store.main(["pull", NAME]) == 1
    assert "accept its terms" in capfd.readouterr().err


def test_hub_ids() -> None:
    assert HubId.parse("a/b") == HubId("a/b") and str(HubId("a/b")) == "a/b"
    assert HubId.parse("a/b@v1") == HubId("a/b", "v1") and str(HubId("a/b", "v1")) == "a/b@v1"


def test_the_list_says_what_is_here_and_what_can_be_served(
    hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert store.main(["list"]) == 0
    out = capfd.readouterr().out
    assert "not pulled" in out and NAME not in out
    folder = store.pull(f"{NAME}@v1")
    capfd.readouterr()
    assert store.main(["list"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if NAME in line)
    assert line.split() == [f"{NAME}@v1", "0", "MB", "LlamaForCausalLM", "can", "be", "served"]
    (folder / WEIGHTS[1]).unlink()
    (tmp_path / "hub" / "datasets--a--b").mkdir()
    assert store.main(["list"]) == 0
    assert "cannot be served: 1 of 2 files of weights are missing" in capfd.readouterr().out
    assert hub.fetched


def test_a_folder_is_not_fetched_and_is_told_of(no_hub: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert no_hub
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    said = []
    for settings in ({}, {"index_topk": 64}):
        (tmp_path / "config.json").write_bytes(config(**settings))
        assert store.main(["pull", str(tmp_path)]) == 0
        out, err = capfd.readouterr()
        assert Path(out.strip()) == tmp_path and "is a folder" in err
        said.append(err)
    assert "can be served" in said[0] and "attention to a choice of tokens" in said[1]


def test_an_interrupted_pull_says_that_it_can_go_on(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.snapshot_download", interrupted)
    assert store.main(["pull", NAME]) == 130
    assert "goes on from there" in capfd.readouterr().err
    assert hub.fetched == {"config.json": 1}
