"""Heads that do not begin anew, that speak through their target, and which of them is kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from teaching_model import save_teaching_model

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import EagleCheckpoint
from draft_service.training import run
from draft_service.training.building import initial_head, new_eagle_head, new_head_config, with_vocabulary
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus
from draft_service.training.loss import soft_cross_entropy
from draft_service.training.progress import Budget
from draft_service.training.run import train_head
from draft_service.training.run_folder import RunFolder
from draft_service.training.trainer import Trainer
from draft_service.training.validation import Acceptance
from outrider.distillation import TeacherFacts, TeacherSettings, TeacherWeights, WrittenText, load_teacher
from outrider.settings import SettingsError

FACTS = TeacherFacts("m", 50, 16, 24, 6, 4, 2, 4, 128, 1e-5, {"rope_type": "default", "rope_theta": 1e4}, "print")
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "tokens": "600",
    "max_length": 96,
    "max_prompt": 32,
    "batch_tokens": 512,
    "vocabulary": 100,
    "steps": 2,
    "epochs": 2.0,
    "validation": 2,
    "sequences": 4,
}
COMMAND = ("outrider", "train-head")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = save_teaching_model(tmp_path_factory.mktemp("target"))
    return folder


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of two layers, with its own lm_head."""
    out = tmp_path_factory.mktemp("first") / "head"
    return train_head(TrainingConfig(model=str(model), out=str(out), layers=2, **SMALL), COMMAND)


def text_of(head: Path) -> str:
    return str(head.with_name("head.run") / "text")


