"""Latent layers whose norm, rotary embedding and new rows in the cache are one launch; see `norm_rope_write`.

What is left of a layer's attention for a GPU to launch: the projections before and behind it, this, the products that
absorbing is, attention and its merging. Whatever a layer computes between its projections and its attention, it is
asked for its parts by name and then run beside its own code on random rows; one that computes anything else keeps it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from target_service.model.latent_attention import attend_absorbed, head_projections, is_unexpanded, takes_latents_now
from target_service.model.support import ModelRefused
from tree_kernels.attention import AttentionBatch, AttentionPlan
from tree_kernels.latent_attention import LatentAttention, LatentRows, Rotary, norm_rope_write

log = logging.getLogger(__name__)
# (pairs in, pairs out) of `Rotary`: DeepSeek-V2's, DeepSeek-V3's, and MiniCPM3's.
_LAYOUTS = ((True, True), (True, False), (False, False))
_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj", "layer_idx", "scaling", "q_lora_rank")
# By a layer's class, the one that a fused layer of it gets.
_FUSED: dict[type, type] = {}
# Relative error of two ways to compute a layer in half precision; another formula makes far more. As for other layers.
_TOLERANCE = 0.03
# Rows of the trial by their slots, which are in another order than the rows.
_PROBE_SLOTS = (3, 0, 4, 1, 2)
# Between their positions, so that slow angles turn too.
_PROBE_STRIDE = 37


def fuse_latents(model: PreTrainedModel) -> int:
    """Fuse every layer of latent attention of the model of a runner, in place, or none; returns how many.

    Its attention has to be the runner's already: layers are tried with it. May be called again.
    """
    inner: Any = model.base_model
    layers: list[Any] = [module for module in model.modules() if is_unexpanded(module)]
    rotary = getattr(inner, "rotary_emb", None)
    if not layers or rotary is None or not takes_latents_now(model.config):
        return 0
    if not all(_has_parts(layer) for layer in layers):
        return 0
    # An earlier call may have fused a layer: trials begin with its own class.
    for layer in layers:
        layer.__class__ = _plain(type(layer))
    for layout in _LAYOUTS:
        if all(computes_the_same(layer, layout, rotary) for layer in layers):
            for layer in layers:
                _fuse(layer, layout)
            log.info("latent layers of %s: norm, rotary embedding and cache in one launch", type(inner).__name__)
            return len(layers)
    log.info("latent layers of %s turn or norm in a way of their own and stay as they are", type(inner).__name__)
    return 0


class _FusedLatents:
    """Before a layer's own class in the order of its methods."""

    config: Any
    layout: tuple[bool, bool]
    q_lora_rank: int | None
    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    kv_a_proj_with_mqa: Any
    o_proj: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """[1, R, hidden] -> [1, R, hidden], with the arguments of the layer's own code, which runs what is no step."""
        step, held = kwargs.get("outrider_step"), kwargs.get("outrider_held")
        a_step = (step is not None or held is not None) and past_key_values is None and position_embeddings is not None
        if not a_step or not takes_latents_now(self.config):
            plain: tuple[Tensor, Any] = super().forward(  # type: ignore[misc]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return plain
        if attention_mask is not None:
            raise ModelRefused("a mask of its own is not served")
        if self.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        vectors = self.kv_a_proj_with_mqa(hidden_states)
        values = _attend_fused(self, queries, vectors, position_embeddings, step, held)
        return self.o_proj(values), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_fused(layer: Any, queries: Tensor, vectors: Tensor, turns: Any, step: Any, held: Any) -> Tensor:
    """[1, R, H * V] of [1, R, H * (N + P)] and [1, R, L + P].

    Layers differ in it and steps too, so the compiler does not look into it; what lies around it is the same of all.
    """
    step = held.step if held is not None else step
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
    attended = attend_absorbed(plain, absorbed, projections, step.attention, step.plan, cache, float(layer.scaling))
    return attended.flatten(1).unsqueeze(0)


def _rotary(turns: Any, layout: tuple[bool, bool]) -> Rotary:
    """Of complex numbers [1, R, P / 2], or of cosines and sines [1, R, P] whose halves are the same."""
    if isinstance(turns, Tensor):
        cosines, sines = torch.view_as_real(turns[0]).unbind(-1)
    else:
        half = turns[0].shape[-1] // 2
        cosines, sines = (angle[0, :, :half] for angle in turns)
    return Rotary(cosines, sines, *layout)


def _has_parts(layer: Any) -> bool:
    norm = getattr(layer, "kv_a_layernorm", None)
    named = all(hasattr(layer, name) for name in _PARTS)
    queries = ("q_proj",) if named and layer.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    named = named and all(hasattr(layer, name) for name in queries)
    return named and isinstance(getattr(norm, "variance_epsilon", None), float) and hasattr(norm, "weight")


def _fuse(layer: Any, layout: tuple[bool, bool]) -> None:
    kind = type(layer)
    if kind not in _FUSED:
        _FUSED[kind] = type(kind.__name__, (_FusedLatents, kind), {})
    layer.__class__, layer.layout = _FUSED[kind], layout


def _plain(kind: type) -> type:
    return next((own for own, fused in _FUSED.items() if fused is kind), kind)


@torch.inference_mode()
def computes_the_same(layer: Any, layout: tuple[bool, bool], rotary: nn.Module) -> bool:
    """Whether the layer fused and its own code make the same of random rows, to the rounding of half precision: its
    output, and in the cache latents and rotary keys. A kernel that fails does not. The layer is left as it was."""
    weight, kind = layer.o_proj.weight, type(layer)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, len(_PROBE_SLOTS), len(weight), generator=generator).to(weight.device, weight.dtype)
    positions = _PROBE_STRIDE * torch.arange(len(_PROBE_SLOTS), device=weight.device).unsqueeze(0)
    turns = rotary(hidden, position_ids=positions)
    own = _made(layer, hidden, turns)
    _fuse(layer, layout)
    try:
        mine = _made(layer, hidden, turns)
    except Exception:
        # Of a kernel that a device or a compiler does not take, too: the layer's own code serves.
        log.warning("latent layers cannot be fused on %s", weight.device, exc_info=True)
        return False
    finally:
        layer.__class__ = kind
        del layer.layout
    # Each by itself: where rotary keys are small beside latents, wrong ones would be lost in a common norm.
    return all(
        bool((one - other).float().norm() <= _TOLERANCE * other.float().norm())
        for one, other in zip(mine, own, strict=True)
    )


