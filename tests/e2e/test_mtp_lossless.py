"""With a target's own MTP module, read from the target's checkpoint, the output is plain decoding's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from engine_harness import Connect, make_runner, plain, run
from head_runs import accepted_in, check_chunks_and_preemption, drafting, said_plainly
from mtp_modules import mimo_weights
from safetensors.torch import load_file, save_file
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, prompts, request_of, taught_head
from torch import Tensor
from transformers import PreTrainedModel

from draft_service.mtp.config import MtpConfig
from draft_service.mtp.drafter import MtpDrafter
from outrider.sampling import SamplingParams
from target_service.model.head_projection import read_draft_head

# A target with latent attention and experts, as is its module.
DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(teacher: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher, and below MiMo's names a module that has learnt what it says."""
    folder = tmp_path_factory.mktemp("target")
    return with_module(teacher, folder, mimo_weights(taught_head(teacher, "mtp")))


def with_module(model: PreTrainedModel, folder: Path, module: dict[str, Tensor]) -> Path:
    """The model's checkpoint with a module in it, and the count of modules in its config.json."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | module, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def made(checkpoint: Path, drafters: list[MtpDrafter] | None = None, **settings: Any) -> Connect:
    defaults = {"base_model": str(checkpoint), "num_steps": 4, "dtype": "float32", "race_sharpness": 2.0}
    config = MtpConfig(**(defaults | settings))
    return drafting(lambda: MtpDrafter(config), [] if drafters is None else drafters)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("topk", [1, 4], ids=["chain", "tree"])
def test_output_is_plain_decoding(
    checkpoint: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, sampling: SamplingParams, topk: int
) -> None:
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    said = said_plainly(teacher, wanted)
    runner, drafters = make_runner(tiny_model), list[MtpDrafter]()
    runner.draft_head = read_draft_head(str(checkpoint), LAYERS, HIDDEN)
    assert runner.draft_head.layers == (LAYERS,) and runner.draft_head.projection is None
    outcomes = run(runner, wanted, connect=made(checkpoint, drafters, topk=topk), stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == said
    # Of 96 tokens; more than one for each step, so that later steps of the one module are right too.
    assert accepted_in(outcomes) > 56
    stats = drafters[0].stats()
    assert stats["mtp_cache_used_tokens"] == 0
    # Nothing but the answer to an open, which comes before the prompt's features.
    assert stats["mtp_missing_features_total"] == len(wanted)


@pytest.mark.parametrize("kv_tokens", [2048, 120], ids=["roomy", "preempting"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float8_e4m3"])
def test_chunks_preemption_and_short_types_do_not_matter(
    checkpoint: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, kv_tokens: int, feature_dtype: str
) -> None:
    check_chunks_and_preemption(teacher, tiny_model, made(checkpoint, feature_dtype=feature_dtype), kv_tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_deepseek_target_drafts_with_its_own_layer(sampling: SamplingParams, tmp_path: Path) -> None:
    """The module has the weights of the target's last layer, and knows nothing: no draft of it may show."""
    model = make_tiny("deepseek_v3", **DEEPSEEK)
    model.save_pretrained(tmp_path)
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    weights = load_file(tmp_path / "model.safetensors")
    module = {own + n.removeprefix(last): t.clone() for n, t in weights.items() if n.startswith(last)}
    module |= {f"{own}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    module[f"{own}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    folder, drafters = with_module(model, tmp_path, module), list[MtpDrafter]()
    draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
    assert draft_head.layers == (LAYERS,) and draft_head.projection is None
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    runner = make_runner(model)
    # The states that the module reads are those of a target that caches latents.
    assert runner.latent
    outcomes = run(runner, wanted, connect=made(folder, drafters), stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == [plain(model, one) for one in wanted]
    assert sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0
    shape = drafters[0].head.config
    assert shape.latent is not None and shape.experts is not None
