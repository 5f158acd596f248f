"""With a target's own MTP module, read from the target's checkpoint, the output is plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from draft_process import Service
from engine_harness import Connect, Outcome, make_runner, plain_each, run
from head_runs import (
    WireRun,
    accepted_in,
    check_chunks_and_preemption,
    check_merged_with_trie,
    drafting,
    wire_loop,
)
from mtp_modules import PUBLISHED, module_weights
from safetensors.torch import load_file, save_file
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, prompts, request_of, taught_modules
from torch import Tensor
from transformers import PreTrainedModel

from draft_service.mtp.drafter import MtpConfig, MtpDrafter
from outrider.sampling import SamplingParams
from target_service.model.head_projection import read_draft_head
from tree_models.spec import ExpertsSpec, LatentSpec

pytestmark = pytest.mark.values

# Layouts whose modules may have Llama's layer, as the tiny target has.
OF_LLAMA = ("deepseek_v3", "mimo", "mimo_v2_flash")
# Targets with experts, as have their modules: one with latent attention, one with positions over half of a head.
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS | {
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
    "glm4_moe": EXPERTS | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(teacher: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher, and below MiMo's names two modules that have learnt what it says."""
    return taught(teacher, "mimo", tmp_path_factory.mktemp("target"))


def taught(teacher: PreTrainedModel, layout: str, folder: Path, *, spoilt: bool = False) -> Path:
    """The teacher's checkpoint with two taught modules in a layout, the second one of which may be `spoilt`."""
    published = PUBLISHED[layout]
    modules = taught_modules(teacher, normed_state=layout == "deepseek_v3", chained=published.chained)
    weights = module_weights(layout, modules, LAYERS)
    if spoilt:
        torch.manual_seed(1)
        own = {n: t for n, t in weights.items() if n not in module_weights(layout, modules[:1], LAYERS)}
        weights |= {name: tensor[torch.randperm(len(tensor))] for name, tensor in own.items()}
    return with_modules(teacher, folder, weights)


