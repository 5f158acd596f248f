"""Heads of every published layout load as the same head, and what does not fit is refused with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import CausalPass, beginning
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.checkpoints.vocabulary import read_token_map
from draft_service.eagle.checkpoint import EagleCheckpoint, save_head
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.neural.network import RowOutput
from outrider.heads import HeadRefused

VOCABULARY, DRAFT, HIDDEN, HEADS, KV_HEADS, INNER = 50, 20, 16, 4, 2, 24
TARGET_LAYERS = 12
LAYER_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}
Tensors = dict[str, Tensor]


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.3


def layer(prefix: str, width: int) -> Tensors:
    """The weights that every kind of first layer has."""
    kv = HIDDEN // HEADS * KV_HEADS
    return {
        f"{prefix}.self_attn.q_proj.weight": weight(HIDDEN, width),
        f"{prefix}.self_attn.k_proj.weight": weight(kv, width),
        f"{prefix}.self_attn.v_proj.weight": weight(kv, width),
        f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": weight(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + weight(HIDDEN),
    }


def eagle3_tensors() -> Tensors:
    """An EAGLE-3 head as SafeAILab names it."""
    ids = torch.arange(DRAFT) * 2 + 1
    return {
        **layer("midlayer", 2 * HIDDEN),
        "midlayer.input_layernorm.weight": 1 + weight(HIDDEN),
        "midlayer.hidden_norm.weight": 1 + weight(HIDDEN),
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "norm.weight": 1 + weight(HIDDEN),
        "lm_head.weight": weight(DRAFT, HIDDEN),
        "d2t": ids - torch.arange(DRAFT),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True),
    }


def eagle1_tensors() -> Tensors:
    """An EAGLE-1 head as SafeAILab names it, with its copy of the embedding."""
    return {
        **layer("layers.0", HIDDEN),
        "fc.weight": weight(HIDDEN, 2 * HIDDEN),
        "fc.bias": weight(HIDDEN),
        "embed_tokens.weight": weight(VOCABULARY, HIDDEN),
    }


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for old, new in pairs:
        tensors = {new + n[len(old) :] if n.startswith(old) else n: t for n, t in tensors.items()}
    return tensors


def speculators(kind: str, **extra: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "architectures": [f"{kind.capitalize()}Speculator"],
        "transformer_layer_config": LAYER_CONFIG,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/target"}},
        **extra,
    }


SAFEAI = LAYER_CONFIG | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT}
SGLANG = LAYER_CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
}
EAGLE3_LAYOUTS: dict[str, Callable[[Path, Tensors], Path]] = {
    "safeailab": lambda folder, tensors: write(folder, SAFEAI, tensors),
    "sglang": lambda folder, tensors: write(folder, SGLANG, renamed(tensors, ("midlayer", "model.layers.0"))),
    "specforge": lambda folder, tensors: write(folder, SGLANG, tensors),
    "speculators": lambda folder, tensors: write(
        folder,
        speculators("eagle3", draft_vocab_size=DRAFT, eagle_aux_hidden_state_layer_ids=[2, 6, 9]),
        renamed(tensors, ("midlayer", "layers.0")) | {"verifier_norm.weight": weight(HIDDEN)},
    ),
}
EAGLE1_LAYOUTS: dict[str, Callable[[Path, Tensors], Path]] = {
    "safeailab": lambda folder, tensors: write(folder, LAYER_CONFIG | {"architectures": ["LlamaForCausalLM"]}, tensors),
    "sglang": lambda folder, tensors: write(
        folder, LAYER_CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}, tensors
    ),
    "speculators": lambda folder, tensors: write(
        folder,
        speculators("eagle", fusion_bias=True, layernorms=False),
        renamed(tensors, ("fc", "fusion_fc"), ("layers.0", "transformer")),
    ),
}


@pytest.fixture
def target(tmp_path: Path) -> TargetCheckpoint:
    torch.manual_seed(1)
    config = LAYER_CONFIG | {"num_hidden_layers": TARGET_LAYERS}
    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    return TargetCheckpoint(write(tmp_path / "target", config, tensors))


def output(head: EagleHead, tokens: Tensor, states: Tensor) -> RowOutput:
    """Causal, without a cache."""
    return head(tokens, head.project(states), torch.arange(len(tokens)), CausalPass())


@pytest.mark.parametrize("layout", EAGLE3_LAYOUTS)
def test_eagle3_loads_from_every_layout(layout: str, tmp_path: Path, target: TargetCheckpoint) -> None:
    torch.manual_seed(0)
    tensors = eagle3_tensors()
    reference = EagleCheckpoint(EAGLE3_LAYOUTS["safeailab"](tmp_path / "reference", tensors)).load(target=target)
    head = EagleCheckpoint(EAGLE3_LAYOUTS[layout](tmp_path / layout, tensors)).load(target=target)
    config = head.config
    assert (config.kind, config.num_features, config.draft_vocab_size) == ("eagle3", 3, DRAFT)
    # SafeAILab's says nothing, so the default is taken; the others name the same layers each in its own count.
    assert config.layers_of(TARGET_LAYERS) == (1, 5, 8)
    assert config.rope["rope_theta"] == 5000.0 and config.rms_norm_eps == 1e-5
    assert head.token_ids is not None and head.token_ids.tolist() == list(range(1, 2 * DRAFT, 2))
    assert torch.equal(head.embedding, target.embedding())
    tokens, states = torch.randint(VOCABULARY, (5,)), torch.randn(5, 3 * HIDDEN)
    assert torch.equal(
        head.logits(output(head, tokens, states).lm_input), reference.logits(output(reference, tokens, states).lm_input)
    )


@pytest.mark.parametrize("layout", EAGLE1_LAYOUTS)
def test_eagle1_loads_from_every_layout(layout: str, tmp_path: Path, target: TargetCheckpoint) -> None:
    torch.manual_seed(0)
    tensors = eagle1_tensors()
    head = EagleCheckpoint(EAGLE1_LAYOUTS[layout](tmp_path / layout, tensors)).load(target=target)
    config = head.config
    assert (config.kind, config.fc_bias, config.input_norm, config.tied_lm_head) == ("eagle", True, False, True)
    # The state after the last norm.
    assert config.layers_of(TARGET_LAYERS) == (TARGET_LAYERS,)
    assert torch.equal(head.embedding, tensors["embed_tokens.weight"])
    assert torch.equal(head.lm_head.weight, target.lm_head())
    states = torch.randn(3, HIDDEN)
    assert torch.equal(head.project(states), states)


FLAGS: dict[str, dict[str, Any]] = {
    "norms before fc": {"fc_norm": True, "norm_output": True},
    "one norm before fc": {"norm_before_fc": True, "norm_before_residual": True},
    "biases": {"qkv_bias": True, "fc_bias": True, "qk_norm": True},
    "two layers": {"num_layers": 2},
    "no fc": {"has_fc": False, "num_features": 1, "feature_layers": None},
    "llama3 positions": {
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "eagle-1": {"kind": "eagle", "num_features": 1, "fc_bias": True, "feature_layers": None},
}


def config_of(**changes: Any) -> HeadConfig:
    settings: dict[str, Any] = {
        "kind": "eagle3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT,
        "target_hidden_size": HIDDEN,
        "num_features": 3,
        "feature_layers": (1, 5, 8),
        "tokenizer_fingerprint": "",
        "target": "some/target",
    }
    return HeadConfig(**(settings | changes))


@pytest.mark.parametrize("changes", FLAGS.values(), ids=FLAGS)
def test_what_is_saved_is_what_is_loaded(changes: dict[str, Any], tmp_path: Path, target: TargetCheckpoint) -> None:
    torch.manual_seed(0)
    head = beginning(EagleHead(config_of(**changes), torch.arange(DRAFT) + 7)).requires_grad_(False)
    head.embedding.copy_(target.embedding())
    folder = save_head(head, tmp_path / "head", {"tokens": 1000})
    loaded = EagleCheckpoint(folder).load(target=target)
    assert loaded.config == head.config
    assert json.loads((folder / "training.json").read_text()) == {"tokens": 1000}
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    tokens, states = torch.randint(VOCABULARY, (6,)), torch.randn(6, head.projection.input_width)
    expected, found = output(head, tokens, states), output(loaded, tokens, states)
    assert torch.equal(found.carried, expected.carried) and torch.equal(found.lm_input, expected.lm_input)
    assert torch.equal(loaded.logits(found.lm_input), head.logits(expected.lm_input))


def test_the_norm_that_is_fed_back_is_the_one_asked_for() -> None:
    torch.manual_seed(0)
    plain = beginning(EagleHead(config_of(), torch.arange(DRAFT)))
    normed = EagleHead(config_of(norm_output=True), torch.arange(DRAFT))
    normed.load_state_dict(plain.state_dict())
    tokens, states = torch.randint(VOCABULARY, (4,)), torch.randn(4, 3 * HIDDEN)
    before, after = output(plain, tokens, states), output(normed, tokens, states)
    assert torch.equal(before.lm_input, after.lm_input) and torch.equal(after.carried, after.lm_input)
    assert plain.norm is not None and torch.equal(plain.norm(before.carried), before.lm_input)


def test_a_token_map_cuts_any_head(tmp_path: Path, target: TargetCheckpoint) -> None:
    torch.manual_seed(0)
    mapped, whole = eagle3_tensors(), eagle1_tensors()
    wanted = [3, 4, 5, 40]
    head = EagleCheckpoint(EAGLE3_LAYOUTS["specforge"](tmp_path / "three", mapped)).load(
        target=target, token_map=wanted
    )
    # Of the wanted ones the head knows the odd ones below 40.
    assert head.token_ids is not None and head.token_ids.tolist() == [3, 5]
    assert torch.equal(head.lm_head.weight, mapped["lm_head.weight"][[1, 2]])
    head = EagleCheckpoint(EAGLE1_LAYOUTS["sglang"](tmp_path / "one", whole)).load(target=target, token_map=wanted)
    assert head.token_ids is not None and head.token_ids.tolist() == wanted
    assert torch.equal(head.lm_head.weight, target.lm_head()[wanted])
    again = EagleCheckpoint(save_head(head, tmp_path / "saved", embedding=True)).load(target=target)
    assert again.config == head.config and torch.equal(again.lm_head.weight, head.lm_head.weight)


def test_token_maps_are_json_or_safetensors(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[5, 6]")
    save_file({"ids": torch.tensor([7, 8])}, tmp_path / "map.safetensors")
    assert read_token_map(tmp_path / "map.json") == (5, 6)
    assert read_token_map(tmp_path / "map.safetensors") == (7, 8)
    (tmp_path / "map.pt").write_bytes(b"")
    (tmp_path / "words.json").write_text('["a"]')
    for name in ("map.pt", "words.json", "absent.json"):
        with pytest.raises(HeadRefused, match="token map"):
            read_token_map(tmp_path / name)


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "another vocabulary": ({"vocab_size": 64}, lambda t: t, "vocabulary of 64, the target one of 50"),
    "another width": ({"target_hidden_size": 8}, lambda t: t | {"fc.weight": weight(HIDDEN, 24)}, "width 8"),
    "layers that are not there": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 30]}},
        lambda t: t,
        "a target that has 12",
    ),
    "a map that is missing": ({}, lambda t: without(t, "d2t"), "d2t"),
    "a map out of range": ({}, lambda t: t | {"d2t": torch.full((DRAFT,), 45)}, "leaves the vocabulary"),
    "a map that says one twice": ({}, lambda t: t | {"d2t": -torch.arange(DRAFT)}, "twice"),
    "an unknown weight": ({}, lambda t: t | {"midlayer.gate.weight": weight(2)}, "left over.*gate"),
    "a missing weight": ({}, lambda t: without(t, "norm.weight"), "missing.*norm"),
    "a weight of another shape": ({}, lambda t: t | {"norm.weight": weight(8)}, "shape"),
    "no head": ({}, lambda t: without(t, "fc.weight"), "no EAGLE head"),
    "a flag without its weights": ({"fc_norm": True}, lambda t: t, "fc_norm"),
    "another activation": ({"hidden_act": "gelu"}, lambda t: t, "gelu"),
    "moving positions": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, lambda t: t, "dynamic"),
    "partial positions": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, lambda t: t, "a part of"),
    "a config that says little": ({"hidden_size": None}, lambda t: t, "hidden_size"),
    "another tokenizer": ({"outrider": {"tokenizer_fingerprint": "0" * 64}}, lambda t: t, "another tokenizer"),
}


@pytest.mark.parametrize(("changes", "edit", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(
    changes: dict[str, Any],
    edit: Callable[[Tensors], Tensors],
    reason: str,
    tmp_path: Path,
    target: TargetCheckpoint,
    byte_tokenizer_folder: Callable[[Path], None],
) -> None:
    byte_tokenizer_folder(tmp_path / "target")
    folder = write(tmp_path / "head", SAFEAI | changes, edit(eagle3_tensors()))
    with pytest.raises(HeadRefused, match=reason):
        EagleCheckpoint(folder).load(target=target)


@pytest.fixture
def byte_tokenizer_folder() -> Callable[[Path], None]:
    """Writes a small tokenizer beside a model."""
    from tokenizers import Tokenizer, models

    def save(folder: Path) -> None:
        Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))

    return save


def test_a_head_that_borrows_needs_a_target(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", SAFEAI, eagle3_tensors())
    assert EagleCheckpoint(folder).config.kind == "eagle3"
    with pytest.raises(HeadRefused, match="embed_tokens"):
        EagleCheckpoint(folder).load()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", SAFEAI, eagle3_tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(HeadRefused, match="pickled"):
        EagleCheckpoint(folder).load()


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", SAFEAI, eagle3_tensors())
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(HeadRefused, match="no safetensors file"):
        EagleCheckpoint(folder).load()


def test_weights_in_several_files_are_found(tmp_path: Path, target: TargetCheckpoint) -> None:
    torch.manual_seed(0)
    tensors = eagle3_tensors()
    folder = write(tmp_path / "head", SAFEAI, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(EagleCheckpoint(folder).load(target=target).lm_head.weight, tensors["lm_head.weight"])


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    shard = folder / "model-00001-of-00001.safetensors"
    shard.write_bytes(file.read_bytes()[:-8])
    file.unlink()
    index = {"weight_map": dict.fromkeys(eagle3_tensors(), shard.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is no JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON object"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            "model.safetensors.index.json is no JSON",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
            "model.safetensors.index.json: no weight_map",
        ),
        (_truncated, "model-00001-of-00001.safetensors has "),
    ],
)
def test_a_broken_file_of_any_kind_is_refused_by_its_name(
    spoil: Callable[[Path], Any], named: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "head", SAFEAI, eagle3_tensors())
    spoil(folder)
    with pytest.raises(HeadRefused, match=re.escape(named)):
        EagleCheckpoint(folder).load()


def test_the_hub_is_asked_once_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: TargetCheckpoint
) -> None:
    folder = write(tmp_path / "head", SAFEAI, eagle3_tensors())
    asked: list[str] = []

    def download(_: str, name: str) -> str:
        asked.append(name)
        if not (folder / name).is_file():
            raise LocalEntryNotFoundError(name)
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("outrider.weights.check_fetchable", lambda *_: None)
    EagleCheckpoint("some/head").load(target=target)
    assert sorted(asked) == sorted(set(asked))
    assert "model.safetensors" in asked


def test_a_broken_tokenizer_of_a_target_is_refused_by_its_name(tmp_path: Path) -> None:
    target_config = LAYER_CONFIG | {"model_type": "llama", "num_hidden_layers": TARGET_LAYERS}
    folder = write(tmp_path / "target", target_config, {"model.embed_tokens.weight": weight(2, 2)})
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(HeadRefused, match=r"tokenizer\.json cannot be read: "):
        TargetCheckpoint(folder).fingerprint()


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model", "text_model.model"])
def test_a_target_of_text_and_images_lends_its_vocabulary(prefix: str, tmp_path: Path) -> None:
    embedding, lm_head = weight(VOCABULARY, HIDDEN), weight(VOCABULARY, HIDDEN)
    config = {"model_type": "llava", "text_config": LAYER_CONFIG | {"num_hidden_layers": TARGET_LAYERS}}
    head = "lm_head" if prefix == "model.language_model" else f"{prefix.removesuffix('.model')}.lm_head"
    tensors = {
        f"{prefix}.embed_tokens.weight": embedding,
        f"{head}.weight": lm_head,
        "vision_tower.embed_tokens.weight": weight(2, 2),
    }
    target = TargetCheckpoint(write(tmp_path / "target", config, tensors))
    assert torch.equal(target.embedding(), embedding) and torch.equal(target.lm_head(), lm_head)
