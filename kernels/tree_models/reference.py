"""transformers' own models: the oracle of our layers. Nothing else here imports transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tree_models.weights.checkpoint import TensorsInMemory

# Texts' causal language models that transformers knows by the whole model's configuration alone.
_OF_WHOLE = {"emu3_text_model": "Emu3ForCausalLM", "mllama_text_model": "MllamaForCausalLM"}
# Texts' bodies that it knows by no configuration.
_BODIES = {
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel", "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel", "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
}  # fmt: skip


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


def body_of(model: Any) -> Any:
    """What has the layers, whatever its class says of itself."""
    body = model.base_model
    inner = (getattr(body, name, None) for name in ("model", "decoder"))
    return next((one for one in inner if one is not None and hasattr(one, "layers")), body)


def layers_of(body: Any) -> Any:
    """A body's layers, which have other names where models go by the plan of GPT."""
    return next(getattr(body, name) for name in ("layers", "h", "blocks") if hasattr(body, name))
