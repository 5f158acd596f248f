"""transformers' own models: the oracle of our layers. Nothing else here imports transformers."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tree_kernels.attention import AttentionBatch, AttentionVariant, TreeAttention, sequence_mask
from tree_kernels.recurrence import RecurrentPass, RecurrentStates, TreeRecurrence
from tree_models.agreement import TOLERANCE
from tree_models.building import build
from tree_models.families import Description, describe
from tree_models.layers.decoder import Decoder
from tree_models.layers.paged import PagedPass, expanded_shape
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import RotaryEmbedding
from tree_models.names import WeightNames
from tree_models.spec import AttentionSpec, LatentSpec, LayerSpec, RecurrentSpec, RotarySpec
from tree_models.weights.checkpoint import TensorsInMemory, TensorSource
from tree_models.weights.joined_parts import joined, renamed

# Of the comparison with transformers' layers.
_ROWS = 5
# Of the comparison of what stands around the layers: a window that fewer rows than these show, and words enough for
# them. Chosen.
_WINDOW = 2
_WORDS = 16
# Positions whose angles are compared; at the last, an error of 1e-3 of a fast frequency turns by more than a radian.
_PLACES = (0, 1, 7, 97, 1021)
# Texts' causal language models that transformers knows by the whole model's configuration alone.
_OF_WHOLE = {"emu3_text_model": "Emu3ForCausalLM", "mllama_text_model": "MllamaForCausalLM"}
# Texts' bodies that it knows by no configuration.
_BODIES = {
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel", "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel",
}  # fmt: skip
# Families whose layers are given no masks, for they have their own.
_MASKED_WITHIN = {"openai-gpt"}
# Of logits, relative, and of cosines and sines, in fp32.
_CLOSE = 1e-3


def causal_lm(config: Any, **options: Any) -> Any:
    """transformers' causal language model of a configuration. Where it has none by itself, as of the text of Qwen3-VL,
    its body with a head, which is what the model of texts and images computes of a text."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if config.model_type in _OF_WHOLE:
        return getattr(transformers, _OF_WHOLE[config.model_type])._from_config(config, **options)
    if config.model_type in _BODIES:
        return _with_head(getattr(transformers, _BODIES[config.model_type]))._from_config(config, **options)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING:
        return transformers.AutoModelForCausalLM.from_config(config, **options)
    return _with_head(MODEL_MAPPING[type(config)])._from_config(config, **options)


@cache
def _with_head(body: Any) -> Any:
    """A class of causal language models around a class of bodies."""
    import transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    def initialise(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.model = body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # A part is published as the whole model is.
        named = config.model_type.removesuffix("_text")
        self._weight_conversions = get_checkpoint_conversion_mapping("step3p7" if named == "step3p5" else named)
        self.post_init()

    def forward(self: Any, input_ids: Tensor, **arguments: Any) -> Any:
        kept = arguments.pop("logits_to_keep", 0)
        output = self.model(input_ids=input_ids, **arguments)
        logits = self.lm_head(output.last_hidden_state[:, -kept:])
        # Muse-Glimmer's.
        logits = logits * getattr(self.config, "output_multiplier", 1.0)
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=logits, past_key_values=output.past_key_values
        )

    base = next(one for one in body.__mro__[1:] if issubclass(one, transformers.PreTrainedModel))
    members = {
        "__init__": initialise,
        "forward": forward,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "config_class": body.config_class,
    }
    return type(f"{body.__name__}WithHead", (base, transformers.GenerationMixin), members)


def published_tensors(model: Any, tensors: dict[str, Tensor] | None = None) -> TensorsInMemory:
    """The tensors of a transformers model, or some of them, by the names that checkpoints have; memory is shared where
    it can be."""
    from transformers.core_model_loading import revert_weight_conversion

    state: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict() if tensors is None else tensors)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return TensorsInMemory({name: tensor for name, tensor in state.items() if name not in ties})


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
    inner = _body(model)
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


def _body(model: Any) -> Any:
    """What has the layers, whatever its class says of itself."""
    body = model.base_model
    inner = (getattr(body, name, None) for name in ("model", "decoder"))
    return next((one for one in inner if one is not None and hasattr(one, "layers")), body)


def _layers(body: Any) -> Any:
    """They have other names where models go by the plan of GPT."""
    return next(getattr(body, name) for name in ("layers", "h", "blocks") if hasattr(body, name))


