"""The model reading whole texts: hidden states of some layers, and its distributions of the next token.

Plain transformers with its own causal attention. Texts of a batch are padded at their ends, which no earlier token
attends to, so no mask is needed and the fastest kernel runs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.checkpoints.causal_lm import load_causal_lm, read_configuration
from outrider.checkpoints.folder import Checkpoint
from outrider.distillation import Lesson, TeacherWeights
from target_service.model.support import ModelRefused, check_supported


class TextReader:
    """See `outrider.distillation.Reader`."""

    def __init__(self, folder: Path, layers: tuple[int, ...], *, device: str, dtype: str) -> None:
        """Load the model. `layers` as in `Teacher.reader`. Raises `CheckpointRefused` for one that is not whole, and
        `ModelRefused` for one that is not built as this reader expects."""
        loaded = load_causal_lm(Checkpoint.of_folder(folder), read_configuration(folder), getattr(torch, dtype))
        loaded.set_attn_implementation("sdpa")
        self._model = cast(PreTrainedModel, loaded.to(device)).eval().requires_grad_(False)
        check_supported(self._model.config, self._model)
        parts: Any = self._model
        self._inner, self._head = parts.model, parts.lm_head
        self._layers = layers
        self._captured: dict[int, Tensor] = {}
        for layer in set(layers) - {len(self._inner.layers)}:
            self._inner.layers[layer].register_forward_hook(partial(self._keep, layer))
        self._check()

    def weights(self) -> TeacherWeights:
        embedding: Any = self._model.get_input_embeddings()
        return TeacherWeights(embedding.weight, self._head.weight)

    # Not inference_mode: a head's gradients are computed with these tensors.
    @torch.no_grad()
    def read(self, token_ids: Tensor, rows: Tensor, wanted: Tensor | None) -> Lesson:
        last = self._states(token_ids)
        count = len(self._inner.layers)
        states = torch.cat([last if layer == count else self._captured[layer] for layer in self._layers], dim=-1)
        self._captured.clear()
        chosen = last.flatten(0, 1).index_select(0, rows)
        # Rows whose logits exist at once: those of a whole batch would take gigabytes in fp32.
        return Lesson(states, torch.cat([self._probs(part, wanted) for part in torch.split(chosen, 4096)]))

    def _states(self, token_ids: Tensor) -> Tensor:
        """[B, L, W] after the last norm."""
        states: Tensor = self._inner(input_ids=token_ids, use_cache=False).last_hidden_state
        return states

    def _probs(self, states: Tensor, wanted: Tensor | None) -> Tensor:
        """[R, W] -> [R, V'] in the model's dtype, summed over the vocabulary in fp32."""
        logits: Tensor = self._head(states)
        total = logits.float().logsumexp(-1, keepdim=True)
        if wanted is not None:
            logits = logits.index_select(-1, wanted)
        return (logits.float() - total).exp_().to(logits.dtype)

    def _keep(self, layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._captured[layer] = output[0] if isinstance(output, tuple) else output

    @torch.inference_mode()
    def _check(self) -> None:
        """Refuse a model that scales the output of lm_head, which would be read wrongly."""
        text = torch.arange(13, device=self._model.device)[None] % self._model.config.vocab_size
        own: Tensor = self._model(input_ids=text, use_cache=False).logits[0].float()
        found = self._head(self._states(text))[0].float()
        # Relative difference of logits that are computed in two ways; a forgotten factor differs by far more.
        if not float((found - own).norm()) <= 0.02 * float(own.norm()):
            raise ModelRefused(f"{self._model.config.model_type}: its logits are more than lm_head of its last states")
