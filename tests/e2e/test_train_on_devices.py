"""One head trained on two devices at once: a process each, on a CPU here."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from child_processes import living_children
from safetensors.torch import load_file
from teaching_model import save_teaching_model
from torch import Tensor
from waits import HUNG_SECONDS
from warm_python import shared_python, started_by, warm_executable

from draft_service.training import trainer as trainer_module
from draft_service.training.batches import BatchPlan, make_batch
from draft_service.training.building import new_eagle_head, new_head_config
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus
from draft_service.training.optimiser import MasterAdamW, rate_at
from draft_service.training.parallel.followers import FollowerFailed, followers
from draft_service.training.run import train_head
from draft_service.training.run_folder import RunFolder
from draft_service.training.trainer import Progress, step_losses
from draft_service.training.unrolling import unroll
from draft_service.training.validation import Validator, hold_out
from outrider.distillation import TeacherSettings, load_teacher

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "tokens": "1k",
    "max_length": 96,
    "max_prompt": 32,
    "batch_tokens": 256,
    "vocabulary": 200,
    "steps": 3,
    "learning_rate": 4e-3,
    "validation": 4,
    "sequences": 4,
}
COMMAND = ("outrider", "train-head")
FOLLOWER = "training.worker"
PYTHON = sys.executable
BOTH = "cpu,cpu"


@pytest.fixture(scope="module", autouse=True)
def started_in_a_moment() -> Iterator[None]:
    """What this process starts as `sys.executable` is forked; `PYTHON` starts as a user's does."""
    with warm_executable(shared_python("services")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teaching_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that wrote text on both devices, and took one step."""
    out = tmp_path_factory.mktemp("written")
    train_head(config_of(model, out, device=BOTH, epochs=0.01), COMMAND)
    return out / "head.run"


def config_of(model: Path, out: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(**(SMALL | {"model": str(model), "out": str(out / "head")} | settings))


def checkpoint_of(config: TrainingConfig) -> tuple[dict[str, Tensor], Progress]:
    found = RunFolder(replace(config, resume=True)).checkpoint()
    assert found is not None
    return found[0], Progress(**found[1])


def masters_of_one_device(config: TrainingConfig) -> tuple[dict[str, Tensor], int]:
    """By definition: every step takes the mean of the gradients of two batches. Also returns the steps."""
    teacher = load_teacher("local", TeacherSettings(config.model, "cpu", config.dtype))
    folder = RunFolder(replace(config, resume=True))
    tokens = folder.tokens()
    assert tokens is not None
    shape = new_head_config(config, teacher.facts, len(tokens))
    reader = teacher.reader(shape.layers_of(teacher.facts.num_layers))
    learnt, _ = hold_out(folder.corpus().load(), config.validation, len(config.temperature_list))
    plan = BatchPlan(learnt, config.batch_tokens, config.max_length, config.seed)
    masters = new_eagle_head(shape, tokens, reader.weights(), config.seed)
    head = copy.deepcopy(masters)
    optimiser = MasterAdamW(head, weight_decay=config.weight_decay, clip=config.clip, masters=masters)
    wanted = int(np.ceil(config.epochs * plan.per_epoch()))
    batches = [one for epoch in range(int(config.epochs) + 2) for one in plan.batches(epoch)]
    for first in range(0, wanted, 2):
        for padded, chosen in batches[first : first + 2]:
            batch = make_batch(learnt, chosen, padded, config.steps, size=config.batch_tokens // padded)
            lesson = reader.read(batch.token_ids, batch.distribution_rows, tokens)
            lm_input = unroll(head, lesson.states, batch.token_ids, config.steps)
            total = step_losses(lm_input, (head.lm_head.weight,), lesson.probs, batch, config.decay)[1]
            (total / 2).backward()  # type: ignore[no-untyped-call]
        optimiser.step(rate_at(first / wanted, config.learning_rate, config.warmup))
    return optimiser.state(), -(-wanted // 2)


def test_each_device_has_a_writer(written: Path) -> None:
    assert {path.name[:3] for path in (written / "text").iterdir()} == {"000", "001"}
    assert len(Corpus(written / "text").load().token_ids) >= 1000


# An odd number of batches in a pass or not: steps go over its end.
@pytest.mark.parametrize("validation", [4, pytest.param(5, marks=pytest.mark.full)])
def test_two_devices_learn_what_one_learns_of_the_mean_of_their_batches(
    tmp_path: Path, model: Path, written: Path, validation: int
) -> None:
    config = config_of(model, tmp_path, device=BOTH, text=str(written / "text"), epochs=2.5, validation=validation)
    train_head(config, COMMAND)
    found, progress = checkpoint_of(config)
    expected, steps = masters_of_one_device(config)
    assert steps > 5
    assert progress.step == steps
    names = [name for name in expected if name.startswith("master.")]
    assert names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
    # Every text once a pass, whoever read it.
    texts = hold_out(Corpus(written / "text").load(), validation, 3)[0]
    assert 2.3 < progress.tokens / len(texts.token_ids) < 3
    assert living_children(FOLLOWER) == []
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("device", [BOTH, pytest.param("cpu", marks=pytest.mark.full)], ids=["on both", "on one"])
def test_an_interrupted_run_goes_on(
    tmp_path: Path, model: Path, written: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(trainer_module, "_REPORT_STEPS", 3)
    config = config_of(
        model, tmp_path, device=BOTH, text=str(written / "text"), epochs=3.0, validation_seconds=0.0, learning_rate=1e-3
    )
    whole = replace(config, out=str(tmp_path / "whole"))
    measure, measured = Validator.measure, 0

    def interrupted(self: Validator, head: Any, *within: float) -> Any:
        nonlocal measured
        measured += 1
        if measured == 3:
            raise KeyboardInterrupt
        return measure(self, head, *within)

    with monkeypatch.context() as patched:
        patched.setattr(Validator, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_head(config, COMMAND)
    assert living_children(FOLLOWER) == []
    # What came after the last validation is lost.
    assert checkpoint_of(config)[1].step == 3
    train_head(replace(config, resume=True, device=device), COMMAND)
    tensors, progress = checkpoint_of(config)
    assert progress.fraction >= 1
    if device == "cpu":
        # Three steps of two batches, and the others alone.
        assert progress.step == 3 + batches_of(config) - 6
        return
    train_head(whole, COMMAND)
    expected, uninterrupted = checkpoint_of(whole)
    assert (progress.step, progress.tokens) == (uninterrupted.step, uninterrupted.tokens)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def batches_of(config: TrainingConfig) -> int:
    """Of the whole training."""
    learnt, _ = hold_out(Corpus(Path(config.text)).load(), config.validation, len(config.temperature_list))
    plan = BatchPlan(learnt, config.batch_tokens, config.max_length, config.seed)
    return int(np.ceil(config.epochs * plan.per_epoch()))


def test_time_ends_the_training_of_all(tmp_path: Path, model: Path, written: Path) -> None:
    config = config_of(model, tmp_path, device=BOTH, text=str(written / "text"), epochs=1e6, minutes=0.1)
    train_head(config, COMMAND)
    record = json.loads((config.out_folder / "training.json").read_text())
    assert record["finished"]
    # A busy machine may need the time for loading alone; then there is one step.
    assert record["training"]["steps"] >= 1
    assert living_children(FOLLOWER) == []


@contextlib.contextmanager
def training_for_ever(model: Path, out: Path, text: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """The command and its follower, once they train together."""
    settings = SMALL | {"model": model, "out": out / "head", "text": text, "epochs": 1e6, "device": BOTH}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "draft_service.training", *flags, "--validation-seconds=0.1"]
    # Where the tests run behind a shell, Ctrl-C may be ignored, and so by what they start.
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        leader = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, heeded)
    with leader as process:
        try:
            checkpoint = out / "head.run" / "checkpoint.safetensors"
            while not checkpoint.exists():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.1)
            # Other processes come and go, as what describes the machine for the record. A follower is `.. RANK STORE`.
            started = started_by(psutil.Process(process.pid))
            (follower,) = (one.process for one in started if list(one.words[-2:-1]) == ["1"])
            yield process, follower
        finally:
            process.kill()


def test_a_follower_that_dies_ends_the_run_with_one_line(tmp_path: Path, model: Path, written: Path) -> None:
    with training_for_ever(model, tmp_path, written / "text") as (process, follower):
        follower.kill()
        said = process.communicate()[1]
        assert process.returncode == 1
    assert "error: the process that trained on cpu was killed by SIGKILL" in said
    assert said.count("SIGKILL") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_the_leaders_end_ends_its_followers(
    tmp_path: Path, model: Path, written: Path, end: signal.Signals, status: int
) -> None:
    with training_for_ever(model, tmp_path, written / "text") as (process, follower):
        process.send_signal(end)
        said = process.communicate()[1]
        assert process.returncode == status
        follower.wait(timeout=HUNG_SECONDS)
    assert "Traceback" not in said


def test_a_follower_that_cannot_begin_ends_the_run() -> None:
    with (
        pytest.raises(FollowerFailed, match="cpu ended with status"),
        followers("no.such.module", "{}", BOTH.split(",")) as beside,
    ):
        beside.group.connect(beside.check)


def test_a_leader_that_waits_for_a_device_for_ever_is_ended() -> None:
    """As one does whose device waits for gradients of a process that is gone."""
    program = """
import time
from draft_service.training.parallel import followers as module
module._GRACE_SECONDS = 0.5
with module.followers("no.such.module", "{}", ["cpu", "cpu"]):
    time.sleep(3600)
"""
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: the process that trained on cpu ended with status 1"


def test_with_one_device_no_process_is_started(
    tmp_path: Path, model: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("no other process is needed")

    monkeypatch.setattr(subprocess, "Popen", refused)
    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    train_head(config_of(model, tmp_path, text=str(written / "text"), epochs=0.2), COMMAND)
    assert not [one for one in threading.enumerate() if one.name == "followers"]
    assert load_file(tmp_path / "head" / "model.safetensors")
