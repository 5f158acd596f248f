"""Tiny models whose layers have fused forms, and passes that show what these compute."""

from __future__ import annotations

import random
from typing import Any

import torch
from conftest import make_tiny
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionBatch

PAGES, PAGE_SIZE = 40, 4
# Rows that a tree has at most.
LARGEST_TREE = 64
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Families and settings that differ in what is computed between the products.
FUSED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "gemma": {"head_dim": 16},
    "phi3": {},
    "glm4": {"head_dim": 16},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "olmo2": {},
    "cohere": {},
    "ernie4_5": {"head_dim": 12, "use_bias": True},
    "apertus": {},
    "starcoder2": {},
    "nemotron": {"head_dim": 12},
    "seed_oss": {"head_dim": 12},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "ministral3": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "phimoe": EXPERTS | {"attention_bias": True},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "granitemoeshared": EXPERTS | {"shared_intermediate_size": 24, "residual_multiplier": 0.5},
}


def batch_of(rows: int, seed: int = 0) -> ForwardInput:
    """One tree behind 9 tokens, or a chunk of a prompt where it has more rows than a tree."""
    rng = random.Random(seed)
    parents = tuple(rng.randrange(max(1, row)) for row in range(rows))
    pages = tuple(rng.sample(range(PAGES), -(-(9 + rows) // PAGE_SIZE)))
    slots = tuple(pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(9, 9 + rows))
    attention = AttentionBatch((0, rows), (9,), (pages,), PAGE_SIZE, (parents if rows <= LARGEST_TREE else None,))
    tokens = tuple(rng.randrange(200) for _ in range(rows))
    return ForwardInput(tokens, tuple(range(9, 9 + rows)), slots, attention, tuple(range(rows)))


def model_of(model_type: str, **settings: Any) -> PreTrainedModel:
    """Of weights that show where they are used, norms and biases among them."""
    model: PreTrainedModel = make_tiny(model_type, **settings)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "act_fn" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def runner_of(model_type: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> ModelRunner:
    """Of such a model, behind keys and values of random numbers."""
    runner = runner_for(model_of(model_type, **settings).to(dtype), None, num_pages=PAGES, page_size=PAGE_SIZE)
    for cache in runner.cache.keys + runner.cache.values:
        cache.normal_(generator=torch.Generator().manual_seed(1))
    return runner


def after(runner: ModelRunner, rows: int) -> list[Tensor]:
    """Logits of a step, and the caches behind it."""
    logits = runner.forward(batch_of(rows)).clone()
    return [logits, *(cache.clone() for cache in runner.cache.keys + runner.cache.values)]
