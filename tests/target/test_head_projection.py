"""What the target reads of a head is what the draft service makes of the same folder: layers, norms and projection."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import HIDDEN, KINDS, make_head
from safetensors.torch import load_file, save_file

from draft_service.eagle.checkpoint import EagleCheckpoint, save_head
from outrider.errors import NotSupported
from target_service.model.head_projection import read_draft_head

TARGET_LAYERS = 12


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    return save_head(make_head(**(KINDS[kind] | changes)), folder, embedding=True)


def rewritten(folder: Path, config: dict[str, Any], prefix: str = "") -> Path:
    """The same weights with another config.json and a prefix before their names."""
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eagle-1"])
def test_the_projection_is_the_heads_own(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, kind)
    own, read = EagleCheckpoint(folder).load(), read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)
    assert read.layers == own.config.layers_of(TARGET_LAYERS) == (1, 5, 8)
    assert read.projection is not None and read.projection.width == own.config.hidden_size
    assert read.fingerprint == EagleCheckpoint(folder).projection_fingerprint()
    states = torch.randn(3, 5, own.projection.input_width)
    torch.testing.assert_close(read.projection(states), own.project(states), rtol=1e-5, atol=1e-5)
    halves = read.projection.to(torch.bfloat16)(states.bfloat16())
    assert halves.dtype is torch.bfloat16
    torch.testing.assert_close(halves.float(), own.project(states), rtol=0.05, atol=0.2)


def test_an_eagle1_head_reads_what_the_targets_lm_head_reads(tmp_path: Path) -> None:
    read = read_draft_head(str(saved(tmp_path, "eagle-1")), TARGET_LAYERS, HIDDEN)
    assert read.layers == (TARGET_LAYERS,) and read.projection is None


def test_a_head_without_fc_reads_what_the_targets_lm_head_reads(tmp_path: Path) -> None:
    """As NVIDIA's throughput heads of gpt-oss."""
    folder = saved(tmp_path, "eagle-3", has_fc=False, num_features=1, feature_layers=None)
    read, own = read_draft_head(str(folder), TARGET_LAYERS, HIDDEN), EagleCheckpoint(folder).load()
    assert read.layers == own.config.layers_of(TARGET_LAYERS) == (TARGET_LAYERS,) and read.projection is None
    states = torch.randn(3, HIDDEN)
    assert torch.equal(own.project(states), states)
    config = json.loads((folder / "config.json").read_text())
    rewritten(folder, config | {"eagle_config": {}})
    for refuse in (lambda: EagleCheckpoint(folder), lambda: read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)):
        with pytest.raises(NotSupported, match="no fc"):
            refuse()


def test_layers_that_are_not_named_are_the_usual_ones(tmp_path: Path) -> None:
    """NVIDIA's heads have an empty list."""
    folder = saved(tmp_path, "eagle-3")
    config = json.loads((folder / "config.json").read_text())
    rewritten(folder, config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}})
    assert read_draft_head(str(folder), TARGET_LAYERS, HIDDEN).layers == (1, 5, 8)
    assert EagleCheckpoint(folder).config.layers_of(TARGET_LAYERS) == (1, 5, 8)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.eh_proj.weight", TARGET_LAYERS),
        ("mtp.fc.weight", TARGET_LAYERS),
        ("model.mtp_linear_proj.0.weight", TARGET_LAYERS),
        ("model.mtp_layers.0.input_proj.weight", TARGET_LAYERS - 1),
        ("model.mtp.layers.0.eh_proj.weight", TARGET_LAYERS - 1),
    ],
)
def test_a_targets_own_modules_read_its_last_state_before_or_after_the_norm(
    name: str, layer: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({name: torch.zeros(2, 4), "model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    read = read_draft_head(str(tmp_path), TARGET_LAYERS, 2)
    assert read.layers == (layer,) and read.projection is None


def test_layers_are_counted_by_their_outputs_in_every_layout(tmp_path: Path) -> None:
    folder = saved(tmp_path, "eagle-3")
    config = json.loads((folder / "config.json").read_text())
    nested = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "eagle_aux_hidden_state_layer_ids": [3, 7, 10],
        "draft_vocab_size": config["draft_vocab_size"],
    }
    layouts = [
        (nested, "", (2, 6, 9)),
        (config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 12]}}, "model.", (0, 4, 12)),
        ({name: value for name, value in config.items() if name != "eagle_config"}, "", (1, 5, 8)),
    ]
    for number, (written, prefix, layers) in enumerate(layouts):
        folder = rewritten(saved(tmp_path / str(number), "eagle-3"), written, prefix)
        assert read_draft_head(str(folder), TARGET_LAYERS, HIDDEN).layers == layers
        assert EagleCheckpoint(folder).load().config.layers_of(TARGET_LAYERS) == layers


def test_the_norms_take_the_epsilon_of_the_config(tmp_path: Path) -> None:
    folder = saved(tmp_path, "eagle-3.1", rms_norm_eps=0.3)
    own, read = EagleCheckpoint(folder).load(), read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)
    assert read.projection is not None
    states = torch.randn(4, own.projection.input_width)
    torch.testing.assert_close(read.projection(states), own.project(states), rtol=1e-5, atol=1e-5)


def test_heads_are_told_apart_by_their_weights_and_not_by_their_type(tmp_path: Path) -> None:
    folder, half, other = (saved(tmp_path / name, "eagle-3") for name in ("whole", "half", "other"))
    for place, change in ((half, torch.Tensor.bfloat16), (other, lambda weight: weight + 0.1)):
        tensors = load_file(place / "model.safetensors")
        tensors["fc.weight"] = change(tensors["fc.weight"])
        save_file(tensors, place / "model.safetensors")
    prints = [read_draft_head(str(one), TARGET_LAYERS, HIDDEN).fingerprint for one in (folder, half, other)]
    assert prints[0] == prints[1] != prints[2]
    assert [EagleCheckpoint(one).projection_fingerprint() for one in (folder, half, other)] == prints


@pytest.mark.parametrize(
    ("target_layers", "hidden"), [(7, HIDDEN), (TARGET_LAYERS, HIDDEN * 4)], ids=["layers", "width"]
)
def test_a_head_of_another_target_is_refused(target_layers: int, hidden: int, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="reads"):
        read_draft_head(str(saved(tmp_path, "eagle-3")), target_layers, hidden)


def test_pickled_weights_and_other_models_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "head", "eagle-3")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotSupported, match="pickled"):
        read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(NotSupported, match="no EAGLE head"):
        read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors", b"cut"),
    ],
)
def test_a_broken_file_is_refused_by_its_name(file: str, content: bytes, tmp_path: Path) -> None:
    folder = saved(tmp_path / "head", "eagle-3")
    (folder / file).write_bytes(content)
    with pytest.raises(NotSupported, match=re.escape(str(folder / file))):
        read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_fifo_waits_for_nobody(file: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "head", "eagle-3")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(NotSupported, match="is no regular file but a fifo"):
        read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)


def test_a_file_of_an_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "head", "eagle-3")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    with pytest.raises(NotSupported, match=r"gone\.safetensors"):
        read_draft_head(str(folder), TARGET_LAYERS, HIDDEN)