def _made(layer: Any, hidden: Tensor, turns: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output of a layer for rows [1, R, hidden], and the latents and rotary keys that it writes."""
    step = _ProbeStep.of(layer)
    output = layer(hidden_states=hidden, position_embeddings=turns, attention_mask=None, outrider_step=step)[0]
    latent = len(layer.kv_a_layernorm.weight)
    keys = step.cache.keys[int(layer.layer_idx)]
    return output, keys[..., :latent], keys[..., latent:]


@dataclass(frozen=True, slots=True)
class _ProbeCache:
    keys: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class _ProbeStep:
    attention: LatentAttention
    plan: AttentionPlan
    slots: Tensor
    cache: _ProbeCache

    @classmethod
    def of(cls, layer: Any) -> _ProbeStep:
        """An empty cache of pages of one token, and one sequence in them."""
        weight, rows = layer.kv_a_proj_with_mqa.weight, len(_PROBE_SLOTS)
        attention = LatentAttention("reference", weight.device)
        plan = attention.plan(AttentionBatch((0, rows), (0,), (_PROBE_SLOTS,), 1, (None,)))
        cache = _ProbeCache({int(layer.layer_idx): weight.new_zeros(rows, 1, 1, len(weight))})
        return cls(attention, plan, torch.tensor(_PROBE_SLOTS, device=weight.device), cache)
