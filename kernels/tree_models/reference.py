"""transformers' own models: the oracle of our layers. Nothing else here imports transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tree_kernels.attention import AttentionBatch, TreeAttention, sequence_mask
from tree_models.agreement import TOLERANCE
from tree_models.layers.decoder import Decoder
from tree_models.weights.checkpoint import TensorsInMemory, TensorSource

# Of the comparison with transformers' layers.
_ROWS = 5


def published_tensors(model: Any) -> TensorsInMemory:
    """The tensors of a transformers model, by the names that checkpoints have; memory is shared where it can be."""
    from transformers.core_model_loading import revert_weight_conversion

    state: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return TensorsInMemory({name: tensor for name, tensor in state.items() if name not in ties})


def layers_that_differ(decoder: Decoder, config: Any, source: TensorSource) -> list[str]:
    """Compare each kind of layer once with transformers' own of the same weights, over random rows, one layer in memory
    at a time. What differs, in words; nothing where all agree."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    inner = model.base_model
    found = []
    for kind in dict.fromkeys(decoder.spec.layers):
        index = decoder.spec.layers.index(kind)
        own = inner.layers[index].to_empty(device=decoder.device).to(decoder.dtype)
        _fill(own, decoder, index, source)
        mine, expected = _outputs(own, inner, config, decoder, index)
        errors = (mine - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        # The median, since rounding may send one row to another expert. Negated, so that NaN differs.
        if not float(errors.median()) <= TOLERANCE:
            found.append(f"layer {index} by {float(errors.median()):.2f}")
        own.to("meta")
    return found


@torch.no_grad()
def _fill(own: nn.Module, decoder: Decoder, layer: int, source: TensorSource) -> None:
    """Read the weights of one of transformers' layers. Experts, which it keeps in one tensor, are read one by one."""
    names, stored = decoder.names, source.stored
    for name, memory in own.state_dict(keep_vars=True).items():
        whole = names.in_layer(name, layer)
        if whole not in stored and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            of = names.expert_gate_up if name.endswith("gate_up_proj") else (names.expert_down,)
            memory.copy_(_stacked([[names.in_layer(one, layer, e) for one in of] for e in range(len(memory))], source))
            continue
        if whole not in stored:
            # Routers have other names in memory than in checkpoints.
            router = names.correction if name.endswith("correction_bias") else f"{names.router}.weight"
            whole = names.in_layer(router, layer)
        memory.copy_(source.read(whole).view(memory.shape))


def _stacked(names: Sequence[Sequence[str]], source: TensorSource) -> Tensor:
    """[E, ..]: of each expert its tensors, one above another; or the one tensor of all."""
    if names[0] == names[-1] and len(names) > 1:
        return source.read(f"{names[0][0]}.weight")
    return torch.stack([torch.cat([source.read(f"{name}.weight") for name in of]) for of in names])


def _batch() -> AttentionBatch:
    return AttentionBatch((0, _ROWS), (0,), ((0,),), _ROWS, (None,))


def _turns(inner: Any, config: Any, hidden: Tensor, positions: Tensor, index: int) -> Any:
    """What transformers' layer takes for its positions; made anew, since the model lies on no device."""
    if getattr(inner, "rotary_emb", None) is None:
        return None
    made = config
    if thetas := getattr(config, "layer_rope_theta", None):
        # Zero embeds no positions.
        if not thetas[index]:
            return None
        made = copy.deepcopy(config)
        made.rope_parameters = {**config.rope_parameters, "rope_theta": thetas[index]}
    rotary = type(inner.rotary_emb)(config=made).to(hidden.device)
    by_kind = {"layer_type": config.layer_types[index]} if "layer_type" in signature(rotary.forward).parameters else {}
    return rotary(hidden[None], position_ids=positions[None], **by_kind)


@torch.inference_mode()
def _outputs(own: Any, inner: Any, config: Any, decoder: Decoder, index: int) -> tuple[Tensor, Tensor]:
    """What our layer adds to random rows [R, H], and what transformers' layer adds to the same."""
    generator = torch.Generator().manual_seed(0)
    hidden = 0.05 * torch.randn(_ROWS, decoder.hidden_size, generator=generator)
    hidden = hidden.to(decoder.device, decoder.dtype)
    positions = torch.arange(_ROWS, device=decoder.device)
    spec = decoder.spec.layers[index].attention
    seen = sequence_mask(_batch(), 0, getattr(spec, "window", None)).to(decoder.device)
    mask = torch.zeros(seen.shape, device=decoder.device, dtype=decoder.dtype)
    mask.masked_fill_(~seen, torch.finfo(decoder.dtype).min)
    output = own(
        hidden[None],
        attention_mask=mask[None, None],
        position_ids=positions[None],
        position_embeddings=_turns(inner, config, hidden, positions, index),
    )
    expected = (output[0] if isinstance(output, tuple) else output)[0]
    attention = TreeAttention("reference", decoder.device)
    plan = attention.plan(_batch())
    heads, *widths = decoder.expanded_shape
    keys, values = (hidden.new_zeros(1, _ROWS, heads, width) for width in widths)
    cache = SimpleNamespace(keys={index: keys}, values={index: values})
    step = SimpleNamespace(attention=attention, plan=plan, slots=positions, cache=cache)
    layer: Any = decoder.layers[index]
    found = layer(hidden, decoder.angles_of(index, positions), step)
    return found - hidden, expected - hidden
