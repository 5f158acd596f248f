"""`outrider train-head` from end to end on a tiny model: text, head, record, and the drafter that loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from teaching_model import VOCABULARY, save_teaching_model
from torch import Tensor
from warm_python import shared_python, warm_executable

from benchmarks.shared.virtual_clock import VirtualClock
from draft_service.drafters.base import DraftSequence
from draft_service.eagle.checkpoint import EagleCheckpoint
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.training.batches import BatchPlan
from draft_service.training.building import new_eagle_head, new_head_config
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus, Texts
from draft_service.training.progress import phase
from draft_service.training.run import train_head
from draft_service.training.trainer import Trainer, TrainingDiverged
from draft_service.training.unrolling import unroll
from draft_service.training.validation import Validator, hold_out
from outrider.distillation import Reader, Teacher, TeacherSettings, load_teacher
from outrider.settings import SettingsError

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "tokens": "2k",
    "max_length": 96,
    "max_prompt": 32,
    "batch_tokens": 512,
    "vocabulary": 200,
    "steps": 3,
    "epochs": 14.0,
    "learning_rate": 4e-3,
    "validation": 10,
}
COMMAND = ("outrider", "train-head")
PYTHON = sys.executable


@pytest.fixture(scope="module", autouse=True)
def started_in_a_moment() -> Iterator[None]:
    """What this process starts as `sys.executable` is forked; `PYTHON` starts as a user's does, as in
    `test_train_on_devices.py` a whole training does."""
    with warm_executable(shared_python("services")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teaching_model(tmp_path_factory.mktemp("target"))


def config_of(model: Path, out: Path, **settings: Any) -> TrainingConfig:
    """Of few texts, since writing them takes longer than learning from them."""
    few = {"model": str(model), "out": str(out / "head"), "sequences": 4, "validation": 2}
    return TrainingConfig(**(SMALL | few | settings))


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was trained by the command itself."""
    out = tmp_path_factory.mktemp("trained")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [
        sys.executable,
        "-m",
        "outrider_client.cli",
        "train-head",
        f"--model={model}",
        f"--out={out / 'head'}",
    ]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "head")
    return out / "head"


