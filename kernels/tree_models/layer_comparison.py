"""Whether our layers compute what transformers' own of the same weights do, over random rows at load."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tree_kernels.attention import TreeAttention, sequence_mask
from tree_kernels.recurrence import RecurrentPass, RecurrentStates, TreeRecurrence
from tree_models.agreement import TOLERANCE
from tree_models.layers.decoder import Decoder
from tree_models.layers.paged import PagedPass, expanded_shape
from tree_models.names import WeightNames
from tree_models.reference import body_of, causal_lm, layers_of
from tree_models.spec import AttentionSpec, LatentSpec, RecurrentSpec
from tree_models.surroundings import ROWS, WORDS, rows_of_a_text, surroundings_that_differ, variant_of
from tree_models.weights.checkpoint import TensorSource
from tree_models.weights.joined_parts import joined, renamed


def layers_that_differ(decoder: Decoder, config: Any, source: TensorSource) -> list[str]:
    """Compare what stands around the layers, and each kind of layer once with transformers' own of the same weights,
    over random rows, one layer in memory at a time. What differs, in words; nothing where all agree."""
    if found := surroundings_that_differ(config):
        return found
    source = joined(source, decoder.names)
    # Falcon's eager attention would add twice what its scores fall by.
    way = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    with torch.device("meta"):
        model = causal_lm(config, attn_implementation=way).eval()
    inner = body_of(model)
    for kind in dict.fromkeys(decoder.spec.layers):
        index = decoder.spec.layers.index(kind)
        if index and decoder.spec.layers[index - 1].ahead is not None:
            # Compared with the one before it, which adds to it.
            continue
        own = _made(inner, decoder.names.published_number(index), decoder.device).to(decoder.dtype)
        _fill(own, decoder, index, source)
        mine, expected = _outputs(own, inner, config, decoder, index)
        mine, expected = mine.flatten(1), expected.flatten(1)
        errors = (mine - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        # The median, since rounding may send one row to another expert. Negated, so that NaN differs.
        if not float(errors.median()) <= TOLERANCE:
            found.append(f"layer {index} by {float(errors.median()):.2f}")
        own.to("meta")
    return found


def _made(inner: Any, index: int, device: torch.device) -> Any:
    """One of transformers' layers in memory, unwritten but for what no checkpoint has."""
    own = layers_of(inner)[index].to_empty(device=device)
    computed = [buffer for name, buffer in own.named_buffers() if name not in own.state_dict()]
    for buffer in computed:
        buffer.fill_(float("nan"))
    for module in own.modules():
        if [*module.buffers(recurse=False)]:
            # Computes them where they can be, as rates of lightning attention: a checkpoint may lack these.
            inner._init_weights(module)
    if all(bool(buffer.isfinite().all()) for buffer in computed):
        return own
    own.to("meta")
    # Computed when the model is made, as Falcon-H1's scales are; layers of such models are alike.
    alone = copy.deepcopy(inner.config)
    alone.num_hidden_layers, alone.vocab_size, alone.pad_token_id = 1, min(WORDS, alone.vocab_size), None
    with device:
        return layers_of(type(inner)(alone).eval())[0]


@torch.no_grad()
def _fill(own: nn.Module, decoder: Decoder, layer: int, source: TensorSource) -> None:
    """Read the weights of one of transformers' layers. Experts, which it keeps in one tensor, are read one by one."""
    names, stored = decoder.names, source.stored
    block = decoder.spec.layers[layer].shared
    for name, memory in own.state_dict(keep_vars=True).items():
        of_block = block is not None and name.startswith(names.shared_norm.partition(".")[0])
        whole = names.in_layer(name, block.first if block is not None and of_block else layer)
        whole = renamed(whole, names)
        if any(re.fullmatch(pattern, whole) for pattern in names.ignored):
            continue
        if whole not in stored and name.endswith((".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")):
            of = names.expert_gate_up if name.endswith("up_proj") else (names.expert_down,)
            every = [[names.in_layer(one, layer, e) for one in of] for e in range(len(memory))]
            # transformers has memory for experts without weights too.
            made = _stacked([each for each in every if f"{each[0]}.weight" in stored], source)
            memory[: len(made)] = made
            continue
        if whole not in stored:
            whole = names.in_layer(_published_name(name, names), layer)
        tensor = source.read(whole)
        by_columns = names.experts_by_columns and tensor.dim() == 3 and tensor.shape != memory.shape
        memory.copy_(tensor.transpose(1, 2) if by_columns else tensor.view(memory.shape))


