"""Tiny Medusa heads, the plain heads that they are held to, and heads that learnt in a moment what a model says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from engine_harness import plain_each
from hidden_states import states_of
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, prompts, request_of
from taught_heads import VOCABULARY as TAUGHT_VOCABULARY
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from draft_service.medusa.head import MedusaHead, MedusaShape

VOCABULARY, DRAFT, WIDTH, HEADS = 60, 40, 16, 4


def make_heads(**changes: Any) -> MedusaHead:
    """Heads in fp32, equal for equal arguments; weights large enough for peaked distributions."""
    settings: dict[str, Any] = {
        "target_hidden_size": WIDTH,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT,
        "num_heads": HEADS,
        "num_layers": 1,
        "target": "some/target",
        "target_layers": 12,
    }
    shape = MedusaShape(**(settings | changes))
    torch.manual_seed(4)
    ids = None if shape.draft_vocab_size == shape.vocab_size else torch.arange(DRAFT) + torch.arange(DRAFT) // 3
    heads = MedusaHead(shape, ids)
    for parameter in heads.weights().values():
        parameter.normal_(0.0, 0.5)
    return heads.eval()


def published_weights(heads: MedusaHead) -> dict[str, Tensor]:
    """As FasterDecoding's own module names them: `{head}.{layer}.linear.weight`, `{head}.{layers}.weight`."""
    return {name.removeprefix("heads."): weight.clone() for name, weight in heads.weights().items()}


def plain_logits(weights: Mapping[str, Tensor], states: Tensor, num_heads: int, num_layers: int) -> Tensor:
    """[K, .., V'] by the paper's formula over published weights, in fp64: the definition."""
    logits = []
    for k in range(num_heads):
        hidden = states.double()
        for layer in range(num_layers):
            mixed = hidden @ weights[f"{k}.{layer}.linear.weight"].double().T
            bias = weights.get(f"{k}.{layer}.linear.bias")
            mixed = mixed if bias is None else mixed + bias.double()
            hidden = hidden + mixed * torch.sigmoid(mixed)
        logits.append(hidden @ weights[f"{k}.{num_layers}.weight"].double().T)
    return torch.stack(logits)


def taught_heads(teacher: PreTrainedModel, max_tokens: int, steps: int = 150) -> MedusaHead:
    """Heads that have seen what the teacher says to every prompt in every way of sampling."""
    sizes = {"vocab_size": TAUGHT_VOCABULARY, "draft_vocab_size": TAUGHT_VOCABULARY, "target_hidden_size": HIDDEN}
    torch.manual_seed(5)
    heads = MedusaHead(MedusaShape(**sizes, num_heads=3, target_layers=LAYERS))
    for weight in heads.weights().values():
        weight.normal_(0.0, (3 * HIDDEN) ** -0.5)
    heads.requires_grad_(True)
    states, following, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    wanted = [request_of(prompt, sampling, max_tokens) for sampling in SAMPLINGS.values() for prompt in prompts()]
    for one, said in zip(wanted, plain_each(teacher, wanted), strict=True):
        tokens = [*one.token_ids, *said]
        states.append(states_of(teacher, tokens, (LAYERS,)))
        # [K, tokens] of each head's targets, of which the last have none, and the share of each in the text's mean.
        targets = [functional.pad(torch.tensor(tokens[2 + k :]), (0, 2 + k), value=-1) for k in range(3)]
        following.append(torch.stack(targets))
        weights.append(torch.stack([(one >= 0) / (one >= 0).sum() for one in targets]))
    rows, targets_of_all, weight_of_all = torch.cat(states), torch.cat(following, 1), torch.cat(weights, 1)
    optimizer = torch.optim.Adam(heads.parameters(), lr=4e-3)
    for _ in range(steps):
        logits = heads(rows).flatten(0, 1)
        losses = functional.cross_entropy(logits, targets_of_all.flatten(), reduction="none", ignore_index=-1)
        optimizer.zero_grad()
        (losses @ weight_of_all.flatten()).backward()
        optimizer.step()
    return heads.requires_grad_(False).eval()
