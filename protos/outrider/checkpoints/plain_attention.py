"""Which configurations are decoders in which each token attends to all tokens before it, and to no other."""

from __future__ import annotations

from transformers import PretrainedConfig

# Attributes of configurations whose attention is not plain causal attention over all earlier tokens.
_FOREIGN = {
    "index_topk": "attention to a choice of tokens",
    "attn_logit_softcapping": "capped attention scores",
    "attention_chunk_size": "chunked attention",
    "conv_L_cache": "convolution layers",
    "linear_num_value_heads": "linear attention",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "H_cycles": "layers that run more than once",
}
# Of these what layers with an entry in `tree_models.families` compute.
_COMPUTED = {
    "attention_chunk_size", "attn_logit_softcapping", "conv_L_cache", "linear_num_value_heads", "mamba_d_state",
    "ssm_state_size", "state_size",
}  # fmt: skip
# Kinds of layers, as configurations list them, that are plain attention.
_PLAIN = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention"}
# With an entry in `tree_models.families`.
_OWN = _WINDOWED | {
    "chunked_attention", "conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mlp", "moe", "recurrent",
}  # fmt: skip


def attention_refusal(config: PretrainedConfig, *, variants: bool = False) -> str:
    """Why a configuration's attention is no plain causal one, in a few words; empty where it is.

    With `variants`, sliding windows, capped scores, short convolutions and gated delta nets are computed too.
    """
    if getattr(config, "is_causal", True) is False:
        return "tokens that see later ones (is_causal) are not served"
    kinds = _kinds_of_layers(config)
    if kinds & _WINDOWED and not getattr(config, "sliding_window", None):
        return "layers of type sliding_attention without a sliding_window are not served"
    by_blocks = getattr(config, "layers_block_type", None) or getattr(config, "attn_layer_indices", None)
    if by_blocks and not (kinds and kinds <= (_PLAIN | _OWN if variants else _PLAIN)):
        return "layers that are not attention are not served"
    for name, what in _FOREIGN.items():
        if variants and name in _COMPUTED:
            continue
        # Settings of kinds of layers of which there are none mean nothing.
        if getattr(config, name, None) and not (kinds and kinds <= _PLAIN and name.startswith("mamba")):
            return f"{what} ({name}) is not served"
    if foreign := kinds - _PLAIN - (_OWN if variants else set()):
        return f"layers of type {', '.join(sorted(foreign))} are not served"
    window = getattr(config, "sliding_window", None)
    # Where layers are listed by kind, the list tells which have the window.
    windowed = getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None)
    if window and windowed and not variants and window < int(getattr(config, "max_position_embeddings", 0)):
        return f"a sliding window of {window} tokens is not served"
    return ""


def _kinds_of_layers(config: PretrainedConfig) -> set[str]:
    """The kinds that a configuration lists for its layers; empty where it lists none."""
    for name in ("layer_types", "layers_block_type"):
        listed = getattr(config, name, None)
        if isinstance(listed, list | tuple) and listed:
            return {str(one) for one in listed}
    return set()
