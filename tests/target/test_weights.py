"""Weights that are exchanged while an engine runs: what it says is what fresh engines of either weights say."""

from __future__ import annotations

import copy
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from engine_harness import ScriptedDraft, plain, request
from once import once
from other_weights import other_weights
from running_engine import Running
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from outrider.checkpoints import tensors
from outrider.errors import EngineDead, InvalidField, OutriderError, QuotaExceeded, WeightsChanged
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.weight_updates import RunningRequests
from outrider.wire.frames import OpenSequence
from target_service.core.sequence import SequenceFailed, SequenceFinished
from target_service.model.runner import ModelRunner
from target_service.model.weights.host_memory import HostMemory
from tree_models.layers.decoder import Decoder

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def old() -> PreTrainedModel:
    return make_tiny()


@pytest.fixture(scope="module")
def new(old: PreTrainedModel) -> PreTrainedModel:
    return other_weights(old)


@pytest.fixture(scope="module")
def folder(new: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("new")
    # In pieces, as large models come.
    new.save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


class Drafted(Running):
    """With a draft that says the same chain always, and what was opened at it."""

    def __init__(self, model: PreTrainedModel, **changes: Any) -> None:
        opened: list[OpenSequence] = []

        class Noting(ScriptedDraft):
            def open(self, sequence: OpenSequence) -> None:
                opened.append(sequence)
                super().open(sequence)

        def chain(tokens: Any, _random: Any) -> TokenTree:
            return TokenTree((tokens[-1], 9, 10), (0, 0, 1), (1.0, 0.5, 0.5))

        self.opened = opened
        super().__init__(model, connect=lambda events: Noting(events, chain), **changes)


Start = Callable[..., Running]


@pytest.fixture
def start(old: PreTrainedModel) -> Iterator[Start]:
    engines: list[Running] = []

    def make(model: PreTrainedModel | None = None, *, draft: bool = False, **changes: Any) -> Running:
        running = (Drafted if draft else Running)(model or old, **changes)
        engines.append(running)
        return running

    yield make
    for running in engines:
        idle = running.engine._thread.is_alive() and not running.engine.snapshot().sequences
        running.engine.stop()
        assert not idle or running.runner.cache.used_pages == 0


@once
def expected(model: PreTrainedModel, prompt: list[int], tokens: int, **sampling: Any) -> list[int]:
    wanted = request(prompt, tokens, sampling=SamplingParams(ignore_eos=True, **sampling))
    return list(plain(copy.deepcopy(model), wanted))


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "sampled"])
def test_before_and_after_are_those_of_fresh_engines(
    start: Start, old: PreTrainedModel, new: PreTrainedModel, folder: Path, draft: bool, sampling: dict[str, Any]
) -> None:
    running = start(draft=draft)
    asked = request(PROMPT, 20, sampling=SamplingParams(ignore_eos=True, **sampling))
    before = running.engine.submit(asked)
    running.wait_last(before)
    running.update(folder)
    done = running.result()
    assert (done.model_version, done.aborted, done.continued) == (2, 0, 0)
    assert done.bytes == sum(parameter.nbytes for parameter in new.parameters())
    after = running.engine.submit(asked)
    running.wait_last(after)
    assert running.said(before) == expected(old, PROMPT, 20, **sampling)
    assert running.said(after) == expected(new, PROMPT, 20, **sampling)
    assert running.said(before) != running.said(after)
    assert {verdict.model_version for verdict in running.verdicts(before)} == {1}
    assert {verdict.model_version for verdict in running.verdicts(after)} == {2}
    snapshot = running.engine.snapshot()
    assert (snapshot.model_version, snapshot.exchange_ns) == (2, round(done.pause * 1e9))
    assert done.pause > 0


