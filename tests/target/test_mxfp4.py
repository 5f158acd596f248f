"""MXFP4 experts are read as transformers dequantises them, and a folder of gpt-oss as it is published is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from windowed_models import WINDOWED

from target_service.config import TargetConfig
from target_service.model.loading.inspection import inspect
from target_service.model.loading.loader import load_runner
from target_service.model.loading.self_check import check_runner, own_logits
from tree_models.reference import published_tensors
from tree_models.weights.checkpoint import TensorsInMemory, WeightsRefused
from tree_models.weights.mxfp4 import DequantisedExperts, dequantised

STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(seed: int, *shape: int, scales: tuple[int, int] = (0, 255)) -> tuple[Tensor, Tensor]:
    """Random blocks of [E, out, in / 32, 16] and their scales."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(*scales, shape, generator=generator).to(torch.uint8)


def test_numbers_are_those_of_transformers() -> None:
    """With scales from the least to the largest that is a number, so that results are subnormal and infinite too."""
    blocks, scales = packed(0, 3, 10, 64)
    assert torch.equal(dequantised(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_a_number_of_each_kind() -> None:
    blocks = torch.tensor([0x21, 0xF8] + [0] * 14, dtype=torch.uint8).view(1, 1, 1, 16)
    found = dequantised(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert found.shape == (1, 32, 1)
    # 2 ** 1 times 0.5, 1, -0 and -6.
    assert found.flatten()[:4].tolist() == [1.0, 2.0, 0.0, -12.0]


@pytest.mark.parametrize(
    ("blocks", "scales", "reason"),
    [
        (torch.zeros(2, 3, 1, 16, dtype=torch.uint8), torch.zeros(2, 3, 2, dtype=torch.uint8), "its scales are"),
        (torch.zeros(2, 3, 1, 8, dtype=torch.uint8), torch.zeros(2, 3, 1, dtype=torch.uint8), "in / 32, 16"),
        (torch.zeros(2, 3, 1, 16), torch.zeros(2, 3, 1), "expected bytes"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks: Tensor, scales: Tensor, reason: str) -> None:
    with pytest.raises(WeightsRefused, match=reason):
        DequantisedExperts(TensorsInMemory({"x_blocks": blocks, "x_scales": scales}))


def saved(folder: Path, tokenizer: Any, *, without: str = "") -> Any:
    """gpt-oss in MXFP4, as it is published; the model of the numbers that it means."""
    model_type, settings = WINDOWED["gpt_oss"]
    model = make_tiny(model_type, **settings | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 32})
    published = published_tensors(model)
    tensors = {name: published.read(name).clone().contiguous() for name in published.stored}
    with torch.no_grad():
        for place, (name, parameter) in enumerate(model.named_parameters()):
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            experts, inputs, outputs = parameter.shape
            blocks, scales = packed(place, experts, outputs, inputs // 32, scales=(120, 124))
            parameter.copy_(convert_moe_packed_tensors(blocks, scales))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    tensors = {name: tensor for name, tensor in tensors.items() if not without or not name.endswith(without)}
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": STATED}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return model


def test_a_published_folder_is_served(tmp_path: Path, byte_tokenizer: Any) -> None:
    model = saved(tmp_path, byte_tokenizer)
    assert inspect(tmp_path).verdict == "can be served"
    runner = load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64))
    check_runner(runner, own_logits(model))
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj
    layer: Any = runner.network.layers[1]  # type: ignore[attr-defined]
    assert torch.equal(layer.mlp.gate_up[:, :32], gate_up.transpose(1, 2)[:, ::2])


def test_a_folder_without_scales_is_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    saved(tmp_path, byte_tokenizer, without="down_proj_scales")
    with pytest.raises(ValueError, match=r"missing are .*layers.0.mlp.experts.down_proj, .*left over are .*_blocks"):
        load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64))
