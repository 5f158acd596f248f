"""A drafter that runs a small language model with the target's tokenizer, and its own cache.

It reads committed tokens and grows trees as an EAGLE head does (`draft_service.neural`), but without features: entry i
of its cache is token i, the root included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from draft_service.checkpoints.target import folder_fingerprint
from draft_service.drafters.base import DrafterSpec, DraftSequence
from draft_service.neural.cached_prefixes import CacheEntry
from draft_service.neural.config import NeuralConfig
from draft_service.neural.network import Network, RowOutput
from draft_service.neural.tree_drafting import Extension
from draft_service.neural_drafter import CachingDrafter
from outrider.checkpoints.causal_lm import load_causal_lm, read_configuration
from outrider.checkpoints.folder import Checkpoint, read_config
from outrider.checkpoints.names import check_model_name
from outrider.checkpoints.plain_attention import attention_refusal
from outrider.checkpoints.refusal import CheckpointRefused, first_line
from outrider.errors import NotSupported
from outrider.hub import model_folder
from outrider.model_store import model_source
from outrider.settings import SettingsError, setting
from tree_models.building import build
from tree_models.families import Description, describe
from tree_models.foreign_attention import SeenShapes, attend_foreign
from tree_models.fused.preparing import LayerOptions, prepare_decoder
from tree_models.layer_comparison import layers_that_differ
from tree_models.layers.decoder import Decoder
from tree_models.layers.paged import CacheShape, PagedPass, UncachedPass
from tree_models.spec import FamilyRefused
from tree_models.weights.checkpoint import WeightsRefused, text_tensors, whole_names

_ATTENTION = "outrider_draft"


@dataclass(frozen=True)
class ModelConfig(NeuralConfig):
    """Settings of the model drafter: flags, environment (`OUTRIDER_MODEL_*`) or the `[model]` table."""

    draft_model: str = setting(
        "",
        "causal language model with the target's vocabulary: a name from `outrider model list`, a folder, or a hub id",
    )


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    *,
    outrider_step: PagedPass | UncachedPass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; see `attend_foreign`."""
    if outrider_step is None:
        raise NotSupported("a model that does not hand arguments on to its attention cannot draft")
    return attend_foreign(module, query, key, value, scaling, outrider_step), None


AttentionInterface.register(_ATTENTION, _attend)


class DecoderNetwork:
    """A decoder of our layers as `neural.network.Network`."""

    token_ids: npt.NDArray[np.int32] | None = None
    successors = 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.cache_shapes = decoder, decoder.cache_shapes
        self.dtype, self.device = decoder.dtype, decoder.device

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,  # noqa: ARG002
        positions: Tensor,
        step: PagedPass,
        sources: Tensor | None = None,  # noqa: ARG002
    ) -> RowOutput:
        """See `Network.forward_rows`. The state for children is empty."""
        hidden = self._decoder.hidden(token_ids, positions, step)
        return RowOutput(hidden[:, :0], hidden)

    def logits(self, lm_input: Tensor) -> Tensor:
        return self._decoder.logits(lm_input)