def test_draining_lets_what_has_begun_end_and_holds_the_others(
    start: Start, old: PreTrainedModel, new: PreTrainedModel, folder: Path
) -> None:
    running = start(max_running=2)
    begun = [running.engine.submit(request([5 + i, 6], 150)) for i in range(2)]
    for sequence_id in begun:
        running.wait_said(sequence_id, 1)
    waits = [running.engine.submit(request([50, 60], 10)) for _ in range(2)]
    running.update(folder)
    later = running.engine.submit(request([70], 10))
    assert running.result().model_version == 2
    for i, sequence_id in enumerate(begun):
        assert isinstance(running.wait_last(sequence_id), SequenceFinished)
        assert running.said(sequence_id) == expected(old, [5 + i, 6], 150)
    for sequence_id, prompt in ((waits[0], [50, 60]), (waits[1], [50, 60]), (later, [70])):
        running.wait_last(sequence_id)
        assert running.said(sequence_id) == expected(new, prompt, 10)
        assert {verdict.model_version for verdict in running.verdicts(sequence_id)} == {2}


def test_aborting_ends_what_has_begun_with_an_error_to_ask_again(
    start: Start, new: PreTrainedModel, folder: Path
) -> None:
    running = start(max_running=1)
    begun = running.engine.submit(request([5, 6], 480))
    running.wait_said(begun, 1)
    waits = running.engine.submit(request([50, 60], 10))
    running.update(folder, RunningRequests.ABORT)
    done = running.result()
    assert (done.aborted, done.continued) == (1, 0)
    last = running.wait_last(begun)
    assert isinstance(last, SequenceFailed) and isinstance(last.error, WeightsChanged)
    assert last.error.retry_after is not None
    running.wait_last(waits)
    assert running.said(waits) == expected(new, [50, 60], 10)


def test_continuing_goes_on_with_the_new_weights_and_none_of_the_old_keys(
    start: Start, old: PreTrainedModel, new: PreTrainedModel, folder: Path
) -> None:
    running = start(draft=True)
    begun = [running.engine.submit(request([5 + i, 6, 9], 200)) for i in range(3)]
    for sequence_id in begun:
        running.wait_said(sequence_id, 3)
    running.update(folder, RunningRequests.CONTINUE)
    assert running.result().continued == 3
    for i, sequence_id in enumerate(begun):
        running.wait_last(sequence_id)
        verdicts = running.verdicts(sequence_id)
        first = [token for verdict in verdicts if verdict.model_version == 1 for token in verdict.token_ids]
        rest = [token for verdict in verdicts if verdict.model_version == 2 for token in verdict.token_ids]
        assert len(first) + len(rest) == 200 and rest
        assert first == expected(old, [5 + i, 6, 9], len(first))
        # A fresh engine of the new weights, which reads all that was said: with old keys it would say something else.
        assert rest == expected(new, [5 + i, 6, 9, *first], len(rest))


def test_the_draft_opens_every_sequence_anew_under_the_new_version(start: Start, folder: Path) -> None:
    running = start(draft=True)
    begun = running.engine.submit(request(PROMPT, 200))
    running.wait_said(begun, 3)
    running.update(folder, RunningRequests.CONTINUE)
    running.result()
    running.wait_last(begun)
    first, again = running.opened
    assert (first.sequence_id, first.model_version, first.step) == (begun, 1, 0)
    assert (again.sequence_id, again.model_version) == (begun, 2)
    assert again.step > 0 and len(again.token_ids) > len(PROMPT)


@pytest.mark.parametrize("running_requests", list(RunningRequests))
def test_a_client_that_drafts(start: Start, new: PreTrainedModel, folder: Path, running_requests: Any) -> None:
    running = start()
    sequence_id = running.engine.submit(request([5, 6], 20, external=True))
    running.engine.verify(sequence_id, TokenTree.root_only(6))
    running.wait_said(sequence_id, 1)
    running.update(folder, running_requests)
    if running_requests is RunningRequests.ABORT:
        assert isinstance(running.wait_last(sequence_id), SequenceFailed)
        return
    if running_requests is RunningRequests.DRAIN:
        # It runs until its client closes it.
        time.sleep(0.2)
        assert running.results.empty()
        running.engine.cancel(sequence_id)
        running.result()
        return
    running.result()
    said = running.said(sequence_id)
    running.engine.verify(sequence_id, TokenTree.root_only(said[-1]))
    running.wait_said(sequence_id, len(said) + 1)
    assert running.said(sequence_id)[-1:] == expected(new, [5, 6, *said], 1)


