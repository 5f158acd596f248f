"""MTP modules load from their target's checkpoint as the published formula has them, and draft what it would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_drafting import SETTINGS, opened, plain_growth, same_tree, sequence_of, text
from mtp_modules import CONFIGS, DEEPSEEK, EXPERTS, HIDDEN, LAYERS, MIMO, PlainModule, checkpoint_tensors, write
from torch import Tensor
from torch.nn import functional

from draft_service.checkpoints.facts import HeadRefused
from draft_service.eagle.deepseek_layers import Router
from draft_service.mtp.checkpoint import load_mtp, read_mtp_config
from draft_service.mtp.config import MtpConfig
from draft_service.mtp.drafter import MtpDrafter
from outrider.settings import SettingsError


def states(length: int) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(length))


def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over the rows of one pass."""
    parts = (part.transpose(-3, -2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(-3, -2)


def drafter(folder: Path, **settings: Any) -> MtpDrafter:
    own = {name: value for name, value in SETTINGS.items() if name != "projection"}
    made = MtpDrafter(MtpConfig(**(own | {"base_model": str(folder)} | settings)))
    made.start()
    return made


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("own_embedding", [False, True], ids=["the target's embedding", "its own"])
def test_one_modules_logits_are_the_published_formulas(
    config: dict[str, Any], own_embedding: bool, tmp_path: Path
) -> None:
    tensors = checkpoint_tensors(config, own_embedding=own_embedding)
    head = load_mtp(write(tmp_path, config, tensors), dtype=torch.float64)
    plain, tokens, features = PlainModule(config, tensors), text(30), states(29)
    output = head(torch.tensor(tokens[1:]), features.double(), torch.arange(29), attend)
    # Queries and keys are turned in fp32.
    torch.testing.assert_close(output.features, plain.hidden(tokens[1:], features), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.logits(output.lm_input)[-1], plain.logits(tokens, features), rtol=1e-4, atol=1e-4)
    # The state after the target's last norm, and the module's own after its last one.
    assert read_mtp_config(tmp_path).feature_layers == (LAYERS,)
    assert output.features is output.lm_input


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
def test_several_steps_are_the_plain_modules(config: dict[str, Any], topk: int, tmp_path: Path) -> None:
    tensors = checkpoint_tensors(config)
    made = drafter(write(tmp_path, config, tensors), topk=topk)
    plain, tokens, known = PlainModule(config, tensors), text(21), states(21)
    (tree,) = made.propose([opened(made, sequence_of(tokens), known)])
    wanted = plain_growth(tokens[-1], lambda path: plain.logits(tokens, known, path).softmax(dim=0), topk=topk)
    same_tree(tree, wanted)
    assert tree.drafted == (4 if topk == 1 else 14)
    assert made.stats()["mtp_feature_rows_total"] == 20


def test_a_token_map_cuts_what_the_module_says(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(MIMO)
    head = load_mtp(write(tmp_path, MIMO, tensors), token_map=[3, 9, 41])
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"][[3, 9, 41]])


def test_the_bias_that_balances_experts_stays_exact_in_half_precision(tmp_path: Path) -> None:
    config = DEEPSEEK | EXPERTS
    tensors = checkpoint_tensors(config)
    head = load_mtp(write(tmp_path, config, tensors), dtype=torch.bfloat16)
    (router,) = [module for module in head.modules() if isinstance(module, Router)]
    published = tensors[f"model.layers.{LAYERS}.mlp.gate.e_score_correction_bias"]
    assert torch.equal(router.e_score_correction_bias, published)
    assert not torch.equal(published, published.bfloat16().float())
    assert router.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MIMO | {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        (MIMO | {"hidden_act": "gelu"}, "gelu"),
        (MIMO | {"sliding_window": 64}, "sliding window"),
        (MIMO | {"partial_rotary_factor": 0.5}, "part of a head's width"),
        (MIMO | {"intermediate_size": 25}, "has shape"),
        (DEEPSEEK | {"num_hidden_layers": LAYERS + 2}, "no MTP module below"),
        (DEEPSEEK | EXPERTS | {"scoring_func": "softmax"}, "softmax"),
        (DEEPSEEK | EXPERTS | {"n_group": 3}, "groups"),
        (DEEPSEEK | EXPERTS | {"n_routed_experts": 6, "n_group": 2}, "do not fit"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank"),
    ],
    ids=["quantised", "activation", "window", "rotary", "width", "absent", "scores", "groups", "experts", "latent"],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_the_reason(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    published = DEEPSEEK | (EXPERTS if "n_group" in config else {}) if config["model_type"] == "deepseek_v3" else MIMO
    folder = write(tmp_path, config, checkpoint_tensors(published))
    with pytest.raises(HeadRefused, match=reason):
        load_mtp(folder)


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="base-model"):
        MtpDrafter(MtpConfig())
    folder = write(tmp_path, DEEPSEEK | EXPERTS, checkpoint_tensors(DEEPSEEK | EXPERTS))
    with pytest.raises(SettingsError, match="captured"):
        MtpDrafter(MtpConfig(base_model=str(folder), cuda_graphs=True))
