"""What a run keeps on disk, its settings, its schedule and its optimiser."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draft_service.training.building import new_eagle_head, new_head_config
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus
from draft_service.training.optimiser import MasterAdamW, rate_at
from draft_service.training.progress import Budget
from draft_service.training.run import train_head
from draft_service.training.run_folder import RunFolder
from draft_service.training.writing import read_prompts
from outrider.distillation import TeacherFacts, TeacherSettings, TeacherWeights, WrittenText, load_teacher
from outrider.settings import SettingsError

FACTS = TeacherFacts("m", 50, 16, 24, 6, 4, 2, 4, 128, 1e-5, {"rope_type": "default", "rope_theta": 1e4}, "print")


def config_of(folder: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(out=str(folder / "head"), **settings)


def written(number: int, *token_ids: int) -> WrittenText:
    return WrittenText(number, token_ids, 1, number % 2)


def test_texts_come_back_by_number_whoever_wrote_them_when(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.add([written(4, 7, 8, 9), written(0, 1, 2)], writer=0)
    Corpus(tmp_path).add([written(1, 3, 4)], writer=1)
    corpus.add([written(2, 5, 6)], writer=0)
    texts = corpus.load()
    assert texts.numbers.tolist() == [0, 1, 2, 4]
    assert [texts.text(i).tolist() for i in range(4)] == [[1, 2], [3, 4], [5, 6], [7, 8, 9]]
    assert texts.temperatures.tolist() == [0, 1, 0, 0]
    assert corpus.tokens == 9


def test_writers_go_on_behind_their_own_last_number(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    assert [corpus.next_number(writer, 2) for writer in (0, 1)] == [0, 1]
    corpus.add([written(6, 1, 2), written(2, 1, 2)], writer=0)
    assert [Corpus(tmp_path).next_number(writer, 2) for writer in (0, 1)] == [8, 1]


def test_no_text_is_an_empty_corpus(tmp_path: Path) -> None:
    assert len(Corpus(tmp_path).load()) == 0


def test_a_file_half_written_is_not_read(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.add([written(0, 1, 2)], writer=0)
    (tmp_path / "000-000001.partial").write_bytes(b"half")
    assert Corpus(tmp_path).tokens == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": "many"}, "amount"),
        ({"temperatures": "0.7,1"}, "needs 0"),
        ({"temperatures": "0,warm"}, "numbers"),
        ({"sampled_prompts": False}, "prompts"),
        ({"batch_tokens": 512}, "at least one text"),
        ({"steps": 0}, "--steps"),
        ({"minutes": -1.0}, "--minutes: must be at least 0"),
    ],
    ids=["tokens", "no greedy", "no number", "no prompts", "small batches", "no steps", "no time"],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config_of(tmp_path, **settings)


@pytest.mark.parametrize(("text", "amount"), [("20M", 20_000_000), ("1.5k", 1500), ("12_000", 12000)])
def test_amounts_of_tokens(tmp_path: Path, text: str, amount: int) -> None:
    assert config_of(tmp_path, tokens=text).token_goal == amount


def test_a_run_is_resumed_only_when_asked_and_with_its_own_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no run"):
        RunFolder(config_of(tmp_path, resume=True))
    # One that is refused before it has begun leaves nothing behind.
    for _ in range(2):
        begun = RunFolder(config_of(tmp_path, steps=3))
    assert not list(tmp_path.iterdir())
    begun.create()
    with pytest.raises(SettingsError, match="--resume"):
        RunFolder(config_of(tmp_path, steps=3))
    with pytest.raises(SettingsError, match="--steps 3"):
        RunFolder(config_of(tmp_path, steps=4, resume=True))
    RunFolder(config_of(tmp_path, steps=3, resume=True, minutes=2.0))


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(config_of(tmp_path))
    folder.create()
    assert folder.checkpoint() is None
    folder.save_checkpoint({"a": torch.arange(3)}, {"step": 5, "losses": [{"loss": [1.5]}]})
    found = folder.checkpoint()
    assert found is not None
    assert found[0]["a"].tolist() == [0, 1, 2]
    assert found[1] == {"step": 5, "losses": [{"loss": [1.5]}]}


def test_prompts_are_lines_or_conversations(tmp_path: Path) -> None:
    lines, turns = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\n two \n")
    turns.write_text(json.dumps({"turns": ["one", "two"], "id": 3}) + "\n\n")
    assert read_prompts(str(lines)) == (("one",), ("two",))
    assert read_prompts(str(turns)) == (("one", "two"),)
    assert read_prompts("") == ()


@pytest.mark.parametrize("line", ["[]", "{}", '{"turns": []}', '{"turns": [1]}', "{"])
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one"]}\n' + line + "\n")
    with pytest.raises(SettingsError, match=r"prompts\.jsonl:2"):
        read_prompts(str(path))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.txt"):
        read_prompts("nowhere.txt")


def test_the_rate_rises_in_a_line_and_falls_with_a_cosine() -> None:
    rates = [rate_at(fraction, 2.0, 0.1) for fraction in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.002, 1.0, 2.0, 2.0 * (0.02 + 0.98 * 0.5), 0.04])
    assert rate_at(0.0, 2.0, 0.0) == 2.0


def test_no_minutes_are_no_bound() -> None:
    unbounded, bounded = Budget(0.0), Budget(60.0, began=Budget(0.0).began - 20)
    assert unbounded.part(1.0) == unbounded.part(0.5) == math.inf
    assert bounded.part(1.0) == pytest.approx(40, abs=1)
    assert bounded.part(0.5) == pytest.approx(10, abs=1)


def test_the_masters_are_stepped_as_adamw_steps_them() -> None:
    torch.manual_seed(0)
    plain, own = nn.Linear(3, 2), nn.Linear(3, 2)
    own.load_state_dict(plain.state_dict())
    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    masters = MasterAdamW(own, weight_decay=0.1, clip=1e9, masters=own)
    for seed in range(3):
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for module in (plain, own):
            module(rows).square().sum().backward()
        adam.step()
        adam.zero_grad()
        masters.step(0.01)
    torch.testing.assert_close(own.weight, plain.weight)
    torch.testing.assert_close(own.bias, plain.bias)


def test_steps_too_small_for_half_precision_add_up_in_the_masters() -> None:
    wide = nn.Linear(1, 1, bias=False)
    nn.init.ones_(wide.weight)
    narrow = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    masters = MasterAdamW(narrow, weight_decay=0.0, clip=1e9, masters=wide)
    for _ in range(40):
        narrow(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        # A fifteenth of the distance between 1 and the next number below it.
        masters.step(2.5e-4)
    assert narrow.weight.item() == pytest.approx(1 - 40 * 2.5e-4, abs=4e-3)
    assert narrow.weight.item() < 1


def weights_of(seed: int = 0) -> TeacherWeights:
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = (torch.randn(50, 16, generator=generator) for _ in range(2))
    return TeacherWeights(embedding, lm_head)


@pytest.mark.parametrize("hidden", [0, 8, 32], ids=["as wide", "narrower", "wider"])
def test_a_new_head_begins_as_the_lm_head_over_the_high_layer(tmp_path: Path, hidden: int) -> None:
    shape = new_head_config(config_of(tmp_path, hidden=hidden), FACTS, 50)
    assert (shape.hidden_size, shape.feature_layers) == (hidden or 16, (1, 2, 2))
    head, weights = new_eagle_head(shape, None, weights_of(), seed=1), weights_of()
    states = torch.randn(1, 48, generator=torch.Generator().manual_seed(2))
    high = torch.nn.functional.rms_norm(states[:, 32:], (16,))
    found = head.logits(head.norm(head.project(states)))[0]
    expected = high @ weights.lm_head.T
    agreement = torch.corrcoef(torch.stack([found, expected[0]]))[0, 1]
    # In half the width, what goes through is half of it.
    assert agreement > (0.4 if hidden == 8 else 0.95)
    assert not head.embedding.requires_grad


def test_a_width_that_heads_do_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="multiple of 4"):
        new_head_config(config_of(tmp_path, hidden=10), FACTS, 50)


def test_a_teacher_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="'nobody'"):
        load_teacher("nobody", TeacherSettings("m", "cpu", "float32"))


@pytest.mark.parametrize("text", [None, "", "\xff"], ids=["absent", "empty", "no_text"])
def test_prompts_are_read_before_anything_is_loaded(tmp_path: Path, text: str | None) -> None:
    """And no run is left behind, which would be in the way of the next try."""
    prompts = tmp_path / "prompts.txt"
    if text is not None:
        prompts.write_bytes(text.encode("latin-1"))
    config = config_of(tmp_path, model=str(tmp_path / "nowhere"), prompts=str(prompts), sampled_prompts=False)
    with pytest.raises(SettingsError, match="--prompts") as raised:
        train_head(config, [])
    assert "\n" not in str(raised.value)
    assert not config.run_folder.exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=f"--out .*: {tmp_path}/file is no folder that may be written"):
        RunFolder(config_of(tmp_path / "file" / "below"))
    with pytest.raises(SettingsError, match="--out /proc/head: /proc"):
        RunFolder(config_of(Path("/proc"))).create()


def test_a_teacher_that_cannot_be_imported_is_refused() -> None:
    settings = TeacherSettings("m", "cpu", "float32")
    for name in ("nowhere_to_be_found:load", "json:nothing_of_that_name"):
        with pytest.raises(SettingsError, match=f"--teacher {name}: "):
            load_teacher(name, settings)