def test_an_update_that_is_given_up_changes_nothing(start: Start, old: PreTrainedModel, folder: Path) -> None:
    running = start()
    held = running.engine.submit(request([5, 6], 5, external=True))
    running.engine.verify(held, TokenTree.root_only(6))
    running.wait_said(held, 1)
    update_id = running.update(folder)
    with pytest.raises(QuotaExceeded):
        running.update(folder)
    # Until the weights are read requests begin as ever.
    deadline = time.monotonic() + HUNG_SECONDS
    while True:
        waits = running.engine.submit(request(PROMPT, 10))
        time.sleep(0.5)
        if not running.said(waits):
            break
        running.wait_last(waits)
        assert time.monotonic() < deadline, "no request was held back"
    running.engine.cancel_update(update_id)
    running.wait_last(waits)
    assert running.said(waits) == expected(old, PROMPT, 10)
    assert running.engine.snapshot().model_version == 1
    assert running.results.empty()
    running.engine.cancel(held)
    # The next one is taken.
    running.update(folder)
    assert running.result().model_version == 2


def test_the_engines_end_is_heard_by_who_waits(start: Start, folder: Path) -> None:
    running = start()
    held = running.engine.submit(request([5, 6], 5, external=True))
    running.engine.verify(held, TokenTree.root_only(6))
    running.wait_said(held, 1)
    running.update(folder)
    time.sleep(0.2)
    running.engine.stop()
    assert running.refused().reason == "DRAINING"
    with pytest.raises(OutriderError):
        running.update(folder)