class ModelNetwork:
    """A transformers model as `neural.network.Network`, for families without layers of ours."""

    token_ids: npt.NDArray[np.int32] | None = None
    successors = 0

    def __init__(self, model: Any) -> None:
        """Changes the model: its attention uses our cache from now on. Raises `NotSupported` for one whose layers do
        not all have keys and values."""
        model.set_attn_implementation(_ATTENTION)
        self._body, self._lm_head = model.get_decoder(), model.get_output_embeddings()
        self.dtype, self.device = model.dtype, model.device
        self.cache_shapes: Sequence[CacheShape] = self._shapes(int(model.config.num_hidden_layers))

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,  # noqa: ARG002
        positions: Tensor,
        step: PagedPass | UncachedPass,
        sources: Tensor | None = None,  # noqa: ARG002
    ) -> RowOutput:
        """See `Network.forward_rows`. The state for children is empty."""
        output = self._body(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, outrider_step=step
        )
        hidden: Tensor = output.last_hidden_state[0]
        return RowOutput(hidden[:, :0], hidden)

    @torch.inference_mode()
    def _shapes(self, layers: int) -> list[CacheShape]:
        """Of every layer."""
        token, seen = torch.zeros(1, dtype=torch.int64, device=self.device), SeenShapes()
        self.forward_rows(token, None, token, seen)
        if seen.by_layer.keys() != set(range(layers)):
            raise NotSupported(
                f"{len(seen.by_layer)} of the {layers} layers of a model have attention: it cannot draft"
            )
        return [seen.by_layer[layer] for layer in range(layers)]

    def logits(self, lm_input: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(lm_input)
        return logits


class ModelDrafter(CachingDrafter):
    """See `ModelConfig` for what can be set."""

    name = "model"

    def __init__(self, config: ModelConfig) -> None:
        """Reads the model's configuration; its weights follow in `start`. Raises `SettingsError` when no model is
        named, `UnknownModel` when there is none of that name, and `NotSupported` for one that cannot draft."""
        if not config.draft_model:
            raise SettingsError(
                "the model drafter needs a draft_model: a name from `outrider model list`, a folder or a hub id"
            )
        check_name(config.draft_model)
        self._source = model_source(config.draft_model)
        self._folder, self._settings, self._description = _settings_of(self._source)
        # The target refuses a draft that was made for another tokenizer; a vocabulary's size shows little.
        self.tokenizer_fingerprint = folder_fingerprint(self._folder)
        # Trees must not reach past the end of position tables.
        tree, text = config.tree, self._settings.get_text_config()
        longest = int(getattr(text, "max_position_embeddings", config.max_context + tree.num_steps))
        if self._description is not None:
            longest = self._description.spec.max_positions
        super().__init__(config, tree, int(text.vocab_size), min(config.max_context, longest - tree.num_steps))

    def stats(self) -> Mapping[str, float]:
        return {**super().stats(), "model_read_rows_total": self._rows}

    def _ready(self, sequence: DraftSequence) -> bool:
        self._resume(sequence)
        return self._has_room(sequence, _unread(sequence))

    def _extend_cache(self, sequences: Sequence[DraftSequence]) -> None:
        """On a CPU at most `max_rows` rows, of the sequences with the fewest first: other streams and the pings of
        targets wait meanwhile, and a long prompt would take longer than targets wait. A GPU has a thread of its own."""
        room = self._config.max_rows if self.device == "cpu" else None
        extensions = []
        for sequence in sorted(sequences, key=_unread):
            entries = sequence.state.entries
            tokens = sequence.token_ids[entries:][:room]
            extensions.append(Extension(sequence.state, tokens, entries))
            self._rows += len(tokens)
            room = None if room is None else room - len(tokens)
        self.drafting.extend(extensions)
        self._publish(sequences)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> list[int]:
        """A sequence that is not read to its end has no tree; a later call goes on with it."""
        return [place for place in super()._prepare(sequences) if not _unread(sequences[place])]

    def _load_network(self) -> Network:
        try:
            checkpoint = Checkpoint.of_folder(self._folder)
            if self._description is not None:
                return DecoderNetwork(self._decoder(checkpoint, self._description))
            model: Any = load_causal_lm(checkpoint, self._settings, getattr(torch, self._config.dtype))
        except (OSError, CheckpointRefused, WeightsRefused, FamilyRefused) as error:
            raise NotSupported(f"{self._source} cannot be loaded: {first_line(error)}") from None
        kind, model = self._settings.model_type, model.to(self._config.device).eval().requires_grad_(False)
        if not getattr(model, "_supports_attention_backend", False):
            raise NotSupported(f"{kind} cannot draft: its attention cannot be replaced")
        if any(getattr(module, "is_causal", True) is False for module in model.modules()):
            raise NotSupported(f"{kind} cannot draft: its tokens see later ones")
        try:
            self._own_hidden = _own_hidden(model)
            return ModelNetwork(model)
        except (torch.OutOfMemoryError, NotSupported):
            raise
        # A model of another kind, such as an encoder, may raise anything.
        except Exception as error:
            reason = f"it does not run on token ids alone: {first_line(error)}"
            raise NotSupported(f"{kind} cannot draft: {reason}") from error

    def _decoder(self, checkpoint: Checkpoint, description: Description) -> Decoder:
        """The model of our layers, which are compared with transformers'."""
        text = self._settings.get_text_config()
        whole = checkpoint if text is self._settings else text_tensors(checkpoint)
        source = whole_names(whole, description.names)
        decoder = build(description, source, self._place)
        if differing := layers_that_differ(decoder, text, source):
            raise NotSupported(
                f"{self._source} cannot draft: our layers differ from transformers': {', '.join(differing)}"
            )
        if decoder.device.type == "cuda":
            prepare_decoder(decoder, LayerOptions(compiled=False))
        return decoder

    def _warm_up(self) -> None:
        """Raises `NotSupported` unless a transformers model's hidden state through our cache is the one of its own
        attention."""
        if self._description is None:
            self._check_attention()
        super()._warm_up()

    def _check_attention(self) -> None:
        entry = CacheEntry()
        tokens = _probe(self.vocabulary_size)
        self.drafting.reserve(entry, len(tokens))
        try:
            self.drafting.extend([Extension(entry, tokens[:5], 0)])
            self.drafting.extend([Extension(entry, tokens[5:], 5)])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, AttributeError, TypeError, ValueError) as error:
            # Such as keys of another shape than in the configuration.
            raise NotSupported(f"{self._source} cannot draft over our cache: {first_line(error)}") from error
        found = self.drafting.states.read_of([entry.slot]).lm_input[0].float()
        self.drafting.forget(entry)
        # Negated, so that NaN is refused too.
        # Relative, of hidden states: far above rounding in bfloat16, far below the effect of a wrong mask or position.
        if not (found - self._own_hidden).norm() <= 0.1 * self._own_hidden.norm():
            raise NotSupported("this model's attention is not plain causal attention; it cannot draft")


