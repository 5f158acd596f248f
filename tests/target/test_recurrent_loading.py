"""Models with recurrent layers are loaded from folders as they are published, and their states are accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import make_tiny
from recurrent_models import RECURRENT
from safetensors.torch import save_file

from benchmarks.shared.loaded_models import runner_for
from target_service.config import TargetConfig
from target_service.model.loading.inspection import inspect
from target_service.model.loading.loader import load_runner
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.support import ModelRefused
from target_service.speculation.policy.step_cost import measure_step_cost
from tree_models.layer_comparison import layers_that_differ
from tree_models.reference import published_tensors

VISION = {"hidden_size": 8, "depth": 1, "num_heads": 2, "intermediate_size": 16}


def made(name: str) -> Any:
    short = ", two layers"
    model_type, settings = RECURRENT[name.removesuffix(short)]
    settings = settings | {"num_hidden_layers": 2} if name.endswith(short) else settings
    return make_tiny(model_type, vocab_size=300, **settings)


def saved(name: str, folder: Path, tokenizer: Any) -> Path:
    """Qwen3.5 as it is published: the text part of a model that takes images, with an MTP module beside it."""
    model = made(name)
    published = published_tensors(model)
    tensors = {tensor: published.read(tensor).clone().contiguous() for tensor in published.stored}
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if name.startswith("qwen3_5"):
        tensors = {tensor.replace("model.", "model.language_model.", 1): value for tensor, value in tensors.items()}
        weight = next(iter(tensors.values()))
        tensors |= {"model.visual.blocks.0.norm1.weight": weight.clone(), "mtp.norm.weight": weight.clone()}
        kind = config["model_type"].removesuffix("_text")
        config = {
            "model_type": kind,
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": config,
            "vision_config": VISION | {"model_type": kind},
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "attending"),
    [
        ("lfm2, biases", 1),
        ("lfm2_moe", 1),
        ("qwen3_next", 1),
        ("qwen3_5", 1),
        ("bamba", 1),
        ("granitemoehybrid, mamba", 1),
        ("recurrent_gemma", 2),
        # Published under names of a layer in front of which a block stands.
        ("zamba2, plain", 1),
        ("zamba, plain", 1),
        # Each layer has both.
        ("falcon_h1", 2),
        ("zaya, two layers", 2),
        # States alone.
        ("mamba", 0),
        ("mamba2", 0),
    ],
)
def test_published_folders_are_served(name: str, attending: int, tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = saved(name, tmp_path, byte_tokenizer)
    runner = load_runner(TargetConfig(model=str(folder), dtype="float32", kv_tokens=64, max_running=3, kept_states=2))
    check_runner(runner, own_logits(made(name)))
    assert inspect(folder).verdict == "can be served"
    states, layers = runner.cache.recurrent, runner.network.recurrent_layers
    assert states is not None and layers is not None and layers[0] == 2
    assert states.free_slots == 3 and states.window == 64
    assert f"recurrent states of 3 sequences and 2 copies, {states.sequence_bytes:,} bytes each" in str(runner.cache)
    assert len(runner.cache.keys) == attending


def test_a_token_of_states_alone_takes_no_memory(tmp_path: Path, byte_tokenizer: Any) -> None:
    """So that all sequences that run have room for their longest texts."""
    folder = saved("falcon_mamba", tmp_path, byte_tokenizer)
    runner = load_runner(TargetConfig(model=str(folder), dtype="float32", max_running=3, max_context=256))
    assert runner.cache.num_pages * runner.cache.page_size == 3 * 256
    assert runner.cache.nbytes == runner.cache.token_bytes == 0
    assert "768 tokens, without keys and values, and recurrent states of 3 sequences" in str(runner.cache)


def test_steps_of_more_rows_than_a_tree_are_measured() -> None:
    runner = runner_for(made("lfm2"), None, num_pages=32, page_size=16, largest_tree=8)
    cost = measure_step_cost(runner, 64)
    assert 0 < cost(1) <= cost(64)


def test_states_that_do_not_fit_are_refused(
    tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TargetConfig(model=str(saved("lfm2", tmp_path, byte_tokenizer)), dtype="float32", max_running=64)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(ModelRefused, match="set a lower --max-running"):
        load_runner(config)


def test_a_layer_that_computes_something_else_is_found() -> None:
    model = made("qwen3_next")
    decoder: Any = runner_for(model, None, num_pages=2, page_size=16).network
    source = published_tensors(model)
    assert layers_that_differ(decoder, model.config, source) == []
    weight = decoder.layers[0].attention.weight
    weight.copy_(weight.flip(1))
    assert [one.split(" by ")[0] for one in layers_that_differ(decoder, model.config, source)] == ["layer 0"]
