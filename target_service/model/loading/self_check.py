"""A check at load that a model computes through our attention what it computes with its own.

Configurations do not show everything: an encoder, a layer that ignores the attention it is given, a bias that is added
to scores. A short text run both ways does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from target_service.core.kv_cache import KVCache
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from target_service.model.support import ModelRefused
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.recurrence import RecurrentPass, RecurrentStates, TreeRecurrence
from tree_models.layers.decoder import Decoder
from tree_models.layers.paged import PagedPass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of the text: no multiple of a page, a tile or a group of heads, so that none of them hides a fault. Chosen.
_TOKENS = 13
# The text is run in two parts, so that the second reads the first from the cache.
_FIRST = 8


def own_logits(model: PreTrainedModel) -> Tensor:
    """Logits [13, V] of a short text by the model's own eager attention. Before a runner takes over the model."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([_text(model.config.get_text_config().vocab_size)], device=model.device)
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def plain_logits(decoder: Decoder) -> Tensor:
    """Logits [13, V] of the same text by our layers in their plain form, with the definition of attention over keys and
    values of heads."""
    ids = torch.tensor(_text(decoder.vocabulary_size), device=decoder.device)
    attention = TreeAttention("reference", decoder.device)
    plan = attention.plan(AttentionBatch((0, _TOKENS), (0,), ((0,),), _TOKENS, (None,)))
    places = torch.arange(_TOKENS, device=decoder.device)
    cache = KVCache(1, _TOKENS, decoder.expanded_shapes, decoder.dtype, decoder.device)
    recurrent = None
    if decoder.recurrent_layers is not None:
        count, of_state = decoder.recurrent_layers
        states = RecurrentStates(count, 1, _TOKENS, of_state, decoder.dtype, decoder.device)
        recurrence = TreeRecurrence("torch", decoder.device)
        recurrent = RecurrentPass(recurrence, recurrence.plan(plan.batch, (1,), states), states)
    logits: Tensor = decoder(ids, places, PagedPass(attention, plan, places, cache, recurrent))
    return logits


def check_runner(runner: ModelRunner, own: Tensor) -> None:
    """Raise `ModelRefused` unless the runner's logits are `own` up to rounding. Frees the pages that it used."""
    pages = runner.cache.allocate(runner.cache.pages_for(_TOKENS))
    try:
        text, spans = _text(runner.vocabulary_size), (range(_FIRST), range(_FIRST, _TOKENS))
        steps = [ForwardInput.of_sequence(text[span.start : span.stop], span, pages, runner.cache) for span in spans]
        # Cloned, since a captured step overwrites the logits of the one before.
        parts = [runner.forward(step).clone() for step in steps]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        # Such as keys of another shape, or of more layers, than in the configuration.
        raise ModelRefused(f"{runner.name}: it cannot run over paged attention: {error}") from error
    finally:
        runner.cache.release(pages)
    expected, got = own.double(), torch.cat(parts).double()
    scale = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    rows = (got - expected).norm(dim=-1) / scale.clamp_min(1e-12)
    difference = float(torch.stack([rows[:_FIRST].median(), rows[_FIRST:].median()]).max())
    # In fp32 rounding makes at most 2e-6 for tiny models of 40 families. Negated, so that NaN is refused too.
    # Relative difference of logits, by the median row of each part. SmolLM2-135M: 0.04 by rounding in bf16, and 0.1 in
    # the worst row; 1 and more by a wrong mask or wrong positions. The median, since rounding may send one row through
    # another expert.
    if not difference < (0.01 if runner.dtype == torch.float32 else 0.4):
        raise ModelRefused(f"{runner.name}: its logits over paged attention differ from its own by {difference:.2f}")


def _text(vocabulary_size: int) -> tuple[int, ...]:
    return tuple([(17 + 7919 * i) % vocabulary_size for i in range(_TOKENS)])
