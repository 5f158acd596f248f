"""Gemma 1 to 3, and VaultGemma."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import Description, attention, counted, decoder, layer, mlp, rms_norm
from tree_models.names import WeightNames
from tree_models.spec import FamilyRefused, HeadNormSpec, NormSpec

_BETWEEN: dict[str, Any] = {"before_mlp": "pre_feedforward_layernorm"}
_BEHIND: dict[str, Any] = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}


def gemma(config: Any) -> Description:
    """Gemma 1: scaled embeddings, weights of norms less one."""
    return _gemma(config, _norm(config), WeightNames())


def gemma2(config: Any) -> Description:
    """Gemma 2: windows in every other layer, capped scores and logits, norms before and behind each half."""
    norm = _norm(config)
    behind = {"after_attention": norm, "after_mlp": norm}
    return _gemma(config, norm, WeightNames(**_BETWEEN, **_BEHIND), behind, **_scores(config))


def vaultgemma(config: Any) -> Description:
    """VaultGemma: Gemma 2 without the norms behind."""
    return _gemma(config, _norm(config), WeightNames(**_BETWEEN), **_scores(config))


def gemma3(config: Any) -> Description:
    """Gemma 3's text: normed queries and keys, other rotary frequencies in layers with windows."""
    norm = _norm(config)
    behind = {"after_attention": norm, "after_mlp": norm}
    attending = _scores(config) | {"head_norm": HeadNormSpec(norm), "score_cap": None}
    return _gemma(config, norm, WeightNames(**_BETWEEN, **_BEHIND), behind, **attending)


def _gemma(
    config: Any, norm: NormSpec, names: WeightNames, norms: dict[str, Any] | None = None, **attending: Any
) -> Description:
    if getattr(config, "use_bidirectional_attention", False):
        raise FamilyRefused("its tokens see later ones")
    feeding = mlp(config, bias=False)
    layers = [layer(attention(config, index, **attending), feeding, norm, **(norms or {})) for index in counted(config)]
    # Gemma 1 has none, whatever its configuration says.
    cap = config.final_logit_softcapping if config.model_type != "gemma" else None
    scale = float(config.hidden_size) ** 0.5
    spec = decoder(config, layers, norm, embedding_scale=scale, logits_cap=None if cap is None else float(cap))
    return Description(spec, names)


def _norm(config: Any) -> NormSpec:
    return rms_norm(config, offset=1.0)


def _scores(config: Any) -> dict[str, Any]:
    cap = config.attn_logit_softcapping
    scaling = float(config.query_pre_attn_scalar) ** -0.5
    return {"windows": True, "scaling": scaling, "score_cap": None if cap is None else float(cap)}