def record_of(head: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((head / "training.json").read_text())
    return record


def test_training_goes_on_from_a_head_on_text_that_is_there(model: Path, first: Path, tmp_path: Path) -> None:
    settings = SMALL | {"init": str(first), "text": text_of(first)}
    head = train_head(TrainingConfig(model=str(model), out=str(tmp_path / "head"), **settings), COMMAND)
    before, after = record_of(first), record_of(head)
    assert after["text"] == before["text"]
    assert not any((tmp_path / "head.run" / "text").glob("*"))
    # Shape and token map are those of the head, whatever the settings for new ones say.
    assert after["parameters"] == before["parameters"]
    maps = [load_file(folder / "model.safetensors")["d2t"].tolist() for folder in (first, head)]
    assert maps[0] == maps[1]
    assert after["validations"][0]["mean_length"] == pytest.approx(before["acceptance"]["mean_length"], abs=1e-3)
    assert after["finished"]


def test_layers_that_are_added_change_nothing_at_first(model: Path, first: Path, tmp_path: Path) -> None:
    settings = SMALL | {"init": str(first), "text": text_of(first), "layers": 3}
    head = train_head(TrainingConfig(model=str(model), out=str(tmp_path / "head"), **settings), COMMAND)
    before, after = record_of(first), record_of(head)
    assert after["validations"][0]["mean_length"] == pytest.approx(before["acceptance"]["mean_length"], abs=1e-3)
    trained = EagleCheckpoint(head).load(target=TargetCheckpoint(model))
    assert trained.config.num_layers == 3 and after["parameters"] > before["parameters"]
    # And learn.
    assert all(bool(weights.abs().sum() > 0) for weights in trained.layers[2].parameters())


def test_the_initial_head_must_be_there(model: Path, tmp_path: Path) -> None:
    teacher = load_teacher("local", TeacherSettings(str(model), "cpu", "float32"))
    config = TrainingConfig(model=str(model), out=str(tmp_path / "head"), init="./nowhere")
    with pytest.raises(SettingsError, match="nowhere"):
        initial_head(config, teacher.facts)


def test_the_text_may_choose_what_a_head_can_say(model: Path, first: Path, tmp_path: Path) -> None:
    settings = SMALL | {"init": str(first), "text": text_of(first), "vocabulary": 60, "new_vocabulary": True}
    head = train_head(TrainingConfig(model=str(model), out=str(tmp_path / "head"), **settings), COMMAND)
    said = [EagleCheckpoint(folder).load(target=TargetCheckpoint(model)).token_ids for folder in (first, head)]
    assert said[0] is not None and said[1] is not None
    assert len(said[0]) == 100 and len(said[1]) == 60 and set(said[1].tolist()) < set(said[0].tolist())


@pytest.mark.parametrize("tokens", [torch.arange(0, 50, 3), None], ids=["some", "all"])
def test_a_head_says_what_it_said_and_the_rest_as_its_target_does(tmp_path: Path, tokens: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding, lm_head, turn = (torch.randn(rows, 16, generator=generator) for rows in (50, 50, 16))
    shape, before = new_head_config(TrainingConfig(out=str(tmp_path / "head")), FACTS, 25), torch.arange(0, 50, 2)
    head = new_eagle_head(shape, before, TeacherWeights(embedding, lm_head), seed=1)
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head[before] @ turn)
    found = with_vocabulary(head, tokens, lm_head)
    states = torch.randn(3, 48, generator=generator)
    for one in (head, found):
        torch.testing.assert_close(one.project(states), head.project(states))
    wanted = lm_head @ turn if tokens is None else lm_head[tokens] @ turn
    torch.testing.assert_close(found.lm_head.weight, wanted, rtol=0.05, atol=0.05)
    known = [place for place, token in enumerate(range(50) if tokens is None else tokens.tolist()) if token % 2 == 0]
    assert torch.equal(found.lm_head.weight[known], wanted[known])
    trained = {name for name, weights in found.named_parameters() if weights.requires_grad}
    assert trained == {name for name, weights in head.named_parameters() if weights.requires_grad}


def test_a_head_without_a_vocabulary_of_its_own_gets_no_new_one(tmp_path: Path) -> None:
    weights = TeacherWeights(torch.randn(50, 16), torch.randn(50, 16))
    shape = new_head_config(TrainingConfig(out=str(tmp_path / "head"), tied=True), FACTS, 25)
    with pytest.raises(SettingsError, match="lm_head of its own"):
        with_vocabulary(new_eagle_head(shape, torch.arange(25), weights, seed=1), None, weights.lm_head)
    with pytest.raises(SettingsError, match="--init"):
        TrainingConfig(out=str(tmp_path / "head"), new_vocabulary=True)


def test_a_tied_head_is_trained_without_its_lm_head_and_saved_without_it(
    model: Path, first: Path, tmp_path: Path
) -> None:
    settings = SMALL | {"tied": True, "layers": 2, "intermediate": 96, "text": text_of(first)}
    folder = train_head(TrainingConfig(model=str(model), out=str(tmp_path / "head"), **settings), COMMAND)
    assert not any("lm_head" in name or "embed" in name for name in load_file(folder / "model.safetensors"))
    target = TargetCheckpoint(model)
    head = EagleCheckpoint(folder).load(target=target)
    assert (head.config.tied_lm_head, head.config.num_layers, head.config.intermediate_size) == (True, 2, 96)
    assert head.token_ids is not None
    torch.testing.assert_close(head.lm_head.weight, target.lm_head()[head.token_ids])
    others = (weights for name, weights in head.named_parameters() if not name.startswith(("embed", "lm_head")))
    assert record_of(folder)["parameters"] == sum(weights.numel() for weights in others)
    # And it is a head to go on from.
    settings = SMALL | {"init": str(folder), "text": text_of(first)}
    train_head(TrainingConfig(model=str(model), out=str(tmp_path / "more" / "head"), **settings), COMMAND)
    assert not any("lm_head" in name for name in load_file(tmp_path / "more" / "head" / "model.safetensors"))


def test_a_tied_head_begins_with_the_distribution_of_one_that_is_not(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding, lm_head = (torch.randn(50, 16, generator=generator) for _ in range(2))
    states, tokens = torch.randn(3, 48, generator=generator), torch.arange(0, 50, 2)
    heads = []
    for tied in (False, True):
        shape = new_head_config(TrainingConfig(out=str(tmp_path / "head"), tied=tied), FACTS, 25)
        heads.append(new_eagle_head(shape, tokens, TeacherWeights(embedding, lm_head), seed=1))
    distributions = [head.logits(head.norm(head.project(states))) for head in heads]
    torch.testing.assert_close(*distributions)
    assert [head.lm_head.weight.requires_grad for head in heads] == [True, False]


def test_a_tied_head_is_as_wide_as_its_target(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--tied"):
        TrainingConfig(out=str(tmp_path / "head"), tied=True, hidden=8)


def test_text_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no folder"):
        TrainingConfig(out=str(tmp_path / "head"), text=str(tmp_path / "text"))


def test_the_loss_teaches_rows_alike_whether_the_lm_head_learns_or_not() -> None:
    torch.manual_seed(0)
    lm_input, lm_head, probs = torch.randn(6, 4), torch.randn(9, 4), torch.rand(3, 9)
    grads = []
    for learns in (True, False):
        rows = lm_input.clone().requires_grad_()
        weight = lm_head.clone().requires_grad_(learns)
        loss, _ = soft_cross_entropy(rows, weight, probs, torch.tensor([0, 1, 2, 0, 1, 2]), torch.ones(6))
        loss.backward()  # type: ignore[no-untyped-call]
        assert (weight.grad is not None) is learns
        grads.append(rows.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("lengths", "fraction", "kept"),
    [((1.0, 2.0), 0.5, True), ((2.0, 1.9), 0.5, False), ((2.0, 1.9), 1.0, True)],
    ids=["better", "worse", "at the end"],
)
def test_a_run_that_is_killed_leaves_its_best_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[float, ...], fraction: float, kept: bool
) -> None:
    config = TrainingConfig(out=str(tmp_path / "head"))
    saved: list[str] = []
    monkeypatch.setattr(run._TrainingRun, "_record", lambda *_: {})
    monkeypatch.setattr(run, "save", lambda *_, **__: saved.append("head"))
    folder = RunFolder(config)
    folder.create()
    corpus = Corpus(tmp_path / "text")
    corpus.add([WrittenText(0, (1, 2, 3), 1, 0.0)], 0)
    one = run._TrainingRun(config, COMMAND, Budget(0.0), folder, corpus.load(), np.zeros(4, np.int64), {})
    progress = SimpleNamespace(fraction=fraction, validations=[{"mean_length": length} for length in lengths])
    shape = SimpleNamespace(hidden_size=1, target_hidden_size=1)
    trainer = SimpleNamespace(
        progress=progress, head=SimpleNamespace(config=shape), state=lambda: ({"a": torch.ones(1)}, {})
    )
    one._save(cast(Trainer, trainer), Acceptance(1, (0.0,), (0.0,), lengths[-1], 1.0))
    assert bool(saved) is kept
    # Whatever comes of it, the run can go on.
    assert folder.checkpoint() is not None
