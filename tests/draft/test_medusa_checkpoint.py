"""Medusa heads of every published layout are the plain heads of the paper, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import make_head
from medusa_heads import DRAFT, HEADS, VOCABULARY, WIDTH, make_heads, plain_logits, published_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import save_head
from draft_service.medusa.checkpoint import MedusaCheckpoint, save_heads
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from outrider.heads import HeadRefused
from target_service.model.head_projection import read_draft_head

TARGET_LAYERS = 12
TARGET_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": TARGET_LAYERS,
}
# As FasterDecoding published it, with heads left out of its count.
MEDUSA_CONFIG: dict[str, Any] = {
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.31.0",
}


def write(folder: Path, config: dict[str, Any], **files: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def whole(num_layers: int = 1) -> dict[str, Tensor]:
    return published_weights(make_heads(draft_vocab_size=VOCABULARY, num_layers=num_layers))


def target_weights() -> dict[str, Tensor]:
    """A few of those that a target has."""
    return {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH),
        "model.layers.0.mlp.down_proj.weight": torch.randn(WIDTH, WIDTH),
        "lm_head.weight": torch.randn(VOCABULARY, WIDTH),
    }


def alone(folder: Path, weights: dict[str, Tensor]) -> Path:
    return write(folder, MEDUSA_CONFIG, medusa_lm_head=weights)


def inside(folder: Path, weights: dict[str, Tensor]) -> Path:
    heads = {f"medusa_head.{name}": tensor for name, tensor in weights.items()}
    return write(folder, TARGET_CONFIG | {"medusa_num_heads": HEADS}, model=heads | target_weights())


def beside(folder: Path, weights: dict[str, Tensor]) -> Path:
    heads = {f"medusa_head.{name}": tensor for name, tensor in weights.items()}
    return write(folder, TARGET_CONFIG, medusa_lm_head=heads, model=target_weights())


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("layout", [alone, inside, beside])
def test_published_heads_compute_what_the_paper_says(layout: Any, num_layers: int, tmp_path: Path) -> None:
    weights = whole(num_layers)
    folder = layout(tmp_path, weights)
    shape = MedusaCheckpoint(folder).config
    assert (shape.num_heads, shape.num_layers) == (HEADS, num_layers)
    assert (shape.target_hidden_size, shape.vocab_size, shape.draft_vocab_size) == (WIDTH, VOCABULARY, VOCABULARY)
    assert shape.target_layers == (0 if layout is alone else TARGET_LAYERS)
    states = torch.randn(3, 5, WIDTH)
    expected = plain_logits(weights, states, HEADS, num_layers)
    torch.testing.assert_close(MedusaCheckpoint(folder).load()(states).double(), expected, rtol=1e-4, atol=1e-4)


def test_vllms_layout_has_no_bias_and_a_token_map(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in published_weights(make_heads()).items() if "bias" not in name}
    renamed = {
        f"blocks.{name[0]}.layers.0.weight" if "linear" in name else f"lm_heads.{name[0]}.weight": tensor
        for name, tensor in weights.items()
    }
    ids = torch.arange(DRAFT) + 7
    # In this layout, layers are those of the heads.
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    folder = write(tmp_path, config, model=renamed | {"token_map": ids})
    heads = MedusaCheckpoint(folder).load()
    assert heads.token_ids is not None and heads.token_ids.tolist() == ids.tolist()
    assert (heads.config.vocab_size, heads.config.draft_vocab_size, heads.config.target_layers) == (60, DRAFT, 0)
    states = torch.randn(4, WIDTH)
    torch.testing.assert_close(heads(states).double(), plain_logits(weights, states, HEADS, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft", [DRAFT, VOCABULARY])
def test_what_is_saved_is_the_published_layout_and_loads(draft: int, tmp_path: Path) -> None:
    heads = make_heads(draft_vocab_size=draft, tokenizer_fingerprint="print")
    save_heads(heads, tmp_path, {"steps": 3})
    assert json.loads((tmp_path / "training.json").read_text()) == {"steps": 3}
    saved, expected = load_file(tmp_path / "medusa_lm_head.safetensors"), published_weights(heads)
    assert saved.keys() - {"d2t", "t2d"} == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    loaded = MedusaCheckpoint(tmp_path).load()
    assert loaded.config == heads.config
    states = torch.randn(2, WIDTH)
    assert torch.equal(loaded(states), heads(states))
    assert (loaded.token_ids is None) == (draft == VOCABULARY)
    if heads.token_ids is not None and loaded.token_ids is not None:
        assert torch.equal(loaded.token_ids, heads.token_ids)
        assert saved["t2d"].nonzero()[:, 0].tolist() == heads.token_ids.tolist()


def test_a_token_map_cuts_every_head(tmp_path: Path) -> None:
    heads = make_heads()
    assert heads.token_ids is not None
    wanted = [*heads.token_ids[3:9].tolist(), 2]
    cut = MedusaCheckpoint(save_heads(heads, tmp_path)).load(token_map=wanted)
    assert cut.token_ids is not None
    rows = [i for i, token in enumerate(heads.token_ids.tolist()) if token in wanted]
    assert cut.token_ids.tolist() == heads.token_ids[rows].tolist()
    states = torch.randn(2, WIDTH)
    torch.testing.assert_close(cut(states), heads(states)[..., rows])
    with pytest.raises(HeadRefused, match="no token"):
        MedusaCheckpoint(tmp_path).load(token_map=[VOCABULARY])


def test_pickled_heads_are_refused_unread(tmp_path: Path) -> None:
    write(tmp_path, MEDUSA_CONFIG)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no pickle at all")
    with pytest.raises(HeadRefused, match=r"only pickled weights \(.pt\)"):
        MedusaCheckpoint(tmp_path)


def test_what_are_no_medusa_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadRefused, match="LlamaForCausalLMEagle3"):
        MedusaCheckpoint(save_head(make_head(), tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda weights: weights.pop("2.1.weight"), r"missing are heads.2.1.weight$"),
        (lambda weights: weights.pop("0.1.weight"), "the first of the heads has no lm_head"),
        (lambda weights: weights.pop("1.0.linear.weight"), r"missing are heads.1.0.linear.weight$"),
        (lambda weights: weights.update({"3.1.weight": torch.zeros(7, WIDTH)}), "shape"),
        (lambda weights: weights.update({"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}), "vocab_size"),
    ],
    ids=["no lm_head", "no first lm_head", "no block", "another vocabulary", "a map of what"],
)
def test_heads_that_are_not_whole_are_refused(change: Any, reason: str, tmp_path: Path) -> None:
    weights = whole()
    change(weights)
    with pytest.raises(HeadRefused, match=reason):
        MedusaCheckpoint(alone(tmp_path, weights)).load()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": VOCABULARY + 1}, "vocabulary of 60, the target one of 61"),
        ({"hidden_size": WIDTH * 2}, "width 16"),
        ({"num_hidden_layers": 11}, "12 layers, this one 11"),
    ],
)
def test_heads_of_another_target_are_refused(changes: dict[str, int], reason: str, tmp_path: Path) -> None:
    heads = save_heads(make_heads(), tmp_path / "heads")
    target = write(tmp_path / "target", TARGET_CONFIG | changes)
    with pytest.raises(HeadRefused, match=reason):
        MedusaCheckpoint(heads).load(target=TargetCheckpoint(target))


def test_the_last_layer_is_that_of_the_target_that_is_named_or_recorded(tmp_path: Path) -> None:
    heads = alone(tmp_path / "heads", whole())
    with pytest.raises(HeadRefused, match="--base-model"):
        write(heads, MEDUSA_CONFIG | {"base_model_name_or_path": str(tmp_path / "away")})
        MedusaDrafter(MedusaConfig(head=str(heads)))
    target = write(tmp_path / "target", TARGET_CONFIG)
    named = MedusaDrafter(MedusaConfig(head=str(heads), base_model=str(target)))
    write(heads, MEDUSA_CONFIG | {"base_model_name_or_path": str(target)})
    recorded = MedusaDrafter(MedusaConfig(head=str(heads)))
    for drafter in (named, recorded):
        assert drafter.features is not None
        assert (drafter.features.layers, drafter.features.width) == ((TARGET_LAYERS,), WIDTH)


@pytest.mark.parametrize("layout", [alone, inside, beside])
def test_a_target_with_captured_steps_reads_which_state_they_want(layout: Any, tmp_path: Path) -> None:
    folder = layout(tmp_path, whole())
    if layout is beside:
        index = {"weight_map": dict.fromkeys(target_weights(), "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_draft_head(str(folder), TARGET_LAYERS, WIDTH)
    assert (found.layers, found.projection) == ((TARGET_LAYERS,), None)
