"""Layers of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), served with one vector a token in the cache.

transformers' layers expand a token's latent into keys and values of all heads in `expand_kv`, right before attention.
Here attention gets the latent and the rotary key unexpanded, and the expanding product is absorbed into queries and
outputs (`tree_kernels.latent_attention`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from target_service.model.agreement import agree
from tree_kernels.attention import AttentionPlan
from tree_kernels.latent_attention import (
    HeadProjections,
    LatentAttention,
    absorbed_queries,
    expanded_values,
    write_latents,
)

# Ends the name of an attention implementation that takes latents.
_SUFFIX = "_latents"
# The product that is absorbed; its weight has to stay as it was loaded.
EXPANDING = "kv_b_proj"
_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Rows that a layer's own expansion is tried with.
_PROBE_ROWS = 3


def implementation_name(attention: str, *, latent: bool) -> str:
    """The name of an attention implementation in transformers, in its form with or without latents."""
    return attention + _SUFFIX if latent else attention


def keeps_latents(model: PreTrainedModel) -> bool:
    """Whether each of the model's layers attends over latents and expands them by one product, beside the rotary key.

    Tried on each layer's own weights: a model with a layer that computes something else is served in expanded form.
    """
    layers = _layers(model)
    return len(layers) == model.config.num_hidden_layers and all(_expands_plainly(layer) for layer in layers)


def leave_latents(model: PreTrainedModel) -> None:
    """Let every layer pass latents to attention that takes them; for any other attention it expands them as before."""
    for layer in _layers(model):
        if not is_unexpanded(layer):
            own: type = type(layer)
            layer.__class__ = with_first(_Unexpanded, own)


def attend_latents(
    layer: Any,
    attention: LatentAttention,
    plan: AttentionPlan,
    cache: Tensor,
    slots: Tensor,
    query: Tensor,
    rotary: Tensor,
    latents: Tensor,
    scaling: float,
) -> Tensor:
    """[1, R, H, V]: write one layer's new vectors into its cache [pages, page_size, 1, L + P] at `slots` [R], and
    attend.

    The query is [1, H, R, N + P], the last P rotated; rotary keys and latents are [1, 1, R, P] and [1, 1, R, L].
    """
    vectors, rows, plain = cache.squeeze(2), query[0].transpose(0, 1), int(layer.qk_nope_head_dim)
    projections = head_projections(layer)
    write_latents(latents[0, 0], rotary[0, 0], vectors, slots)
    absorbed = absorbed_queries(rows[..., :plain], rows[..., plain:], projections)
    attended = attention.run(plan, absorbed, vectors, latents.shape[-1], scaling)
    return expanded_values(attended, projections).unsqueeze(0)


def is_unexpanded(module: object) -> bool:
    """Whether it is a layer that `leave_latents` has changed."""
    return isinstance(module, _Unexpanded)


def takes_latents_now(config: Any) -> bool:
    """Whether the attention implementation that the configuration names takes latents."""
    return bool(config._attn_implementation.endswith(_SUFFIX))


def head_projections(layer: Any) -> HeadProjections:
    """The two halves of a layer's expanding product: for keys and for values."""
    weight, plain = getattr(layer, EXPANDING).weight, int(layer.qk_nope_head_dim)
    return HeadProjections.of(weight, len(weight) // (plain + int(layer.v_head_dim)), plain)


class _Unexpanded:
    """Methods of a layer that come before its own; see `with_first`."""

    config: Any

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """What attention takes as keys and values: rotary keys and latents, or keys and values of all heads."""
        if takes_latents_now(self.config):
            return k_rot, kv_nope
        expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
        return expanded


@cache
def with_first(first: type, kind: type) -> type:
    """A class like `kind` whose methods are first looked up in another."""
    return type(kind.__name__, (first, kind), {})


def _layers(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


@torch.inference_mode()
def _expands_plainly(layer: Any) -> bool:
    """Whether the layer's keys and values are the products with the halves of its weight, beside the rotary key."""
    if is_unexpanded(layer):
        # Tried before.
        return True
    product: Any = getattr(layer, EXPANDING, None)
    # Subclasses and packed layers multiply with something else.
    if type(product) is not nn.Linear or getattr(product, "bias", None) is not None:
        return False
    if not all(hasattr(layer, name) for name in ("config", *_WIDTHS)):
        return False
    generator, weight = torch.Generator().manual_seed(0), product.weight
    latents, rotary = (
        torch.randn(1, 1, _PROBE_ROWS, width, generator=generator).to(weight)
        for width in (layer.kv_lora_rank, layer.qk_rope_head_dim)
    )
    own = type(layer).expand_kv(layer, latents, rotary)
    projections = head_projections(layer)
    keys, values = (latents[0] @ part.transpose(1, 2) for part in projections)
    keys = torch.cat([keys, rotary[0].expand(len(keys), -1, -1)], dim=-1)
    return agree((keys, values), (part[0] for part in own))
