"""Writes a model of a real shape with random weights, and an EAGLE-3 head for it: services at real size where there are
no real weights.

    python -m benchmarks.shared.random_model FOLDER --shape llama-8b [--head FOLDER] [--device cuda] [--tokenizer NAME]
    python -m benchmarks.shared.random_model FOLDER --shape qwen3-30b-a3b --layers 16 --without-weights

`outrider target --model FOLDER` then serves it: config.json, bfloat16 safetensors, and the tokenizer of `--tokenizer`,
whose vocabulary may be smaller than the model's. The text of such a model means nothing, its cost is real. A folder
without weights is for `serving/serving.py --random-weights` and `serving/vllm_peer.py --shape`, which draw their own.

Weights are drawn as Llama's are before training (standard deviation 0.02), those that write to the residual stream
smaller by the square root of their number. The output embedding is the input embedding shifted by 7,907 ids, so that
token t is followed by token t + 7907, by a wide margin. With random weights there too, near-ties would be so common
that passes of other shapes, which round differently, would soon emit other tokens. A model with tied embeddings has no
such shift, and repeats its last token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.random_models.shapes import SHAPES as STEP_SHAPES
from benchmarks.random_models.shapes import config_of
from benchmarks.random_models.weights import STANDARD_DEVIATION, fill
from benchmarks.shared.model_folder import copy_files, write_weights
from benchmarks.shared.report import show
from draft_service.eagle.checkpoint import save_head
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from target_service.model.loading.store import resolve
from tree_models.layers.placing import Placement

_DRAFT_VOCABULARY = 32000
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    # For rehearsals: more token ids than the tokenizer of SmolLM2 has.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 60000,
        "max_position_embeddings": 4096,
    },
}


def read_shape(name: str, layers: int | None = None) -> Any:
    """The configuration of a named shape, of one of `random_models/shapes.py`, which may have another number of
    `layers`, or of a config.json."""
    if name in SHAPES:
        return LlamaConfig(**SHAPES[name], rope_theta=500000.0, tie_word_embeddings=False, dtype="bfloat16")
    config = config_of(name, layers) if name in STEP_SHAPES else AutoConfig.from_pretrained(name)
    config.dtype = torch.bfloat16
    return config


def tensors_of(config: Any, device: str) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of every parameter, bfloat16 on `device`."""
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in AutoModelForCausalLM.from_config(config).named_parameters()}
    embedding: Tensor | None = None
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        fill(name, weight, config.num_hidden_layers, embedding)
        if name.endswith("embed_tokens.weight"):
            embedding = weight
        yield name, weight


def write_model(folder: Path, config: Any, tokenizer: str, device: str) -> int:
    """Write the model and the tokenizer's files. Returns bytes of weights."""
    total = write_weights(folder, tensors_of(config, device))
    write_description(folder, config, tokenizer)
    return total


def write_description(folder: Path, config: Any, tokenizer: str) -> None:
    """Write config.json and the tokenizer's files."""
    config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    copy_files(Path(resolve(tokenizer)), folder)


def write_head(folder: Path, config: Any, device: str) -> None:
    """Write an EAGLE-3 head of the model's own width with random weights: one layer, its own lm_head over as much of
    the vocabulary as published heads have."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers, vocabulary = config.num_hidden_layers, min(_DRAFT_VOCABULARY, config.vocab_size)
    shape = HeadConfig(
        "eagle3",
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        width,
        vocab_size=config.vocab_size,
        draft_vocab_size=vocabulary,
        target_hidden_size=config.hidden_size,
        num_features=3,
        feature_layers=(1, layers // 2 - 1, layers - 4),
        max_positions=config.max_position_embeddings,
    )
    ids = None if vocabulary == config.vocab_size else torch.arange(vocabulary)
    head = EagleHead(shape, ids, Placement(torch.device(device), torch.bfloat16))
    generator = torch.Generator(device).manual_seed(1)
    for parameter in head.parameters():
        if parameter.ndim == 1:
            torch.nn.init.ones_(parameter)
        else:
            parameter.data.normal_(std=STANDARD_DEVIATION, generator=generator)
    save_head(head, folder, {"weights": "random, seed 1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    named = ", ".join(dict.fromkeys((*SHAPES, *STEP_SHAPES)))
    parser.add_argument("--shape", default="llama-8b", help=f"{named}, or a config.json")
    parser.add_argument("--layers", type=int, help="so many layers of a shape of engine/steps.py")
    parser.add_argument("--without-weights", action="store_true", help="write config.json and the tokenizer alone")
    parser.add_argument("--head", type=Path, help="also write an EAGLE-3 head here")
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="model whose tokenizer is copied")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to draw weights"
    )
    options = parser.parse_args()
    begin, config = time.perf_counter(), read_shape(options.shape, options.layers)
    if options.without_weights:
        write_description(options.folder, config, options.tokenizer)
        return
    written = write_model(options.folder, config, options.tokenizer, options.device)
    if options.head is not None:
        write_head(options.head, config, options.device)
    show(f"{written / 1e9:.2f} GB of weights in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
