"""Models and tokenizers of the target from those of transformers that are in memory, for tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from target_service.model.network import TargetNetwork
from target_service.model.runner import ModelRunner, end_tokens_of, runner_over, takes_latents
from target_service.model.support import description_of
from target_service.model.transformers_network import TransformersNetwork, pack_linears
from target_service.text.tokenizer import SPECIAL_NAMES, ModelTokenizer
from tree_kernels.attention import Backend
from tree_models.building import build
from tree_models.layers.placing import Placement
from tree_models.reference import published_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def runner_for(
    model: PreTrainedModel,
    tokenizer: ModelTokenizer | None,
    *,
    attention: Backend = "torch",
    invariant: bool = False,
    latent: bool = True,
    packed: bool = False,
    **settings: Any,
) -> ModelRunner:
    """A runner for a transformers model that is loaded, with `settings` as in `runner_over`: of our layers with copies
    of its weights, or for a family without an entry of the model itself.

    `latent` keeps latents in the cache where the family and the backend support it; without it keys and values of all
    heads are kept, which is the reference; with `invariant` too, since attention to latents depends on the batch.
    `packed` as in `Placement`.
    """
    latent = latent and not invariant and takes_latents(attention)
    description = description_of(model.config)
    network: TargetNetwork
    if description is None:
        if packed:
            pack_linears(model)
        network = TransformersNetwork(model)
    else:
        place = Placement(model.device, model.dtype, packed, latent)
        network = build(description, published_tensors(model), place)
    ends = end_tokens_of(model.config, getattr(model, "generation_config", None))
    return runner_over(network, tokenizer, attention=attention, invariant=invariant, end_token_ids=ends, **settings)


def tokenizer_of(converted: Any) -> ModelTokenizer:
    """A tokenizer of the target for a fast one of transformers."""
    special = {name: str(text) for name in SPECIAL_NAMES if (text := getattr(converted, name, None))}
    backend = Tokenizer.from_str(converted.backend_tokenizer.to_str())
    return ModelTokenizer(
        backend,
        chat_template=converted.chat_template or "",
        special_tokens=special,
        response_template=getattr(converted, "response_template", None),
    )