def _published_name(name: str, names: WeightNames) -> str:
    """What checkpoints call a tensor of a layer that has another name in memory."""
    usual = WeightNames()
    known = {usual.sinks: names.sinks, usual.shared_down: names.shared_down}
    # A.X-K1's, which is a part of its experts in memory.
    known["mlp.post_mlp_layernorm"] = names.after_mlp
    # A single name is of a merged tensor, which is merged in memory too.
    known |= dict(zip(usual.shared_gate_up, names.shared_gate_up, strict=False))
    gate = "self_attn.forget_gate."
    # Kimi Linear's, which are a layer's own in checkpoints.
    known |= {f"{gate}A_log": names.decay, f"{gate}dt_bias": names.decay_bias}
    known |= {f"{gate}{one}": f"self_attn.{one}" for one in ("f_a_proj", "f_b_proj")}
    for own, published in known.items():
        if name == own or name.startswith(f"{own}."):
            return published + name.removeprefix(own)
    return names.correction if name.endswith("correction_bias") else f"{names.router}.weight"


def _stacked(names: Sequence[Sequence[str]], source: TensorSource) -> Tensor:
    """[E, ..]: of each expert its tensors, one above another; or the one tensor of all."""
    if names[0] == names[-1] and len(names) > 1:
        return torch.cat([source.read(f"{name}.weight") for name in names[0]], dim=1)
    return torch.stack([torch.cat([source.read(f"{name}.weight") for name in of]) for of in names])


def _turns(inner: Any, config: Any, hidden: Tensor, positions: Tensor, index: int) -> Any:
    """What transformers' layer takes for its positions; made anew, since the model lies on no device."""
    # LFM2 with experts has another name for it.
    own = getattr(inner, "rotary_emb", None) or getattr(inner, "pos_emb", None)
    if own is None:
        return None
    made = config
    if thetas := getattr(config, "layer_rope_theta", None):
        # Zero embeds no positions.
        if not thetas[index]:
            return None
        made = copy.deepcopy(config)
        made.rope_parameters = {**config.rope_parameters, "rope_theta": thetas[index]}
    rotary = type(own)(config=made).to(hidden.device)
    by_kind = {"layer_type": config.layer_types[index]} if "layer_type" in signature(rotary.forward).parameters else {}
    if by_kind and config.rope_parameters.get(by_kind["layer_type"], ()) is None:
        return None
    # Those of Qwen3.5's are threefold, of which texts have the same thrice.
    ids = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions[None]
    return rotary(hidden[None], position_ids=ids, **by_kind)


def _recurrent_pass(decoder: Decoder) -> RecurrentPass | None:
    """Of a text that begins, where layers keep states."""
    if decoder.recurrent_layers is None:
        return None
    layers, shape = decoder.recurrent_layers
    states = RecurrentStates(layers, 1, ROWS, shape, decoder.dtype, decoder.device)
    recurrence = TreeRecurrence("torch", decoder.device)
    return RecurrentPass(recurrence, recurrence.plan(rows_of_a_text(), (1,), states), states)


@torch.inference_mode()
def _outputs(own: Any, inner: Any, config: Any, decoder: Decoder, index: int) -> tuple[Tensor, Tensor]:
    """What our layer adds to random rows [R, H], and what transformers' layer adds to the same."""
    generator = torch.Generator().manual_seed(0)
    hidden = 0.05 * torch.randn(ROWS, decoder.hidden_size, generator=generator)
    hidden = hidden.to(decoder.device, decoder.dtype)
    streams = decoder.spec.streams
    if streams is not None:
        hidden = torch.stack([hidden.roll(shift, 0) for shift in range(streams.count)], dim=1)
    positions = torch.arange(ROWS, device=decoder.device)
    layer: Any = decoder.layers[index]
    spec = layer.spec.attention
    cache, vectors = SimpleNamespace(keys={}, values={}), None
    if isinstance(spec, AttentionSpec | LatentSpec):
        heads, *widths = expanded_shape(spec)
        place = (layer.attention or layer.shared.attention).cache_layer
        for kept in (place, place + 1) if layer.spec.ahead is not None else (place,):
            cache.keys[kept], cache.values[kept] = (hidden.new_zeros(1, ROWS, heads, width) for width in widths)
    given: dict[str, Any] = {}
    if layer.shared is not None:
        vectors = torch.randn(ROWS, decoder.hidden_size, generator=generator).to(hidden)
        given |= {"original_hidden_states": vectors[None], "layer_idx": index}
    if layer.spec.added_input is not None:
        vectors = torch.randn(ROWS, layer.spec.added_input.width, generator=generator).to(hidden)
        given["per_layer_input"] = vectors[None]
    if "shared_kv_states" in signature(own.forward).parameters:
        given["shared_kv_states"] = {}
        if isinstance(spec, AttentionSpec) and spec.keys_of is not None:
            pair = _keys_of_another(own, spec, decoder, cache, place, generator)
            # Of a kind of layers, or of one layer.
            given["shared_kv_states"] |= {config.layer_types[index]: pair, spec.keys_of: pair}
    router, read = layer.spec.router_mlp, hidden
    if router is not None and router.reads:
        before = torch.randn(ROWS, router.width, generator=generator).to(hidden)
        given["prev_router_hidden_states"] = before[None]
        read = torch.stack([hidden, _widened(before, decoder.hidden_size)], dim=1)
    given |= _masks(own, inner, layer, decoder)
    given |= {"position_ids": positions[None], "position_embeddings": _turns(inner, config, hidden, positions, index)}
    taken = signature(own.forward).parameters
    if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
        # xLSTM's take no more than rows.
        given = {name: one for name, one in given.items() if name in taken}
    output = own(hidden[None] if streams is None else hidden.transpose(0, 1)[:, None], **given)
    expected = output[0] if isinstance(output, tuple | list) else output
    expected = expected[0] if streams is None else expected[:, 0].transpose(0, 1)
    attention = TreeAttention("reference", decoder.device)
    plan = attention.plan(rows_of_a_text())
    step = PagedPass(attention, plan, positions, cache, _recurrent_pass(decoder))
    found = layer(read, decoder.angles_of(index, positions), step, None, vectors)
    if router is not None and router.passes:
        # Beside what the next layer's router is to read.
        expected = torch.cat([expected, _widened(output[1][0], decoder.hidden_size)], dim=1)
        found, hidden = found.flatten(1), _widened(hidden, expected.shape[1])
    if layer.spec.ahead is not None:
        found = decoder.layers[index + 1](found, decoder.angles_of(index + 1, positions), step)
    return found - hidden, expected - hidden