def _made(inner: Any, index: int, device: torch.device) -> Any:
    """One of transformers' layers in memory, unwritten but for what no checkpoint has."""
    own = _layers(inner)[index].to_empty(device=device)
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
    alone.num_hidden_layers, alone.vocab_size, alone.pad_token_id = 1, min(_WORDS, alone.vocab_size), None
    with device:
        return _layers(type(inner)(alone).eval())[0]


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


def _variant(spec: Any) -> AttentionVariant:
    """Which keys a layer's rows see."""
    return AttentionVariant(getattr(spec, "window", None), chunked=getattr(spec, "chunked", False))


def _batch() -> AttentionBatch:
    return AttentionBatch((0, _ROWS), (0,), ((0,),), _ROWS, (None,))


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
    states = RecurrentStates(layers, 1, _ROWS, shape, decoder.dtype, decoder.device)
    recurrence = TreeRecurrence("torch", decoder.device)
    return RecurrentPass(recurrence, recurrence.plan(_batch(), (1,), states), states)


@torch.inference_mode()
def _outputs(own: Any, inner: Any, config: Any, decoder: Decoder, index: int) -> tuple[Tensor, Tensor]:
    """What our layer adds to random rows [R, H], and what transformers' layer adds to the same."""
    generator = torch.Generator().manual_seed(0)
    hidden = 0.05 * torch.randn(_ROWS, decoder.hidden_size, generator=generator)
    hidden = hidden.to(decoder.device, decoder.dtype)
    streams = decoder.spec.streams
    if streams is not None:
        hidden = torch.stack([hidden.roll(shift, 0) for shift in range(streams.count)], dim=1)
    positions = torch.arange(_ROWS, device=decoder.device)
    layer: Any = decoder.layers[index]
    spec = layer.spec.attention
    cache, vectors = SimpleNamespace(keys={}, values={}), None
    if isinstance(spec, AttentionSpec | LatentSpec):
        heads, *widths = expanded_shape(spec)
        place = (layer.attention or layer.shared.attention).cache_layer
        for kept in (place, place + 1) if layer.spec.ahead is not None else (place,):
            cache.keys[kept], cache.values[kept] = (hidden.new_zeros(1, _ROWS, heads, width) for width in widths)
    given: dict[str, Any] = {}
    if layer.shared is not None:
        vectors = torch.randn(_ROWS, decoder.hidden_size, generator=generator).to(hidden)
        given |= {"original_hidden_states": vectors[None], "layer_idx": index}
    if layer.spec.added_input is not None:
        vectors = torch.randn(_ROWS, layer.spec.added_input.width, generator=generator).to(hidden)
        given["per_layer_input"] = vectors[None]
    if "shared_kv_states" in signature(own.forward).parameters:
        given["shared_kv_states"] = {}
        if isinstance(spec, AttentionSpec) and spec.keys_of is not None:
            kept = [torch.randn(one[place].shape, generator=generator).to(hidden) for one in (cache.keys, cache.values)]
            cache.keys[place], cache.values[place] = kept
            # Heads of all ranks, which are alike.
            ranks = decoder.place.ranks
            whole = spec.heads * (1 if ranks is None else ranks.size) // own.self_attn.num_key_value_groups
            every = [one.repeat(1, 1, whole // spec.kv_heads, 1) for one in kept]
            pair = tuple(one.transpose(1, 2) for one in every)
            # Of a kind of layers, or of one layer.
            given["shared_kv_states"] |= {config.layer_types[index]: pair, spec.keys_of: pair}
    seen = sequence_mask(_batch(), 0, _variant(spec)).to(decoder.device)
    mask = torch.zeros(seen.shape, device=decoder.device, dtype=decoder.dtype)
    mask.masked_fill_(~seen, torch.finfo(decoder.dtype).min)
    if layer.shared is not None:
        given["causal_mask"] = mask[None, None]
    # Without padding, other layers need none.
    own_mask = None if isinstance(spec, RecurrentSpec) or layer.shared is not None else mask[None, None]
    given |= {"attention_mask": own_mask, **_falling(own, inner, seen, hidden.dtype)}
    given |= {"position_ids": positions[None], "position_embeddings": _turns(inner, config, hidden, positions, index)}
    taken = signature(own.forward).parameters
    if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
        # xLSTM's take no more than rows.
        given = {name: one for name, one in given.items() if name in taken}
    output = own(hidden[None] if streams is None else hidden.transpose(0, 1)[:, None], **given)
    expected = output[0] if isinstance(output, tuple | list) else output
    expected = expected[0] if streams is None else expected[:, 0].transpose(0, 1)
    attention = TreeAttention("reference", decoder.device)
    plan = attention.plan(_batch())
    step = PagedPass(attention, plan, positions, cache, _recurrent_pass(decoder))
    found = layer(hidden, decoder.angles_of(index, positions), step, None, vectors)
    if layer.spec.ahead is not None:
        found = decoder.layers[index + 1](found, decoder.angles_of(index + 1, positions), step)
    return found - hidden, expected - hidden


def _falling(own: Any, inner: Any, seen: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers' layer of this type takes for scores that fall with distance, where it takes it; `seen` [R,
    R]."""
    names = signature(own.forward).parameters
    if "position_bias" in names:
        # MPT's, whose mask is of what is hidden.
        bias = inner.build_mpt_alibi_tensor(inner.num_heads, _ROWS, device=seen.device)
        return {"position_bias": bias, "attention_mask": ~seen[None, None]}
    if "alibi" not in names:
        return {}
    made = getattr(inner, "build_alibi_tensor", None)
    every = torch.ones(1, _ROWS, device=seen.device)
    if getattr(inner, "use_alibi", False):
        # Falcon's, which stands in its mask.
        made = sys.modules[type(inner).__module__].build_alibi_tensor
        bias = made(every.long(), inner.num_heads, dtype=dtype)[None]
        mask = (bias * own.self_attention.inv_norm_factor).masked_fill(~seen, torch.finfo(dtype).min)
        return {"alibi": bias, "attention_mask": mask}
    return {"alibi": None if made is None else made(every, inner.num_heads, dtype=torch.float32)}


def surroundings_that_differ(config: Any) -> list[str]:
    """Compare a configuration's description of everything but the layers themselves with what transformers'
    model of it does: which rows each layer sees, the angles of its rows, and what becomes of embeddings and logits.

    Of a model with the same settings, but few words, random weights, and a window that a few rows show: a leftover key
    that transformers reads in this family, or does not, differs here.
    """
    small = copy.deepcopy(config)
    small.vocab_size = min(_WORDS, int(config.vocab_size))
    for part, size in (("vision_config", "num_hidden_layers"), ("audio_config", "num_blocks")):
        # What reads no text, where a model of text has it too.
        if hasattr(getattr(small, part, None), size):
            setattr(getattr(small, part), size, 1)
    small.dtype, small.pad_token_id = None, 0  # Emu3's may not be None.
    if getattr(small, "vocab_size_per_layer_input", None):
        small.vocab_size_per_layer_input = small.vocab_size
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(small, name, None):
            setattr(small, name, _WINDOW)
    description = describe(small)
    if description is None:
        return []
    words = torch.arange(_ROWS) % small.vocab_size
    seen, own = _without_layers(small, words, torch.arange(_ROWS))
    # Layers may have tensors in memory too.
    prefix = description.names.layer.partition("{")[0]
    kept = {name: one for name, one in own.state_dict().items() if not (one.is_meta or name.startswith(prefix))}
    source = published_tensors(own, kept)
    ends = replace(description, spec=replace(description.spec, layers=()))
    decoder = build(ends, source, Placement(torch.device("cpu"), torch.float32))
    embedded = decoder.embedded(words, torch.arange(_ROWS))
    found = []
    if not _close(decoder.logits(decoder.norm(decoder.joined(decoder.spread(embedded)))), seen.logits):
        found.append("embeddings or logits")
    if decoder.layer_inputs is not None:
        vectors = decoder.layer_inputs(words, embedded)
        if not all(_close(vectors[:, index], own["per_layer_input"][0]) for index, own in enumerate(seen.layers)):
            found.append("vectors of layers")
    if config.model_type not in _MASKED_WITHIN:
        found += [f"the mask of layer {index}" for index in _masks_that_differ(description, seen.layers)]
    last = min(max(_PLACES), description.spec.max_positions - 1)
    places = torch.tensor([min(place, last) for place in _PLACES])
    turned, _ = _without_layers(small, words, places)
    return found + [f"the angles of layer {index}" for index in _angles_that_differ(description, turned, places)]


def _without_layers(config: Any, words: Tensor, places: Tensor) -> tuple[SimpleNamespace, Any]:
    """Logits [R, V] of transformers' model with layers that do nothing, and what each layer is given; and the model,
    whose layers have no memory."""
    with torch.device("meta"):
        model = causal_lm(config, attn_implementation="eager").eval()
    body = _body(model)
    inside = {id(module) for module in _layers(body).modules()}
    generator = torch.Generator().manual_seed(0)
    for module in list(model.modules()):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if id(module) in inside or not own:
            continue
        module.to_empty(device="cpu", recurse=False)
        # Computes buffers.
        body._init_weights(module)
        for tensor in module.parameters(recurse=False):
            tensor.data = torch.randn(tensor.shape, generator=generator)
    model.tie_weights()
    given: list[dict[str, Any]] = []

    def passes(layer: Any, whole: bool) -> Callable[..., Any]:
        names = [*signature(type(layer).forward).parameters][2:]

        def forward(hidden: Tensor, *placed: Any, **arguments: Any) -> Any:
            given.append(arguments | dict(zip(names, placed, strict=False)))
            return hidden if whole else (hidden, None)

        return forward

    # Layers return rows, and older ones a tuple of these and more.
    for whole in (True, False):
        given.clear()
        for layer in _layers(body):
            layer.forward = passes(layer, whole)
        try:
            with torch.inference_mode():
                logits = model(input_ids=words[None], position_ids=places[None], use_cache=False).logits
        except (IndexError, RuntimeError, ValueError):
            # Rows are no pair, or the first of them is taken for all.
            if whole:
                continue
            raise
        if logits.shape[:2] == (1, len(words)):
            break
    return SimpleNamespace(logits=logits[0].float(), layers=given), model


def _close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= _CLOSE * float(expected.abs().max())


def _with_given(
    description: Description, given: Sequence[dict[str, Any]]
) -> Iterator[tuple[int, LayerSpec, dict[str, Any]]]:
    """Our layers by number, and what transformers' layers that compute something are given; one may be two of ours."""
    layers = description.spec.layers
    numbers = [description.names.published_number(index) for index in range(len(layers))]
    by_number = dict(zip(dict.fromkeys(numbers), given, strict=True))
    return ((index, layer, by_number[numbers[index]]) for index, layer in enumerate(layers))


def _masks_that_differ(description: Description, given: Sequence[dict[str, Any]]) -> list[int]:
    """Layers by number; MPT's masks are of what is hidden."""
    found = []
    for index, layer, arguments in _with_given(description, given):
        if not isinstance(layer.attention, AttentionSpec | LatentSpec):
            continue
        mask = arguments.get("causal_mask", arguments.get("attention_mask"))
        own = sequence_mask(_batch(), 0, _variant(layer.attention))
        # Without one every row sees all others.
        seen = torch.ones_like(own) if mask is None else mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > -1
        if "position_bias" in arguments:
            seen = ~seen
        if not torch.equal(own, seen):
            found.append(index)
    return found


def _angles_that_differ(description: Description, seen: SimpleNamespace, places: Tensor) -> list[int]:
    found = []
    for index, layer, arguments in _with_given(description, seen.layers):
        turning, given = layer.rotary, arguments.get("position_embeddings")
        if turning is None or given is None or not any(turning.frequencies):
            continue
        # What a layer does with its positions is compared with the layer.
        if not _same_angles(turning, given, places):
            found.append(index)
    return found


def _same_angles(turning: RotarySpec, given: Any, places: Tensor) -> bool:
    angles = RotaryEmbedding(turning, torch.device("cpu"))(places)
    # [R, W / 2], of which families keep one or two copies, side by side or as neighbours.
    cosines, sines = (table[:, : table.shape[1] // 2] for table in (angles.cosines, angles.sines))
    pair = (given.real, given.imag) if isinstance(given, Tensor) else given
    for own, theirs in zip((cosines, sines), pair, strict=True):
        theirs = theirs.reshape(len(places), -1).float()
        copies, rest = divmod(theirs.shape[1], own.shape[1])
        if rest or copies not in (1, 2):
            return False
        expected = own.repeat_interleave(copies, dim=1).sort(dim=1).values
        if not float((theirs.sort(dim=1).values - expected).abs().max()) <= _CLOSE * max(1.0, turning.scaling):
            return False
    return True
