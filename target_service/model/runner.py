"""One forward pass of a transformers model over our paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from target_service.kv_cache import KVCache
from target_service.model.support import ModelRefused, longest_context
from tree_kernels.attention import AttentionBatch, AttentionPlan, Backend, TreeAttention
from tree_kernels.kv_move import write_kv

ATTENTION = "outrider_tree"


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One packed pass: R rows of all sequences, and the rows whose logits are wanted."""

    # [R] each.
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    # Where each row's key and value go: page * page_size + offset.
    slots: tuple[int, ...]
    attention: AttentionBatch
    logit_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one pass needs."""

    attention: TreeAttention
    plan: AttentionPlan
    slots: Tensor
    cache: KVCache


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    outrider_step: _Step | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, R, D], key and value [1, Hkv, R, D], rotary applied."""
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ModelRefused("a mask of its own, capped scores or attention sinks are not served")
    if outrider_step is None:
        raise ModelRefused("a model that does not hand arguments on to its attention is not served")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    step, layer = outrider_step, int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, step.slots)
    out = step.attention.run(step.plan, query[0].transpose(0, 1), keys, values, scaling)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)


class ModelRunner:
    """A model with its KV cache: rows in, logits out. Knows nothing of sequences or trees."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any | None,
        cache: KVCache,
        attention: TreeAttention,
        *,
        name: str,
        max_context: int,
        end_token_ids: tuple[int, ...],
        tokenizer_fingerprint: str,
    ) -> None:
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self._attention = attention
        self.cache = cache
        self.tokenizer = tokenizer
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.name = name
        self.max_context = max_context
        self.end_token_ids = end_token_ids
        self.vocabulary_size = int(model.config.vocab_size)
        self._last_position = longest_context(model.config) - 1
        self.dtype = model.dtype
        self.device = model.device

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> Tensor:
        """Logits [len(logit_rows), vocabulary], in the model's dtype. Writes the rows' keys and values."""
        device = self.device
        step = _Step(
            self._attention,
            self._attention.plan(batch.attention),
            torch.tensor(batch.slots, device=device),
            self.cache,
        )
        output = self._model(
            input_ids=torch.tensor([batch.token_ids], device=device),
            # A tree may reach past the end of position tables. No such row can be committed.
            position_ids=torch.tensor([batch.positions], device=device).clamp_(max=self._last_position),
            use_cache=False,
            logits_to_keep=torch.tensor(batch.logit_rows, dtype=torch.int64, device=device),
            outrider_step=step,
        )
        logits: Tensor = output.logits[0]
        return logits


def end_tokens_of(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end a sequence, from the generation config, else the model's."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ends = model.config.eos_token_id if ends is None else ends
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)


def runner_for(
    model: PreTrainedModel,
    tokenizer: Any | None,
    *,
    num_pages: int,
    page_size: int,
    attention: Backend = "torch",
    name: str = "model",
    max_context: int | None = None,
    tokenizer_fingerprint: str = "",
) -> ModelRunner:
    """A runner for a model already loaded, on the device and in the dtype it is in."""
    config = model.config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    cache = KVCache(num_pages, page_size, config.num_hidden_layers, kv_heads, width, width, model.dtype, model.device)
    return ModelRunner(
        model.eval(),
        tokenizer,
        cache,
        TreeAttention(attention, model.device),
        name=name,
        max_context=max_context or longest_context(config),
        end_token_ids=end_tokens_of(model),
        tokenizer_fingerprint=tokenizer_fingerprint,
    )
