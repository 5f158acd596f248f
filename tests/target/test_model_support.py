"""What cannot be served is refused with the reason; what can be is loaded from a folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from engine_harness import make_runner, plain_each, random_tree, request, run
from latent_models import make_latent
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from outrider.heads import tokenizer_fingerprint
from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.model.loading.loader import _choose_rows_on_device, load_runner
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.support import ModelRefused, check_supported, longest_context

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def config_of(model_type: str, **settings: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **settings)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("gemma2", use_bidirectional_attention=True), "capped"),
        (config_of("llama", index_topk=64), "choice of tokens"),
        (config_of("zamba", n_mamba_heads=1, hidden_mamba_act="gelu"), "not attention|state-space"),
        (config_of("bart"), "encoder-decoder"),
        (config_of("bert", add_cross_attention=True), "another input"),
        (config_of("kosmos-2"), "more than text"),
        (config_of("t5"), "encoder-decoder"),
        (config_of("hrm_text"), "more than once"),
        (config_of("llama", quantization_config={"quant_method": "awq", "bits": 4}), r"quantised weights \(awq\)"),
        (config_of("llama", quantization_config={"bits": 4}), r"quantised weights \(of some kind\)"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_models_of_other_kinds_are_refused_with_the_reason(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        check_supported(config)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "phi3", "granite", "starcoder2", "gpt_neox"])
def test_decoders_of_grouped_query_attention_are_taken(model_type: str) -> None:
    check_supported(config_of(model_type))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("cohere2", {}),
    ],
)
def test_windows_and_caps_of_our_layers_are_taken(model_type: str, settings: dict[str, Any]) -> None:
    check_supported(config_of(model_type, **settings))


def test_a_window_that_no_sequence_outgrows_is_no_window() -> None:
    check_supported(config_of("mistral", sliding_window=4096, max_position_embeddings=4096))


def longrope_model(**settings: Any) -> PreTrainedModel:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    lengths = {"original_max_position_embeddings": 64, "max_position_embeddings": 512}
    return make_tiny("phi3", rope_scaling=factors, sliding_window=None, **lengths, **settings)


def longrope() -> PreTrainedConfig:
    return longrope_model().config


def test_a_context_ends_where_rotary_frequencies_would_change() -> None:
    check_supported(longrope())
    assert longest_context(longrope()) == 64
    assert longest_context(make_tiny().config) == 512


def test_attention_sinks_are_refused() -> None:
    """In a family without an entry, whose attention would ignore them."""
    model = make_tiny("bitnet")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelRefused, match="sinks"):
        check_supported(model.config, model)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("moshi", {"ffn_dim": 96}, "differ from its own"),
    ],
    ids=["attention of its own"],
)
def test_what_only_running_tells_is_refused_too(model_type: str, settings: dict[str, Any], reason: str) -> None:
    model = make_tiny(model_type, **settings)
    check_supported(model.config, model)
    own = own_logits(model)
    runner = runner_for(model, None, num_pages=4, page_size=16)
    with pytest.raises(ModelRefused, match=reason):
        check_runner(runner, own)
    assert runner.cache.used_pages == 0


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    model = make_tiny("bitnet")
    model._supports_attention_backend = False
    with pytest.raises(ModelRefused, match="cannot be replaced"):
        check_supported(model.config, model)


def test_attention_that_sees_later_tokens_is_refused() -> None:
    model = make_tiny("bitnet")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelRefused, match="see later"):
        check_supported(model.config, model)


FULL = {"layer_types": ["full_attention"] * 2}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen3", "gpt2", "gpt_neox", "mixtral")},
    "its layers drop keyword arguments": ("nemotron", {}),
    "key heads by its experts": ("jetmoe", {"kv_channels": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "one key for all heads": ("gpt_bigcode", {"multi_query": True}),
    "as many keys as heads": ("gpt_bigcode", {"multi_query": False}),
    "a window that no layer has": ("laguna", FULL),
    "another": ("mellum", FULL),
    "a hybrid of attention alone": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 2, "num_local_experts": 4, "shared_intermediate_size": 32, "mamba_n_heads": 4},
    ),
    "dynamic frequencies": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
}


@pytest.mark.parametrize(("model_type", "settings"), SERVED.values(), ids=SERVED)
def test_a_served_model_says_what_it_says_by_itself(model_type: str, settings: dict[str, Any]) -> None:
    model = make_tiny(model_type, **settings)
    check_supported(model.config, model)
    own = own_logits(model)
    runner = runner_for(model, None, num_pages=4, page_size=16)
    check_runner(runner, own)
    assert runner.cache.used_pages == 0


@pytest.mark.parametrize("model_type", ["nemotron", "jetmoe", "gpt_bigcode", "laguna"])
def test_a_tree_is_verified_as_plain_decoding_goes(model_type: str) -> None:
    settings = next(settings for name, settings in SERVED.values() if name == model_type)
    model = make_tiny(model_type, **settings)
    wanted = [request([5, 6, 7], 12, sampling=GREEDY), request([9] * 20, 12, sampling=GREEDY)]
    outcomes = run(make_runner(model), wanted, propose=random_tree(211, 8))
    assert [outcome.token_ids for outcome in outcomes] == plain_each(model, wanted)


def test_frequencies_stay_those_of_the_context() -> None:
    """transformers' own model takes others once a text is longer, and for every text behind that one. Our layers have
    none of these."""
    model = make_tiny("bitnet", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    runner = runner_for(model, None, num_pages=64, page_size=16)
    rotary = next(module for module in model.modules() if hasattr(module, "rope_type"))
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 4, 48), torch.tensor([[0, 100, 600, 5000]]))
    assert torch.equal(rotary.inv_freq, before)
    assert runner.max_context == 512
    assert runner_for(longrope_model(), None, num_pages=64, page_size=16).max_context == 64


def test_the_width_of_keys_is_the_models_own() -> None:
    model = make_tiny("gpt_bigcode", multi_query=True)
    assert runner_for(model, None, num_pages=2, page_size=4).cache.keys[0].shape == (2, 4, 1, 12)
    model = make_tiny("jetmoe", kv_channels=12, num_local_experts=4, num_experts_per_tok=2)
    assert runner_for(model, None, num_pages=2, page_size=4).cache.keys[0].shape == (2, 4, 4, 12)


@pytest.mark.parametrize(
    "spoil",
    [lambda own: own.flip(0), lambda own: torch.cat([own[:8], own[:5]]), lambda own: own * torch.nan],
    ids=["every row", "rows that read the cache", "not a number"],
)
def test_a_model_that_says_something_else_is_refused(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = make_tiny()
    own = spoil(own_logits(model))
    with pytest.raises(ModelRefused, match="differ from its own"):
        check_runner(runner_for(model, None, num_pages=4, page_size=16), own)


@pytest.fixture
def model_folder(tmp_path: Path, byte_tokenizer: Any) -> Path:
    make_tiny(vocab_size=300).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


class TestLoading:
    def test_ends_outside_of_the_vocabulary_are_none(self, model_folder: Path) -> None:
        path = model_folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, -1, 300, 10**12]}))
        config = TargetConfig(model=str(model_folder), dtype="float32", kv_tokens=64, page_size=16)
        assert load_runner(config).end_token_ids == (2,)

    def test_a_folder_is_loaded_with_its_tokenizer(self, model_folder: Path, byte_tokenizer: Any) -> None:
        config = TargetConfig(model=str(model_folder), dtype="float32", kv_tokens=100, page_size=16, max_context=64)
        runner = load_runner(config)
        assert (runner.vocabulary_size, runner.max_context, runner.end_token_ids) == (300, 64, (2,))
        assert (runner.cache.num_pages, runner.cache.page_size, runner.dtype) == (6, 16, torch.float32)
        assert runner.name == str(model_folder)
        assert runner.tokenizer_fingerprint == tokenizer_fingerprint(byte_tokenizer)
        named = load_runner(dataclasses.replace(config, served_model_name="tiny"))
        assert named.name == "tiny"

    def test_a_context_is_never_longer_than_the_models(self, model_folder: Path) -> None:
        config = TargetConfig(model=str(model_folder), dtype="bfloat16", kv_tokens=64, max_context=100_000)
        assert load_runner(config).max_context == 512

    def test_zero_kv_tokens_takes_a_share_of_memory_with_a_cap(self, model_folder: Path) -> None:
        cache = load_runner(TargetConfig(model=str(model_folder), dtype="float32")).cache
        assert 0 < cache.num_pages * cache.page_size <= 65536

    @pytest.mark.parametrize("kv_tokens", [1, 5, 15])
    def test_a_cache_without_room_for_the_check_is_refused(self, model_folder: Path, kv_tokens: int) -> None:
        config = TargetConfig(model=str(model_folder), dtype="float32", kv_tokens=kv_tokens, page_size=1)
        with pytest.raises(ModelRefused, match="--kv-tokens must be at least 16"):
            load_runner(config)
        cache = load_runner(dataclasses.replace(config, kv_tokens=16)).cache
        assert cache.num_pages == 16

    def test_windows_are_served_by_our_layers_alone(
        self, tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Transformers' layers would see all tokens, which the short text of the check does not show."""
        make_tiny("mistral", vocab_size=300, sliding_window=64).save_pretrained(tmp_path)
        byte_tokenizer.save_pretrained(tmp_path)
        config = TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64)
        load_runner(config)
        with pytest.raises(ModelRefused, match="window of 64 tokens is not served by --attention flashinfer"):
            load_runner(dataclasses.replace(config, attention="flashinfer"))
        monkeypatch.setattr("target_service.model.loading.loader.layers_that_differ", lambda *_: ["layer 0 by 1.00"])
        with pytest.raises(ModelRefused, match="window of 64 tokens is not served by transformers' layers"):
            load_runner(config)

    def test_no_such_model_is_an_os_error(self, tmp_path: Path) -> None:
        with pytest.raises(OSError):
            load_runner(TargetConfig(model=str(tmp_path / "absent")))