def _unread(sequence: DraftSequence) -> int:
    """Tokens that the model has not read."""
    entries: int = sequence.state.entries
    return len(sequence.token_ids) - entries


def check_name(model: str) -> None:
    """Raise `NotSupported` for what names no model, with what to name instead."""
    try:
        check_model_name(model)
    except CheckpointRefused as refused:
        raise NotSupported(f"{model} cannot draft: {refused}") from None


def _settings_of(source: str) -> tuple[Path, PretrainedConfig, Description | None]:
    """A model's folder, fetched if it is on a hub, its configuration, and the description of its layers where they are
    ours. Raises `NotSupported` for one that cannot draft."""
    try:
        folder = model_folder(source)
        read_config(folder)
        settings = read_configuration(folder)
    except (OSError, ValueError) as error:
        raise NotSupported(f"{source} cannot be loaded: {first_line(error)}") from None
    text = settings.get_text_config()
    try:
        described = describe(text)
    except FamilyRefused:
        described = None
    # What a foreign configuration has in place of a number.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NotSupported(f"{text.model_type} cannot draft: {first_line(error)}") from None
    reason = attention_refusal(text, variants=described is not None)
    if described is not None:
        if any(layer.states for layer in described.spec.layers):
            reason = "trees have no states of its recurrent layers"
    else:
        # Settings of models that change logits after the lm_head, which drafting does not do.
        shaping = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        shaped = [name for name in shaping if getattr(settings, name, None) not in (None, 1, 1.0)]
        reason = ", ".join(shaped) or reason
        if text is not settings:
            reason = "it takes more than text"
        elif not hasattr(settings, "num_attention_heads"):
            reason = reason or "it has no attention"
    if reason:
        raise NotSupported(f"{settings.model_type} cannot draft: {reason}")
    return folder, settings, described


def _probe(vocabulary_size: int) -> list[int]:
    """Twelve tokens from all over the vocabulary."""
    return [(7 + 12345 * i) % vocabulary_size for i in range(12)]


@torch.inference_mode()
def _own_hidden(model: Any) -> Tensor:
    """[H] in fp32: the hidden state of the probe's last token, by the model's own attention."""
    tokens = torch.tensor([_probe(model.config.vocab_size)], device=model.device)
    hidden: Tensor = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden[0, -1].float()


SPEC = DrafterSpec("model", ModelConfig, ModelDrafter)
