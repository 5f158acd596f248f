"""Whether what stands around our layers is what transformers' model has there: masks, angles, embeddings, logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tree_kernels.attention import AttentionBatch, AttentionVariant, sequence_mask
from tree_models.building import build
from tree_models.families import Description, describe
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import RotaryEmbedding
from tree_models.reference import body_of, causal_lm, layers_of, published_tensors
from tree_models.spec import AttentionSpec, LatentSpec, LayerSpec, RotarySpec

# Of both comparisons: rows, and words enough for them. Chosen.
ROWS = 5
WORDS = 16
# Positions whose angles are compared; at the last, an error of 1e-3 of a fast frequency turns by more than a radian.
_PLACES = (0, 1, 7, 97, 1021)
# Of logits, relative, and of cosines and sines, in fp32.
_CLOSE = 1e-3


def variant_of(spec: Any) -> AttentionVariant:
    """Which keys a layer's rows see."""
    return AttentionVariant(getattr(spec, "window", None), chunked=getattr(spec, "chunked", False))


def rows_of_a_text() -> AttentionBatch:
    """`ROWS` rows of a text that begins."""
    return AttentionBatch((0, ROWS), (0,), ((0,),), ROWS, (None,))


def surroundings_that_differ(config: Any) -> list[str]:
    """Compare a configuration's description of everything but the layers themselves with what transformers'
    model of it does: which rows each layer sees, the angles of its rows, and what becomes of embeddings and logits.

    Of a model with the same settings, but few words, random weights, and a window that a few rows show: a leftover key
    that transformers reads in this family, or does not, differs here.
    """
    small = copy.deepcopy(config)
    small.vocab_size = min(WORDS, int(config.vocab_size))
    for part, size in (("vision_config", "num_hidden_layers"), ("audio_config", "num_blocks")):
        # What reads no text, where a model of text has it too.
        if hasattr(getattr(small, part, None), size):
            setattr(getattr(small, part), size, 1)
    small.dtype, small.pad_token_id = None, 0  # Emu3's may not be None.
    if getattr(small, "vocab_size_per_layer_input", None):
        small.vocab_size_per_layer_input = small.vocab_size
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(small, name, None):
            # A window that fewer rows than these show. Chosen.
            setattr(small, name, 2)
    description = describe(small)
    if description is None:
        return []
    words = torch.arange(ROWS) % small.vocab_size
    seen, own = _without_layers(small, words, torch.arange(ROWS))
    # Layers may have tensors in memory too.
    prefix = description.names.layer.partition("{")[0]
    kept = {name: one for name, one in own.state_dict().items() if not (one.is_meta or name.startswith(prefix))}
    source = published_tensors(own, kept)
    ends = replace(description, spec=replace(description.spec, layers=()))
    decoder = build(ends, source, Placement(torch.device("cpu"), torch.float32))
    embedded = decoder.embedded(words, torch.arange(ROWS))
    found = []
    if not _close(decoder.logits(decoder.norm(decoder.joined(decoder.spread(embedded)))), seen.logits):
        found.append("embeddings or logits")
    if decoder.layer_inputs is not None:
        vectors = decoder.layer_inputs(words, embedded)
        if not all(_close(vectors[:, index], own["per_layer_input"][0]) for index, own in enumerate(seen.layers)):
            found.append("vectors of layers")
    # Its layers are given no masks, for they have their own.
    if config.model_type != "openai-gpt":
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
    body = body_of(model)
    inside = {id(module) for module in layers_of(body).modules()}
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
        for layer in layers_of(body):
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
    """Layers by number; MPT's masks are of what is hidden, and ZAYA has one for its convolutions beside them."""
    found = []
    for index, layer, arguments in _with_given(description, given):
        if not isinstance(layer.attention, AttentionSpec | LatentSpec):
            continue
        mask = arguments.get("causal_mask", arguments.get("attention_mask"))
        mask = mask["causal"] if isinstance(mask, dict) else mask
        own = sequence_mask(rows_of_a_text(), 0, variant_of(layer.attention))
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