@pytest.fixture(scope="module")
def record(trained: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((trained / "training.json").read_text())
    return found


@pytest.fixture(scope="module")
def teacher(model: Path) -> Teacher:
    return load_teacher("local", TeacherSettings(str(model), "cpu", "float32"))


@pytest.fixture(scope="module")
def texts(trained: Path) -> Texts:
    return Corpus(trained.with_name("head.run") / "text").load()


def test_the_loss_falls_at_every_step_of_the_unrolling(record: dict[str, Any]) -> None:
    first, last = record["losses"][0]["loss"], record["losses"][-1]["loss"]
    assert len(first) == SMALL["steps"]
    assert all(late < 0.8 * early for early, late in zip(first, last, strict=True))


def test_acceptance_on_held_out_text_rises_far_above_an_untrained_heads(record: dict[str, Any]) -> None:
    untrained, final = record["validations"][0], record["acceptance"]
    assert untrained["step"] == 0
    assert untrained["mean_length"] < 1.5
    assert final["mean_length"] > 3.0
    assert final["reached"] == sorted(final["reached"], reverse=True)
    # In fp32, who writes and who reads agree on every token that the head can say.
    assert final["agreement"] > 0.95


def test_the_record_says_what_was_done(record: dict[str, Any], model: Path, texts: Texts) -> None:
    assert record["finished"]
    assert record["model"] == str(model)
    assert record["command"][:2] == ["outrider", "train-head"]
    assert record["text"]["tokens"] == len(texts.token_ids) >= 2000
    assert record["text"]["vocabulary_coverage"] > 0.9
    assert record["versions"]["torch"] == torch.__version__
    assert record["training"]["tokens_read"] > 10 * 2000
    assert record["seconds"]["all"] >= record["seconds"]["training"] > 0


def test_no_file_holds_features_or_pickles(trained: Path) -> None:
    files = [path.relative_to(trained.parent) for path in trained.parent.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert {path.name for path in files if path.parent.name == "head"} == {
        *("config.json", "model.safetensors", "training.json"),
    }


def test_the_saved_head_drafts_what_it_learnt_to(trained: Path, model: Path, teacher: Teacher, texts: Texts) -> None:
    """Its chains in the drafter are those of its unrolling, whose logits are those of the head in training."""
    drafter = EagleDrafter(
        EagleConfig(
            head=str(trained),
            embeddings=str(model),
            dtype="float32",
            projection="draft",
            feature_dtype="float32",
            num_steps=3,
            topk=1,
            num_draft_tokens=3,
            min_score=0.0,
            kv_tokens=1024,
        )
    )
    drafter.start()
    head = EagleCheckpoint(trained).load(target=_checkpoint(model))
    tokens = texts.text(0)[:40].tolist()
    states = _states(teacher.reader(head.config.layers_of(6)), tokens)
    sequence = DraftSequence(1, tokens, 1, VOCABULARY)
    drafter.open(sequence)
    assert sequence.features is not None
    sequence.features.append(states[: len(tokens) - 1], 0)
    (tree,) = drafter.propose([sequence])
    assert tree.is_chain
    assert len(tree.token_ids) == 4
    assert head.token_ids is not None
    said: list[int] = []
    for step in range(3):
        # Row i of step s has read the s guesses behind the root i + 1.
        known = torch.tensor([[*tokens, *said]])
        padded = torch.cat([states, torch.zeros(len(said), states.shape[1])])[None]
        lm_input = unroll(head, padded, known, step + 1)[step, 0, len(tokens) - 2]
        said.append(int(head.token_ids[head.logits(lm_input).argmax()]))
    assert list(tree.token_ids[1:]) == said


def _checkpoint(model: Path) -> Any:
    from draft_service.checkpoints.target import TargetCheckpoint

    return TargetCheckpoint(model)


def _states(reader: Reader, tokens: list[int]) -> Tensor:
    ids = torch.tensor([tokens])
    return reader.read(ids, torch.tensor([0]), None).states[0]


def trainer_of(config: TrainingConfig, teacher: Teacher, texts: Texts) -> Trainer:
    tokens = torch.from_numpy(np.sort(np.argsort(-np.bincount(texts.token_ids, minlength=VOCABULARY))[:200]))
    shape = new_head_config(config, teacher.facts, len(tokens))
    reader = teacher.reader(shape.layers_of(teacher.facts.num_layers))
    learnt, held = hold_out(texts, 4, 3)
    plans = [BatchPlan(part, config.batch_tokens, config.max_length, config.seed) for part in (learnt, held)]
    head = new_eagle_head(shape, tokens, reader.weights(), config.seed)
    return Trainer(config, head, reader, plans[0], Validator(reader, plans[1]))


def run(trainer: Trainer, until: int | None = None) -> None:
    with phase("training") as shown:
        trainer.train(float("inf"), shown, lambda _: None, until)


def test_a_run_that_goes_on_ends_as_one_that_was_never_stopped(
    tmp_path: Path, model: Path, teacher: Teacher, texts: Texts
) -> None:
    config = config_of(model, tmp_path, epochs=3.0)
    whole, begun = trainer_of(config, teacher, texts), trainer_of(config, teacher, texts)
    run(whole)
    # In the middle of a pass.
    run(begun, until=whole.progress.step // 2 + 1)
    tensors, state = begun.state()
    resumed = trainer_of(config, teacher, texts)
    resumed.load(tensors, json.loads(json.dumps(state)))
    run(resumed)
    assert resumed.progress.step == whole.progress.step
    assert resumed.progress.tokens == whole.progress.tokens
    found, expected = resumed.state()[0], whole.state()[0]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def test_the_command_resumes_text_and_training(tmp_path: Path, model: Path) -> None:
    config = config_of(model, tmp_path, tokens="300", epochs=2.0)
    train_head(config, COMMAND)
    with pytest.raises(SettingsError, match="--resume"):
        train_head(config, COMMAND)
    before = load_file(config.out_folder / "model.safetensors")
    first = json.loads((config.out_folder / "training.json").read_text())
    train_head(replace(config, resume=True, epochs=4.0), COMMAND)
    second = json.loads((config.out_folder / "training.json").read_text())
    # A run that was at its end stays there: its schedule is over.
    assert second["training"]["steps"] == first["training"]["steps"]
    assert second["text"] == first["text"]
    after = load_file(config.out_folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_text_is_written_on_where_an_interrupted_run_stopped(tmp_path: Path, model: Path) -> None:
    config = config_of(model, tmp_path, tokens="300", epochs=1.0)
    train_head(config, COMMAND)
    # As if it had been stopped while it wrote.
    for name in ("tokens", "checkpoint"):
        (config.run_folder / f"{name}.safetensors").unlink()
    written = Corpus(config.run_folder / "text").load()
    train_head(replace(config, resume=True, tokens="600"), COMMAND)
    texts = Corpus(config.run_folder / "text").load()
    assert len(texts.token_ids) >= 600 > len(written.token_ids)
    assert set(written.numbers.tolist()) < set(texts.numbers.tolist())
    assert len(set(texts.numbers.tolist())) == len(texts)


def test_minutes_bound_the_whole(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between two looks at the clock; a step of the engine that writes has some twenty, and a pass of training two.
    VirtualClock(1e-3).install(monkeypatch)
    # Text and passes for hours.
    config = config_of(model, tmp_path, minutes=0.1, tokens="10M", epochs=1e6, sequences=16, validation=10)
    train_head(config, COMMAND)
    record = json.loads((config.out_folder / "training.json").read_text())
    assert record["finished"]
    assert 2 < record["seconds"]["writing"] < 6
    assert record["seconds"]["all"] < 7
    assert record["training"]["steps"] >= 1


def test_minutes_bound_the_whole_where_every_pass_is_slow(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations took as long as they do, and one more step was begun whatever the last one took."""
    clock = VirtualClock(1e-2).install(monkeypatch)
    matches, step = Validator._matches, Trainer._step

    def slow_matches(self: Validator, *given: Any) -> Any:
        clock.pass_by(10.0)
        return matches(self, *given)

    def slow_step(self: Trainer, rate: float) -> Tensor:
        clock.pass_by(15.0)
        return step(self, rate)

    monkeypatch.setattr(Validator, "_matches", slow_matches)
    monkeypatch.setattr(Trainer, "_step", slow_step)
    # Writing takes a part of these two minutes, by the looks at the clock.
    sizes = {"tokens": "4k", "validation": 8, "sequences": 16, "batch_tokens": 96, "epochs": 1e6, "writing_share": 0.25}
    config = config_of(model, tmp_path, minutes=2.0, **sizes)
    train_head(config, COMMAND)
    record = json.loads((config.out_folder / "training.json").read_text())
    assert record["finished"] and record["training"]["steps"] >= 1
    assert record["seconds"]["all"] <= 120


def test_prompts_from_a_file_are_answered_by_several_writers(tmp_path: Path, model: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(8)))
    config = config_of(model, tmp_path, prompts=str(prompts), sampled_prompts=False, writers=2, tokens="1M", epochs=1.0)
    train_head(config, COMMAND)
    texts = Corpus(config.run_folder / "text").load()
    assert texts.numbers.tolist() == list(range(24))
    assert {path.name[:3] for path in (config.run_folder / "text").iterdir()} == {"000", "001"}


def test_a_wrong_setting_ends_the_command_with_status_two(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "draft_service.training", "--out", str(tmp_path / "head"), "--model", "no/such"]
    done = subprocess.run([*command, "--steps", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--steps: must be at least 1" in done.stderr


@pytest.mark.parametrize("style", [pytest.param("eagle3", marks=pytest.mark.full), "eagle3.1"])
def test_heads_of_another_width_carry_their_embedding(tmp_path: Path, model: Path, trained: Path, style: str) -> None:
    text = str(trained.with_name("head.run") / "text")
    config = config_of(model, tmp_path, hidden=24, layers=2, style=style, vocabulary=0, text=text, epochs=0.2)
    train_head(config, COMMAND)
    head = EagleCheckpoint(config.out_folder).load()
    assert (head.config.hidden_size, head.config.target_hidden_size, head.config.num_layers) == (24, 48, 2)
    assert head.config.draft_vocab_size == VOCABULARY
    assert head.config.norm_output is (style == "eagle3.1")


def test_a_loss_that_is_no_number_ends_training(tmp_path: Path, model: Path, teacher: Teacher, texts: Texts) -> None:
    trainer = trainer_of(config_of(model, tmp_path), teacher, texts)
    with torch.no_grad():
        trainer.head.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="learning-rate"):
        run(trainer)