def test_a_write_that_fails_ends_the_engine(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of both kinds are those of no model."""
    running = start()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("target_service.model.weights.update.write_weights", broken)
    running.update(folder)
    assert isinstance(running.refused(), EngineDead)
    assert running.engine.failure is not None


class CountedLocks:
    """Host memory as for a GPU, with locks that are only counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: set[int] = set()
        self.ever = 0
        self.before_lock: Callable[[], object] = lambda: None
        monkeypatch.setattr("target_service.model.weights.host_memory._page_lock", self._lock)
        monkeypatch.setattr("target_service.model.weights.host_memory._page_unlock", self._unlock)
        monkeypatch.setattr(
            "target_service.model.weights.update.HostMemory", lambda _: HostMemory(torch.device("cuda"))
        )

    def wait_empty(self) -> None:
        deadline = time.monotonic() + HUNG_SECONDS
        while self.locked:
            assert time.monotonic() < deadline, "memory was not given back"
            time.sleep(0.01)

    def _lock(self, _device: torch.device, address: int, _size: int) -> None:
        self.before_lock()
        self.locked.add(address)
        self.ever += 1

    def _unlock(self, _device: torch.device, address: int) -> None:
        self.locked.remove(address)


@pytest.mark.parametrize("way", ["done", "given up", "stopped", "stopped while reading"])
def test_locked_memory_is_given_back_however_an_update_ends(
    start: Start, new: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    locks, running = CountedLocks(monkeypatch), start()
    if way == "done":
        for version in (2, 3):
            running.update(folder)
            assert running.result().model_version == version
            locks.wait_empty()
        after = running.engine.submit(request(PROMPT, 10))
        running.wait_last(after)
        assert running.said(after) == expected(new, PROMPT, 10)
        assert locks.ever == 2
        return
    reading, go_on = threading.Event(), threading.Event()
    locks.before_lock = lambda: (reading.set(), go_on.wait(HUNG_SECONDS))
    held = running.engine.submit(request([5, 6], 5, external=True))
    running.engine.verify(held, TokenTree.root_only(6))
    running.wait_said(held, 1)
    update_id = running.update(folder)
    assert reading.wait(HUNG_SECONDS)
    if way == "stopped while reading":
        running.engine.stop()
        go_on.set()
    else:
        go_on.set()
        running.engine.cancel_update(update_id) if way == "given up" else running.engine.stop()
    running.engine.cancel(held)
    deadline = time.monotonic() + HUNG_SECONDS
    while not locks.ever:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    locks.wait_empty()
    assert running.engine.snapshot().model_version == 1


def damaged(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    to.mkdir(exist_ok=True)
    save_file(tensors, to / "model.safetensors")
    return to


def state_of(runner: ModelRunner) -> dict[str, torch.Tensor]:
    network = runner.network
    assert isinstance(network, Decoder)
    return dict(network.named_parameters())


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(Q), f"{Q} missing"),
    "unknown": (lambda tensors: tensors.update({"swordfish": torch.zeros(2)}), "the model has no swordfish"),
    "shape": (lambda tensors: tensors.update({Q: tensors[Q][:-1].clone()}), "is [47, 48], expected [48, 48]"),
    "turned": (lambda tensors: tensors.update({Q: tensors[Q].reshape(24, 96).clone()}), "is [24, 96]"),
    "integers": (lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}), "is I8"),
    "doubles": (lambda tensors: tensors.update({Q: tensors[Q].double()}), "is F64"),
    "nan": (lambda tensors: tensors[Q].view(-1)[7:8].fill_(float("nan")), "not finite"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_weights_that_do_not_fit_touch_nothing(
    start: Start, old: PreTrainedModel, folder: Path, tmp_path: Path, name: str
) -> None:
    change, said = DAMAGES[name]
    running = start()
    before = {key: tensor.clone() for key, tensor in state_of(running.runner).items()}
    sequence_id = running.engine.submit(request(PROMPT, 100))
    running.update(damaged(folder, tmp_path / "bad", change), RunningRequests.ABORT)
    refusal = running.refused()
    assert isinstance(refusal, InvalidField) and said in refusal.message
    assert isinstance(running.wait_last(sequence_id), SequenceFinished)
    assert running.said(sequence_id) == expected(old, PROMPT, 100)
    for key, tensor in state_of(running.runner).items():
        assert torch.equal(tensor, before[key])
    assert running.engine.snapshot().model_version == 1


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      "], ids=str)
def test_what_is_no_safetensors_file(start: Start, tmp_path: Path, content: bytes | None) -> None:
    running = start()
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    running.update(tmp_path)
    assert isinstance(running.refused(), InvalidField)
    # Neither is a pickle, whatever it is called.
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def test_a_fifo_is_refused_and_waits_for_nobody(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    running = start()
    running.update(tmp_path)
    refusal = running.refused()
    assert isinstance(refusal, InvalidField) and re.search(
        r"model\.safetensors is no regular file but a fifo", refusal.message
    )


def test_a_long_header_is_not_read(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 53_000_000))
        file.truncate(60_000_000)
    running = start()
    running.update(tmp_path)
    refusal = running.refused()
    assert isinstance(refusal, InvalidField) and re.search("a header of 53000000 bytes", refusal.message)


def test_a_file_that_is_cut_short_while_it_is_read(
    start: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, it would end the process by SIGBUS."""
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    read = tensors.read_into

    def cutting(descriptor: int, place: memoryview, offset: int, name: str) -> None:
        os.truncate(cut / name, 4096)
        read(descriptor, place, offset, name)

    monkeypatch.setattr(tensors, "read_into", cutting)
    running = start()
    running.update(cut)
    refusal = running.refused()
    assert isinstance(refusal, InvalidField) and re.search(
        "became shorter while it was read|changed while it was read", refusal.message
    )


def test_a_name_in_two_files(start: Start, folder: Path, tmp_path: Path) -> None:
    running = start()
    for file in (folder / "model.safetensors.index.json", *folder.glob("*.safetensors")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damaged(folder, tmp_path, lambda _: None)
    running.update(tmp_path)
    assert "is there twice" in running.refused().message