def test_fingerprints_tell_vocabularies_apart() -> None:
    class Vocabulary:
        def __init__(self, **ids: int) -> None:
            self._ids = ids

        def get_vocab(self) -> dict[str, int]:
            return self._ids

    one = tokenizer_fingerprint(Vocabulary(a=0, b=1))
    assert len(one) == 64
    assert tokenizer_fingerprint(Vocabulary(b=1, a=0)) == one
    assert tokenizer_fingerprint(Vocabulary(a=1, b=0)) != one


def test_independence_of_the_batch_needs_a_gpu(model_folder: Path) -> None:
    with pytest.raises(ModelRefused, match="--batch-invariant needs a GPU"):
        load_runner(TargetConfig(model=str(model_folder), batch_invariant=True))


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_independent_of_the_batch_is_not_recycled(invariant: bool) -> None:
    """Recycled tokens are trees, and the rows of a tree are summed up in another order than those of a chain."""
    pytest.importorskip("triton")
    runner = runner_for(make_tiny(), None, num_pages=8, page_size=4)
    _choose_rows_on_device(runner, TargetConfig(model="tiny", batch_invariant=invariant, lookup_tokens=15))
    assert runner.node_table is not None and runner.node_table.lookup_tokens == 15
    assert runner.node_table.recycles is not invariant


def test_latent_attention_is_not_independent_of_the_batch(tmp_path: Path) -> None:
    make_latent("v3").save_pretrained(tmp_path)
    for settings in ({}, {"lockstep": True}, {"latent_cache": False}):
        with pytest.raises(ModelRefused, match="--batch-invariant: the layers of deepseek_v3"):
            load_runner(TargetConfig(model=str(tmp_path), batch_invariant=True, **settings))