def with_modules(model: PreTrainedModel, folder: Path, modules: dict[str, Tensor]) -> Path:
    """The model's checkpoint with modules in it."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | modules, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def made(checkpoint: Path, drafters: list[MtpDrafter] | None = None, **settings: Any) -> Connect:
    defaults = {"base_model": str(checkpoint), "num_steps": 4, "dtype": "float32", "gumbel_sharpness": 2.0}
    config = MtpConfig(**(defaults | settings))
    return drafting(lambda: MtpDrafter(config), [] if drafters is None else drafters)


def spoken(
    teacher: PreTrainedModel,
    model: PreTrainedModel,
    folder: Path,
    sampling: SamplingParams,
    drafters: list[MtpDrafter] | None = None,
    **settings: Any,
) -> list[Outcome]:
    """What comes of drafting with a checkpoint's modules, which is what plain decoding says."""
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    runner = make_runner(model)
    runner.draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
    assert runner.draft_head.projection is None
    outcomes = run(runner, wanted, connect=made(folder, drafters, **settings), stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == plain_each(teacher, wanted)
    return outcomes


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("topk", [1, 4], ids=["chain", "tree"])
@pytest.mark.parametrize(("layout", "num_modules"), [("mimo", 1), *((layout, 2) for layout in OF_LLAMA)])
def test_output_is_plain_decoding(
    teacher: PreTrainedModel,
    tiny_model: PreTrainedModel,
    layout: str,
    num_modules: int,
    sampling: SamplingParams,
    topk: int,
    tmp_path: Path,
) -> None:
    folder = taught(teacher, layout, tmp_path)
    drafters = list[MtpDrafter]()
    outcomes = spoken(teacher, tiny_model, folder, sampling, drafters, num_modules=num_modules, topk=topk)
    # Of 96 tokens; more than one for each step, so that later steps are right too.
    assert accepted_in(outcomes) > 56
    stats = drafters[0].stats()
    assert stats["mtp_cache_used_tokens"] == 0
    # Nothing but the answer to an open, which comes before the prompt's features.
    assert stats["mtp_missing_features_total"] == len(outcomes)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("layout", OF_LLAMA)
def test_the_second_module_drafts_the_second_level(
    teacher: PreTrainedModel, tiny_model: PreTrainedModel, layout: str, sampling: SamplingParams, tmp_path: Path
) -> None:
    """Chains of two: where the second module is spoilt, the second token is as good as never accepted, though the first
    module could guess it; and the first token as often as ever."""
    whole, spoilt = (taught(teacher, layout, tmp_path / name, spoilt=name == "spoilt") for name in ("whole", "spoilt"))

    def accepted(folder: Path, **settings: int) -> int:
        return accepted_in(spoken(teacher, tiny_model, folder, sampling, topk=1, **settings))

    one, both = accepted(whole, num_steps=1), accepted(whole, num_steps=2)
    without = accepted(spoilt, num_steps=2)
    # 44, 63 and 44 to 48 of 96 tokens. Where the first one drafts both: 56 to 60.
    assert both >= one + 15
    assert one <= without <= one + 5
    assert accepted(spoilt, num_steps=2, num_modules=1) == accepted(whole, num_steps=2, num_modules=1) > without


@pytest.mark.parametrize("kv_tokens", [2048, 120], ids=["roomy", "preempting"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float8_e4m3"])
def test_chunks_preemption_and_short_types_do_not_matter(
    checkpoint: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, kv_tokens: int, feature_dtype: str
) -> None:
    check_chunks_and_preemption(teacher, tiny_model, made(checkpoint, feature_dtype=feature_dtype), kv_tokens)


def test_trie_and_modules_draft_for_the_same_sequences(
    checkpoint: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_MERGED_MERGED_DRAFTERS", "mtp,trie")
    monkeypatch.setenv("OUTRIDER_MTP_BASE_MODEL", str(checkpoint))
    monkeypatch.setenv("OUTRIDER_MTP_DTYPE", "float32")
    assert check_merged_with_trie(teacher, make_runner(tiny_model), least=40)["mtp_feature_rows_total"] > 0


def test_over_the_wire_modules_come_back_with_their_service(
    checkpoint: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, service: Service
) -> None:
    """Lost in the middle, and started again: its modules read the text anew."""
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    loop, link = wire_loop(make_runner(tiny_model), service)
    going = WireRun(loop, service, ("--drafter", "mtp", "--base-model", str(checkpoint), "--dtype", "float32"))
    try:
        going.begin()
        going.add(wanted)
        going.steps(4)
        before = going.accepted
        going.lose()
        going.steps(2)
        going.begin()
        going.steps()
    finally:
        link.stop()
    assert [tuple(said) for said in going.said.values()] == plain_each(teacher, wanted)
    # Since it was back, and before.
    assert going.accepted > 10 and before > 0


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_with_experts_drafts_with_its_own_layer(family: str, sampling: SamplingParams, tmp_path: Path) -> None:
    """The module has the weights of the target's last layer, and knows nothing: no draft of it may show."""
    model = make_tiny(family, **FAMILIES[family])
    model.save_pretrained(tmp_path)
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    weights = load_file(tmp_path / "model.safetensors")
    module = {own + n.removeprefix(last): t.clone() for n, t in weights.items() if n.startswith(last)}
    module |= {f"{own}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    module[f"{own}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    folder, drafters = with_modules(model, tmp_path, module), list[MtpDrafter]()
    draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
    assert draft_head.layers == (LAYERS,) and draft_head.projection is None
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    runner = make_runner(model)
    # The states that a module reads may be those of a target that caches latents.
    assert bool(runner.latent) is (family == "deepseek_v3")
    outcomes = run(runner, wanted, connect=made(folder, drafters), stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == plain_each(model, wanted)
    assert sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0
    (layer,) = drafters[0]._head.layer_specs
    assert isinstance(layer.attention, LatentSpec) is (family == "deepseek_v3") and isinstance(layer.mlp, ExpertsSpec)
    assert layer.attention is not None and layer.attention.rotary is not None and layer.attention.rotary.width == 8
