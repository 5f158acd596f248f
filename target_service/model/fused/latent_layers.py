"""Latent layers whose norm, rotary embedding and new rows in the cache are one launch; see `norm_rope_write`.

A GPU then launches for a layer's attention: the projections before and behind it, this, the products that absorb,
attention and its merging. A layer is recognised by the names of its parts and then run beside its own code on random
rows; one that computes anything else keeps its code.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from target_service.model.agreement import agree
from target_service.model.latent_attention import head_projections, is_unexpanded, takes_latents_now, with_first
from target_service.model.support import ModelRefused
from tree_kernels.attention import AttentionBatch
from tree_kernels.latent_attention import (
    LatentAttention,
    LatentRows,
    Rotary,
    absorb_into,
    expanded_values,
    norm_rope_write,
)

log = logging.getLogger(__name__)
# (pairs in, pairs out) of `Rotary`: DeepSeek-V2's, DeepSeek-V3's, and MiniCPM3's.
_LAYOUTS = ((True, True), (True, False), (False, False))
_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj", "layer_idx", "scaling", "q_lora_rank")
# Slots of the trial's rows, in another order than the rows.
_PROBE_SLOTS = (3, 0, 4, 1, 2)
# Between the positions of two rows, so that slow angles turn too.
_PROBE_STRIDE = 37


def fuse_latents(model: PreTrainedModel) -> int:
    """Fuse all layers of latent attention of a runner's model, in place, or none; returns how many.

    The model's attention has to be the runner's already: layers are tried with it. May be called again.
    """
    inner: Any = model.base_model
    layers: list[Any] = [module for module in model.modules() if is_unexpanded(module)]
    rotary = getattr(inner, "rotary_emb", None)
    if not layers or rotary is None or not takes_latents_now(model.config) or not all(map(_has_parts, layers)):
        return 0
    # An earlier call may have fused a layer: trials begin with its own class.
    for layer in layers:
        if isinstance(layer, _FusedLatents):
            layer.__class__ = type(layer).__bases__[1]
    for layout in _LAYOUTS:
        if all(computes_the_same(layer, layout, rotary) for layer in layers):
            for layer in layers:
                _fuse(layer, layout)
            log.info("latent layers of %s: norm, rotary embedding and cache in one launch", type(inner).__name__)
            return len(layers)
    log.info("latent layers of %s rotate or normalise differently and keep their own code", type(inner).__name__)
    return 0


class _FusedLatents:
    """Methods of a layer that come before its own; see `with_first`."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """[1, R, hidden] -> [1, R, hidden], with the arguments of the layer's own code, which runs all but steps."""
        step = kwargs.get("outrider_step")
        is_step = step is not None and past_key_values is None and position_embeddings is not None
        if not is_step or not takes_latents_now(self.config):
            kwargs |= {"attention_mask": attention_mask, "past_key_values": past_key_values}
            own: tuple[Tensor, Any] = super().forward(  # type: ignore[misc]
                hidden_states=hidden_states, position_embeddings=position_embeddings, **kwargs
            )
            return own
        if attention_mask is not None:
            raise ModelRefused("a mask of its own is not served")
        if self.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        vectors = self.kv_a_proj_with_mqa(hidden_states)
        values = _attend_fused(self, queries, vectors, position_embeddings, step)
        return self.o_proj(values), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_fused(layer: Any, queries: Tensor, vectors: Tensor, turns: Any, step: Any) -> Tensor:
    """[1, R, H * V] of [1, R, H * (N + P)] and [1, R, L + P].

    Not compiled, since it differs between layers and steps; what lies around it is the same for all.
    """
    projections = head_projections(layer)
    heads, latent = len(projections.keys), projections.keys.shape[2]
    width = vectors.shape[-1]
    # Contiguous as they are multiplied; a view of more, where the compiler joined products.
    own = queries[0].unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
    norm = layer.kv_a_layernorm
    rows = LatentRows(vectors[0], own, norm.weight, norm.variance_epsilon)
    absorbed = own.new_empty(len(own), heads, width)
    cache = step.cache.keys[int(layer.layer_idx)].squeeze(2)
    norm_rope_write(rows, _rotary(turns, layer.layout), cache, step.slots, absorbed)
    plain = own[..., : own.shape[-1] - (width - latent)]
    absorb_into(absorbed, plain, projections)
    attended = step.attention.run(step.plan, absorbed, cache, latent, float(layer.scaling))
    return expanded_values(attended, projections).flatten(1).unsqueeze(0)


def _rotary(turns: Any, layout: tuple[bool, bool]) -> Rotary:
    """Of complex numbers [1, R, P / 2], or of cosines and sines [1, R, P] whose halves are the same."""
    if isinstance(turns, Tensor):
        cosines, sines = torch.view_as_real(turns[0]).unbind(-1)
    else:
        half = turns[0].shape[-1] // 2
        cosines, sines = (angle[0, :, :half] for angle in turns)
    return Rotary(cosines, sines, *layout)


def _has_parts(layer: Any) -> bool:
    if not all(hasattr(layer, name) for name in _PARTS):
        return False
    queries = ("q_proj",) if layer.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    norm = layer.kv_a_layernorm
    has_norm = hasattr(norm, "weight") and isinstance(getattr(norm, "variance_epsilon", None), float)
    return has_norm and all(hasattr(layer, name) for name in queries)


def _fuse(layer: Any, layout: tuple[bool, bool]) -> None:
    own: type = type(layer)
    layer.__class__, layer.layout = with_first(_FusedLatents, own), layout


@torch.inference_mode()
def computes_the_same(layer: Any, layout: tuple[bool, bool], rotary: nn.Module) -> bool:
    """Whether the fused layer and its own code agree on random rows: output, latents and rotary keys in the cache.

    False where a kernel fails. The layer is left as it was.
    """
    weight, kind = layer.o_proj.weight, type(layer)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, len(_PROBE_SLOTS), len(weight), generator=generator).to(weight.device, weight.dtype)
    positions = _PROBE_STRIDE * torch.arange(len(_PROBE_SLOTS), device=weight.device).unsqueeze(0)
    turns = rotary(hidden, position_ids=positions)
    own = _run(layer, hidden, turns)
    _fuse(layer, layout)
    try:
        mine = _run(layer, hidden, turns)
    except Exception:
        # A device or a compiler may not take the kernel: the layer's own code serves.
        log.warning("latent layers cannot be fused on %s", weight.device, exc_info=True)
        return False
    finally:
        layer.__class__ = kind
        del layer.layout
    return agree(mine, own)


def _run(layer: Any, hidden: Tensor, turns: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output of a layer for rows [1, R, hidden], and the latents and rotary keys that it writes."""
    weight, rows = layer.kv_a_proj_with_mqa.weight, len(_PROBE_SLOTS)
    attention = LatentAttention("reference", weight.device)
    plan = attention.plan(AttentionBatch((0, rows), (0,), (_PROBE_SLOTS,), 1, (None,)))
    keys, slots = weight.new_zeros(rows, 1, 1, len(weight)), torch.tensor(_PROBE_SLOTS, device=weight.device)
    # What `runner.PassContext` has: an empty cache of pages of one token, and one sequence in them.
    cache = SimpleNamespace(keys={int(layer.layer_idx): keys})
    step = SimpleNamespace(attention=attention, plan=plan, slots=slots, cache=cache)
    output = layer(hidden_states=hidden, position_embeddings=turns, attention_mask=None, outrider_step=step)[0]
    latent = len(layer.kv_a_layernorm.weight)
    return output, keys[..., :latent], keys[..., latent:]
