"""MTP modules load from their target's checkpoint as the published formula has them, and draft what it would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_drafting import (
    COUPLED,
    REJECTION,
    SETTINGS,
    feed,
    opened,
    plain_growth,
    same_tree,
    sequence_of,
    text,
)
from eagle_heads import CausalPass
from mtp_modules import (
    CONFIGS,
    DEEPSEEK,
    EXPERTS,
    HIDDEN,
    LAYERS,
    MIMO,
    MIMO_V2,
    PlainModule,
    checkpoint_tensors,
    plain_logits,
    write,
)
from tokenizer_kinds import byte_level
from torch import Tensor

from draft_service.eagle.head import IN_FP32, EagleHead
from draft_service.mtp.checkpoint import MtpCheckpoint
from draft_service.mtp.drafter import MtpConfig, MtpDrafter
from draft_service.noise import exponential
from outrider.heads import HeadRefused, tokenizer_fingerprint
from outrider.sampling import VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.weights import Weights
from tree_kernels.growth import GREEDY_TEMPERATURE

pytestmark = pytest.mark.values


def modules_of(config: dict[str, Any], most: int) -> int:
    """How many modules there can be."""
    return 1 if config["model_type"] == "qwen3_next" else most


def softmax_of(after: Callable[[tuple[int, ...]], Tensor]) -> Callable[[tuple[int, ...]], Tensor]:
    """Probabilities as greedy trees are drafted by."""
    return lambda path: (after(path) / GREEDY_TEMPERATURE).softmax(dim=0)


def depth_of(tree: TokenTree) -> int:
    depths = [0]
    for parent in tree.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def states(length: int) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(length))


def load(
    folder: Path, modules: int = 0, *, dtype: torch.dtype = torch.float32, token_map: Sequence[int] | None = None
) -> list[EagleHead]:
    return MtpCheckpoint(folder, modules).load(replace(IN_FP32, dtype=dtype), token_map=token_map)


def drafter(folder: Path, **settings: Any) -> MtpDrafter:
    own = {name: value for name, value in SETTINGS.items() if name != "projection"}
    made = MtpDrafter(MtpConfig(**(own | {"base_model": str(folder)} | settings)))
    made.start()
    return made


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("own_embedding", [False, True], ids=["the target's embedding", "its own"])
def test_each_modules_logits_are_the_published_formulas(
    config: dict[str, Any], own_embedding: bool, tmp_path: Path
) -> None:
    modules = modules_of(config, 2)
    tensors = checkpoint_tensors(config, modules=modules, own_embedding=own_embedding)
    heads = load(write(tmp_path, config, tensors), modules, dtype=torch.float64)
    tokens, features = text(29), states(29)
    for number, head in enumerate(heads):
        plain = PlainModule(config, tensors, number)
        output = head(torch.tensor(tokens), features.double(), torch.arange(29), CausalPass())
        hidden = plain.hidden(tokens, features)
        # Queries and keys are turned in fp32.
        torch.testing.assert_close(output.carried, hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.logits(output.lm_input), plain.logits(hidden), rtol=1e-4, atol=1e-4)
        # What a module makes is its output after its own last norm.
        assert output.carried is output.lm_input
        # The target's state: after its last norm for DeepSeek-V3, before it for MiMo.
        assert head.config.feature_layers == (LAYERS - ("mimo" in config["model_type"]),)
    first, *others = heads
    assert own_embedding or all(one.embedding is first.embedding and one.lm_head is first.lm_head for one in others)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("modules", [1, 2, 5])
def test_trees_are_the_plain_modules(config: dict[str, Any], topk: int, modules: int, tmp_path: Path) -> None:
    """Four levels: with fewer modules the last one follows itself, and a fifth is not loaded."""
    modules = modules_of(config, modules)
    tensors = checkpoint_tensors(config, modules=modules, own_embedding=modules == 2)
    made = drafter(write(tmp_path, config, tensors), topk=topk, num_modules=modules)
    tokens, known = text(21), states(21)
    (tree,) = made.propose([opened(made, sequence_of(tokens), known)])
    after = plain_logits(config, tensors, modules, tokens, known)
    same_tree(tree, plain_growth(tokens[-1], softmax_of(after), topk=topk))
    assert tree.drafted == (4 if topk == 1 else 14)
    assert made.stats()["mtp_feature_rows_total"] == 20
    assert len(made.drafting.network.cache_shapes) == min(modules, 4)


@pytest.mark.parametrize("name", ["mimo", "mimo-v2", "deepseek, experts"])
@pytest.mark.parametrize("max_rows", [2048, 5], ids=["one pass", "several"])
def test_modules_follow_what_is_committed(name: str, max_rows: int, tmp_path: Path) -> None:
    """Three sequences that commit different numbers of tokens, trees between, and prompts that are absorbed early."""
    config = CONFIGS[name]
    tensors = checkpoint_tensors(config, modules=3)
    made = drafter(write(tmp_path, config, tensors), num_modules=3, max_rows=max_rows, num_draft_tokens=9)
    texts, known = [text(40, seed) for seed in range(3)], states(40)
    sequences = [sequence_of(tokens[: 4 + 3 * i]) for i, tokens in enumerate(texts)]
    for sequence in sequences:
        made.open(sequence)
        feed(sequence, known[:2], 0)
    made.absorb(sequences)
    for step, commits in enumerate([(0, 0, 0), (1, 3, 2), (2, 1, 1), (4, 1, 6), (1, 1, 1)]):
        for sequence, tokens, count in zip(sequences, texts, commits, strict=True):
            length = len(sequence.token_ids)
            sequence.token_ids += tokens[length : length + count]
            window = sequence.features
            assert window is not None
            feed(sequence, known[window.end : len(sequence.token_ids) - 1], window.end)
        # Not all of them want a tree each time.
        wanting = sequences[step % 3 :]
        for sequence, tree in zip(wanting, made.propose(wanting), strict=True):
            after = plain_logits(config, tensors, 3, sequence.token_ids, known)
            same_tree(tree, plain_growth(sequence.root, softmax_of(after), num_draft_tokens=9))
    for sequence in sequences:
        made.close(sequence)
    assert made.stats()["mtp_cache_used_tokens"] == 0


@pytest.mark.parametrize("mode", [COUPLED, REJECTION], ids=lambda mode: mode.value)
def test_every_mode_draws_from_its_levels_module(mode: VerificationMode, tmp_path: Path) -> None:
    """Of a chain, whose path is known: each score or distribution is of the module of that depth."""
    tensors = checkpoint_tensors(MIMO, modules=3)
    made = drafter(write(tmp_path, MIMO, tensors), topk=1, num_modules=3, num_steps=3, num_draft_tokens=3)
    tokens, known = text(12), states(12)
    (tree,) = made.propose([opened(made, sequence_of(tokens, mode), known)])
    assert tree.drafted == 3
    after = plain_logits(MIMO, tensors, 3, tokens, known)
    for row in range(3):
        chances = after(tree.token_ids[1 : 1 + row]).softmax(dim=0)
        if mode is REJECTION:
            drawn_from = tree.distributions[row]
            weights = torch.tensor(drawn_from.weights, dtype=torch.float64)
            ids = list(drawn_from.token_ids)
            torch.testing.assert_close(weights / weights.sum(), chances[ids] / chances[ids].sum(), rtol=0, atol=1e-3)
        else:
            noise = [float(exponential(np.uint64(7), np.uint64(len(tokens) + row), np.uint64(t))) for t in range(60)]
            assert tree.token_ids[1 + row] == int((chances / torch.tensor(noise, dtype=torch.float64)).argmax())


def test_a_text_shorter_than_its_modules_gets_trees_as_deep_as_they_know_it(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(MIMO, modules=3)
    made = drafter(write(tmp_path, MIMO, tensors), topk=1, num_modules=3)
    tokens, known = text(9), states(9)
    for length, drafted in ((2, 1), (3, 2), (4, 4), (5, 4)):
        (tree,) = made.propose([opened(made, sequence_of(tokens[:length]), known)])
        after = plain_logits(MIMO, tensors, 3, tokens[:length], known)
        same_tree(tree, plain_growth(tokens[length - 1], softmax_of(after), topk=1, num_steps=drafted))
    # The same where the target's states begin late.
    late = sequence_of(tokens)
    made.open(late)
    feed(late, known[6:8], 6)
    (tree,) = made.propose([late])
    after = plain_logits(MIMO, tensors, 3, tokens[6:], known[6:])
    same_tree(tree, plain_growth(tokens[-1], softmax_of(after), topk=1, num_steps=2))


def test_a_gap_in_the_states_costs_a_token_of_each_later_module(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(MIMO, modules=3)
    made = drafter(write(tmp_path, MIMO, tensors), num_modules=3)
    tokens, known = text(16), states(16)
    sequence = opened(made, sequence_of(tokens[:8]), known)
    assert made.propose([sequence])[0].drafted == 14
    assert sequence.state.rows == [7, 6, 5]
    sequence.token_ids += tokens[8:]
    # Those of tokens 7 to 12 never come.
    feed(sequence, known[13:15], 13)
    (tree,) = made.propose([sequence])
    assert sequence.state.rows == [9, 7, 5] and depth_of(tree) == 2
    sequence.token_ids += tokens[:1]
    feed(sequence, known[15:16], 15)
    (tree,) = made.propose([sequence])
    assert sequence.state.rows == [10, 8, 6] and depth_of(tree) == 4


def test_a_token_map_cuts_what_the_module_says(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(MIMO)
    (head,) = load(write(tmp_path, MIMO, tensors), token_map=[3, 9, 41])
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"][[3, 9, 41]])


def test_the_bias_that_balances_experts_stays_exact_in_half_precision(tmp_path: Path) -> None:
    config = DEEPSEEK | EXPERTS
    tensors = checkpoint_tensors(config)
    (head,) = load(write(tmp_path, config, tensors), dtype=torch.bfloat16)
    published = tensors[f"model.layers.{LAYERS}.mlp.gate.e_score_correction_bias"]
    assert torch.equal(head.weights()["layers.0.mlp.gate.e_score_correction_bias"], published)
    assert not torch.equal(published, published.bfloat16().float())
    assert head.embedding.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MIMO | {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        (MIMO | {"hidden_act": "sinh"}, "sinh"),
        (MIMO | {"sliding_window": 64}, "sliding window"),
        (MIMO | {"intermediate_size": 25}, r"of another shape .*gate_proj.weight is \[24, 16\], expected \[25, 16\]"),
        (DEEPSEEK | {"num_hidden_layers": LAYERS + 2}, "no MTP module, which has one of"),
        (DEEPSEEK | {"model_type": "ctrl"}, "a ctrl is not served"),
        (DEEPSEEK | EXPERTS | {"scoring_func": "softmax"}, "softmax"),
        (DEEPSEEK | EXPERTS | {"n_group": 3}, "groups"),
        (DEEPSEEK | EXPERTS | {"n_routed_experts": 6, "n_group": 2}, "left over"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank"),
        (DEEPSEEK | {"num_nextn_predict_layers": 3}, "counts 3 MTP modules, .* has 2: num_modules"),
        (MIMO_V2 | {"sliding_window_size": 128}, "sliding window of 128"),
        (MIMO_V2 | {"swa_v_head_dim": 2}, "values of width 2 beside keys of 4"),
        (MIMO_V2 | {"attention_value_scale": 0.707}, "scaled by 0.707"),
    ],
    ids=[
        "quantised", "activation", "window", "width", "absent", "family", "scores", "groups", "experts", "latent",
        "count", "MiMo-V2's window", "MiMo-V2's values", "MiMo-V2's scale",
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_the_reason(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    published = {"mimo": MIMO, "mimo_v2_flash": MIMO_V2}.get(config["model_type"], DEEPSEEK)
    published = published | (EXPERTS if "n_group" in config else {})
    folder = write(tmp_path, config, checkpoint_tensors(published))
    with pytest.raises(HeadRefused, match=reason):
        MtpCheckpoint(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda *_: {}, "missing are layers.0.mlp.up_proj.weight$"),
        (lambda name, weight: {name: weight.to(torch.float8_e4m3fn)}, r"no floating .*up_proj.weight \(F8_E4M3\)"),
        (
            lambda name, weight: {name: weight, f"{name}_scale_inv": weight},
            "left over are layers.0.mlp.up_proj.w",
        ),
        (lambda name, weight: {name: weight[:3]}, r"up_proj.weight is \[3, 16\], expected \[24, 16\]"),
    ],
    ids=["missing", "quantised", "scaled", "another shape"],
)
def test_weights_of_a_later_module_are_checked_before_any_is_loaded(
    change: Callable[[str, Tensor], dict[str, Tensor]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = checkpoint_tensors(MIMO)
    name = "model.mtp_layers.1.mlp.up_proj.weight"
    folder = write(tmp_path, MIMO | {"num_nextn_predict_layers": 2}, tensors | change(name, tensors.pop(name)))
    monkeypatch.setattr(Weights, "tensor", None)
    with pytest.raises(HeadRefused, match=reason) as refused:
        MtpDrafter(MtpConfig(base_model=str(folder)))
    assert "\n" not in refused.value.message
    # The first one is whole.
    assert len(MtpCheckpoint(folder, 1).configs) == 1


def test_an_embedding_that_nobody_has_is_refused(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(MIMO)
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(HeadRefused, match=r"none of model.embed_tokens.weight"):
        MtpCheckpoint(write(tmp_path, MIMO, tensors))


def test_sinks_are_refused(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(MIMO_V2)
    tensors["model.mtp.layers.0.self_attn.attention_sink_bias"] = torch.zeros(4)
    with pytest.raises(HeadRefused, match="attention sinks"):
        MtpCheckpoint(write(tmp_path, MIMO_V2, tensors))


def test_as_many_modules_draft_as_are_wanted_or_counted_or_there(tmp_path: Path) -> None:
    def modules(counted: int | None, wanted: int) -> int:
        config = MIMO | {"num_nextn_predict_layers": counted}
        return len(MtpCheckpoint(write(tmp_path, config, checkpoint_tensors(MIMO, modules=3)), wanted).configs)

    assert [modules(counted, 0) for counted in (1, 2, 3, None)] == [1, 2, 3, 3]
    assert [modules(counted, wanted) for counted, wanted in ((1, 2), (3, 1), (None, 2))] == [2, 1, 2]
    with pytest.raises(HeadRefused, match=r"4 MTP modules are wanted .* has 3"):
        modules(1, 4)


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="base-model"):
        MtpDrafter(MtpConfig())
    folder = write(tmp_path, DEEPSEEK | EXPERTS, checkpoint_tensors(DEEPSEEK | EXPERTS))
    assert MtpDrafter(MtpConfig(base_model=str(folder), cuda_graphs=True, num_modules=1)).limits.max_depth == 8
    folder = write(tmp_path, MIMO, checkpoint_tensors(MIMO))
    with pytest.raises(SettingsError, match="2 modules cannot be captured"):
        MtpDrafter(MtpConfig(base_model=str(folder), cuda_graphs=True, num_modules=2))
    assert MtpDrafter(MtpConfig(base_model=str(folder), cuda_graphs=True, num_modules=1)).limits.max_depth == 8


def test_modules_are_for_their_own_targets_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path, MIMO, checkpoint_tensors(MIMO))
    assert MtpDrafter(MtpConfig(base_model=str(folder))).tokenizer_fingerprint == ""
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    found = MtpDrafter(MtpConfig(base_model=str(folder))).tokenizer_fingerprint
    assert found == tokenizer_fingerprint(tokenizer)