def _masks(own: Any, inner: Any, layer: Any, decoder: Decoder) -> dict[str, Any]:
    """What transformers' layer takes for what its rows see."""
    spec = layer.spec.attention
    seen = sequence_mask(rows_of_a_text(), 0, variant_of(spec)).to(decoder.device)
    mask = torch.zeros(seen.shape, device=decoder.device, dtype=decoder.dtype)
    mask.masked_fill_(~seen, torch.finfo(decoder.dtype).min)
    if layer.shared is not None:
        return {"causal_mask": mask[None, None], "attention_mask": None}
    if layer.router_mlp is not None:
        # ZAYA's, beside which one of its convolutions may be.
        return {"attention_mask": {"causal": mask[None, None]}}
    # Without padding, layers with states need none.
    own_mask = None if isinstance(spec, RecurrentSpec) else mask[None, None]
    return {"attention_mask": own_mask, **_falling(own, inner, seen, decoder.dtype)}


def _keys_of_another(
    own: Any, spec: AttentionSpec, decoder: Decoder, cache: Any, place: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Random keys and values [1, heads, R, D] of a layer that this one attends to, which the cache gets too."""
    of_cache = cache.keys, cache.values
    kept = [torch.randn(one[place].shape, generator=generator).to(one[place]) for one in of_cache]
    cache.keys[place], cache.values[place] = kept
    # Heads of all ranks, which are alike.
    ranks = decoder.place.ranks
    whole = spec.heads * (1 if ranks is None else ranks.size) // own.self_attn.num_key_value_groups
    return tuple(one.repeat(1, 1, whole // spec.kv_heads, 1).transpose(1, 2) for one in kept)


def _widened(rows: Tensor, width: int) -> Tensor:
    """[R, width] of rows [R, ..], with zeros behind them."""
    return nn.functional.pad(rows, (0, width - rows.shape[1]))


def _falling(own: Any, inner: Any, seen: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers' layer of this type takes for scores that fall with distance, where it takes it; `seen` [R,
    R]."""
    names = signature(own.forward).parameters
    if "position_bias" in names:
        # MPT's, whose mask is of what is hidden.
        bias = inner.build_mpt_alibi_tensor(inner.num_heads, ROWS, device=seen.device)
        return {"position_bias": bias, "attention_mask": ~seen[None, None]}
    if "alibi" not in names:
        return {}
    made = getattr(inner, "build_alibi_tensor", None)
    every = torch.ones(1, ROWS, device=seen.device)
    if getattr(inner, "use_alibi", False):
        # Falcon's, which stands in its mask.
        made = sys.modules[type(inner).__module__].build_alibi_tensor
        bias = made(every.long(), inner.num_heads, dtype=dtype)[None]
        mask = (bias * own.self_attention.inv_norm_factor).masked_fill(~seen, torch.finfo(dtype).min)
        return {"alibi": bias, "attention_mask": mask}
    return {"alibi": None if made is None else made(every, inner.num_heads, dtype=torch.float32)}
