"""Medusa heads in training: where they begin, which guess is held to what, and the loss by plain autograd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from medusa_heads import WIDTH, make_heads
from safetensors.torch import load_file
from teaching_model import VOCABULARY, save_teaching_model
from torch.nn import functional

from draft_service.drafters.base import DraftSequence
from draft_service.medusa.checkpoint import MedusaCheckpoint
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from draft_service.medusa.head import MedusaShape
from draft_service.training.batches import make_batch
from draft_service.training.building import new_medusa_head
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus, Texts
from draft_service.training.run import train_head
from draft_service.training.trainer import step_losses
from draft_service.training.unrolling import lm_heads, lm_inputs
from outrider.distillation import TeacherSettings, load_teacher
from outrider.settings import SettingsError

HEADS = 3
SMALL: dict[str, Any] = {
    "kind": "medusa",
    "dtype": "float32",
    "tokens": "2k",
    "max_length": 96,
    "max_prompt": 32,
    "batch_tokens": 512,
    "vocabulary": 200,
    "steps": HEADS,
    "epochs": 14.0,
    "learning_rate": 4e-3,
    "validation": 10,
}
COMMAND = ("outrider", "train-head", "--kind", "medusa")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teaching_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_head(config_of(model, tmp_path_factory.mktemp("trained")), COMMAND)


def config_of(model: Path, out: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(**(SMALL | {"model": str(model), "out": str(out / "head")} | settings))


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("tokens", [None, torch.tensor([2, 3, 7])], ids=["whole", "reduced"])
def test_every_head_begins_as_the_targets_lm_head(num_layers: int, tokens: torch.Tensor | None) -> None:
    lm_head, states = torch.randn(11, WIDTH), torch.randn(5, WIDTH)
    shape = MedusaShape(
        vocab_size=11,
        draft_vocab_size=11 if tokens is None else 3,
        target_hidden_size=WIDTH,
        num_heads=4,
        num_layers=num_layers,
    )
    heads = new_medusa_head(shape, tokens, lm_head)
    expected = states @ (lm_head if tokens is None else lm_head[tokens]).T
    assert all(torch.allclose(logits, expected, atol=1e-5) for logits in heads(states))
    # And can learn from there.
    heads(states).square().sum().backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in heads.parameters() if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in heads.parameters())


def test_the_loss_is_each_depths_soft_cross_entropy_weighted_by_decay() -> None:
    """Against plain autograd, row by row: head k of token i is held to the target's distribution of token i + 2 + k."""
    heads = make_heads(num_heads=HEADS, draft_vocab_size=60).requires_grad_(True)
    lengths, prompts = [7, 9], [2, 3]
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(60, (sum(lengths),), generator=generator)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    texts = Texts(
        tokens.numpy().astype(np.int32), starts, np.array(prompts, np.int32), np.zeros(2, np.float32), np.arange(2)
    )
    batch = make_batch(texts, np.arange(2), 12, HEADS)
    states = torch.randn(2, 12, WIDTH, generator=generator)
    # Of every place of the texts, the distribution of the token behind it.
    target = torch.randn(2, 12, 60, generator=generator).softmax(-1)
    probs = target.flatten(0, 1)[batch.distribution_rows]
    found, total = step_losses(
        lm_inputs(heads, states, batch.token_ids, HEADS), lm_heads(heads), probs, batch, decay=0.8
    )

    logits, expected = heads(states), []
    for k in range(HEADS):
        losses = []
        for text, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            # Roots are the prompt's last token and those of the answer; the state is that of the token before.
            for row in range(prompt - 2, length - 2 - k):
                own = logits[k, text, row].log_softmax(-1)
                losses.append(-(target[text, row + 1 + k] * own).sum())
        expected.append(torch.stack(losses).mean())
    weights = torch.tensor([0.8**k for k in range(HEADS)])
    wanted = (torch.stack(expected) * weights).sum() / weights.sum()
    torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)
    for own, plain in zip(
        torch.autograd.grad(total, list(heads.parameters())),
        torch.autograd.grad(wanted, list(heads.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-5)


def test_the_loss_of_every_head_falls_and_more_is_accepted(trained: Path) -> None:
    record = record_of(trained)
    first, last = record["losses"][0]["loss"], record["losses"][-1]["loss"]
    assert len(first) == HEADS
    assert all(late < 0.8 * early for early, late in zip(first, last, strict=True))
    untrained, final = record["validations"][0], record["acceptance"]
    assert len(final["reached"]) == HEADS
    # At first every head says what comes next, and none what comes after.
    assert untrained["mean_length"] < 1.5 < 1.8 < final["mean_length"]
    assert final["reached"] == sorted(final["reached"], reverse=True)
    assert (record["settings"]["kind"], record["finished"]) == ("medusa", True)


def test_the_saved_heads_are_published_ones_and_draft_what_they_learnt(trained: Path, model: Path) -> None:
    assert {path.name for path in trained.iterdir()} == {
        *("config.json", "medusa_lm_head.safetensors", "training.json")
    }
    saved = load_file(trained / "medusa_lm_head.safetensors")
    assert saved["2.1.weight"].shape == (200, 48) and saved["0.0.linear.bias"].shape == (48,)
    shape = MedusaCheckpoint(trained).config
    assert (shape.num_heads, shape.draft_vocab_size, shape.vocab_size) == (HEADS, 200, VOCABULARY)
    # They know their target's layers, so the drafter needs nothing of it.
    drafter = MedusaDrafter(
        MedusaConfig(head=str(trained), dtype="float32", feature_dtype="float32", topk=1, num_draft_tokens=3)
    )
    drafter.start()
    assert drafter.features is not None and drafter.features.layers == (6,)
    text = Corpus(trained.with_name("head.run") / "text").load().text(0)[:40].tolist()
    reader = load_teacher("local", TeacherSettings(str(model), "cpu", "float32")).reader(drafter.features.layers)
    states = reader.read(torch.tensor([text]), torch.tensor([0]), None).states[0]
    sequence = DraftSequence(1, text, 1, VOCABULARY)
    drafter.open(sequence)
    assert sequence.features is not None
    sequence.features.append(states[:-1], 0)
    (tree,) = drafter.propose([sequence])
    heads = MedusaCheckpoint(trained).load()
    assert heads.token_ids is not None
    said = heads.token_ids[heads(states[-2]).argmax(-1)].tolist()
    assert tree.is_chain and tree.drafted and list(tree.token_ids[1:]) == said[: tree.drafted]


def test_training_goes_on_from_heads_that_are_there(trained: Path, model: Path, tmp_path: Path) -> None:
    text = trained.with_name("head.run") / "text"
    config = config_of(model, tmp_path, init=str(trained), text=str(text), epochs=1.0, learning_rate=1e-3)
    folder = train_head(config, COMMAND)
    begun, before = record_of(folder)["validations"][0], record_of(trained)["acceptance"]
    assert begun["mean_length"] == pytest.approx(before["mean_length"], abs=0.02)
    with pytest.raises(SettingsError, match="has 3 heads"):
        train_head(replace(config, out=str(tmp_path / "more"), steps=4), COMMAND)
    with pytest.raises(SettingsError, match=r"no fc|no layer"):
        train_head(replace(config, out=str(tmp_path / "eagle"), kind="eagle3"), COMMAND)


@pytest.mark.parametrize("settings", [{"hidden": 64}, {"intermediate": 64}, {"tied": True}, {"new_vocabulary": True}])
def test_what_only_eagle_heads_have_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--kind medusa"):
        TrainingConfig(out=str(tmp_path / "head"), kind="medusa", **settings)


def test_losses_of_texts_padded_differently_are_the_same() -> None:
    """What stands behind a text's end has no part in any head's guess."""
    heads = make_heads(num_heads=HEADS, draft_vocab_size=60)
    states = torch.randn(1, 6, WIDTH)
    ids = torch.zeros(1, 6, dtype=torch.int64)
    padded = functional.pad(states, (0, 0, 0, 4), value=7.0)
    found = lm_inputs(heads, padded, functional.pad(ids, (0, 4)), HEADS)
    torch.testing.assert_close(found[:, :, :6], lm_inputs(heads, states, ids, HEADS))
