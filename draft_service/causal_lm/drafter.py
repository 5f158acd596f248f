"""A small language model of the target's tokenizer as drafter, with its own keys and values.

It reads what was committed and grows trees as an EAGLE head does (`draft_service.neural`), only without features: entry
i of its cache is token i, the root among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from draft_service.drafters.base import Drafter, DrafterSpec, DraftSequence, MakePart
from draft_service.drafters.grown import Pending, among, warm_up
from draft_service.neural.config import NeuralConfig
from draft_service.neural.cuda_graphs.drafting import drafting_on, first_batches
from draft_service.neural.network import RowOutput
from draft_service.neural.tail_attention import Attend
from draft_service.neural.threads import in_passing_thread, launching_on
from draft_service.neural.tree_drafting import CacheEntry, Extension, TreeDrafting, Wanted
from outrider.errors import NotSupported
from outrider.model_store import model_source
from outrider.settings import SettingsError, setting
from outrider.tree import TokenTree

_ATTENTION = "outrider_draft"
# What shapes logits after the lm_head, which drafting leaves out.
_SHAPED_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
# Of hidden states; far above rounding in bfloat16, far below what another mask or position does.
_TOLERANCE = 0.1


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
    outrider_attend: Attend | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, R, D], key and value [1, Hkv, R, D], rotary applied."""
    if outrider_attend is None:
        raise NotSupported("a model that does not hand arguments on to its attention cannot draft")
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    if scaling is not None:
        # Our attention scales by the width; what a model scales by otherwise goes into the query.
        rows[0] = rows[0] * (scaling * query.shape[-1] ** 0.5)
    return outrider_attend(int(module.layer_idx), *rows).unsqueeze(0), None  # type: ignore[arg-type]


AttentionInterface.register(_ATTENTION, _attend)


class ModelNetwork:
    """A transformers model as `neural.tree_drafting.Network`."""

    token_ids: npt.NDArray[np.int32] | None = None

    def __init__(self, model: Any) -> None:
        """Takes the model over: its attention reads our cache from now on."""
        config = model.config
        model.set_attn_implementation(_ATTENTION)
        self._body, self._lm_head = model.get_decoder(), model.get_output_embeddings()
        self.layers, self.dtype, self.device = int(config.num_hidden_layers), model.dtype, model.device
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def read(self, token_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> RowOutput:  # noqa: ARG002
        """See `Network.read`; nothing is carried."""
        output = self._body(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, outrider_attend=attend
        )
        hidden: Tensor = output.last_hidden_state[0]
        return RowOutput(hidden[:, :0], hidden)

    def logits(self, lm_input: Tensor) -> Tensor:
        """See `Network.logits`."""
        logits: Tensor = self._lm_head(lm_input)
        return logits


class ModelDrafter:
    """See `ModelConfig` for what can be set."""

    name = "model"

    def __init__(self, config: ModelConfig) -> None:
        """Reads the model's configuration; its weights follow in `start`.

        Raises `SettingsError` when no model is named, `UnknownModel` when there is none of that name, and
        `NotSupported` for one that cannot draft.
        """
        if not config.draft_model:
            raise SettingsError(
                "the model drafter needs a draft_model: a name from `outrider model list`, a folder or a hub id"
            )
        self._config = config
        self._source = model_source(config.draft_model)
        settings = _settings_of(self._source)
        self.limits = config.tree.limits
        self.device = config.device
        # Trees must not reach past the end of position tables.
        longest = int(getattr(settings, "max_position_embeddings", config.max_context + config.tree.num_steps))
        self.max_context = min(config.max_context, longest - config.tree.num_steps)
        self.vocabulary_size = int(settings.vocab_size)
        self._drafting: TreeDrafting | None = None
        self._full = self._rows = 0

    def start(self) -> None:
        """Load the model, hold it to its own forward pass, and run once what drafting runs."""
        in_passing_thread(self._start)

    def stop(self) -> None:
        """Nothing to keep."""

    def open(self, sequence: DraftSequence) -> None:
        sequence.state = CacheEntry()

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        """Nothing to do: what was committed is read with the next tree."""

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self._started.forget(sequence.state)
            sequence.state = None

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = [TokenTree.root_only(sequence.root) for sequence in sequences]
        with launching_on(self._config.device):
            places, wanted = self._prepare(sequences)
            if wanted:
                for place, tree in zip(places, self._started.trees(wanted), strict=True):
                    trees[place] = tree
        return trees

    def begin(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.begin`."""
        with launching_on(self._config.device):
            places, wanted = self._prepare(sequences)
            return among(sequences, places, self._started.begin(wanted) if wanted else None)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> tuple[list[int], list[Wanted]]:
        """Read what was committed to those that the cache has room for. Returns where they stand, and their
        trees-to-be."""
        places = [place for place, sequence in enumerate(sequences) if self._reserve(sequence)]
        ready = [sequences[place] for place in places]
        extensions = []
        for sequence in ready:
            entries = sequence.state.entries
            extensions.append(Extension(sequence.state, sequence.token_ids[entries:], entries))
            self._rows += len(sequence.token_ids) - entries
        self._started.extend(extensions)
        return places, [Wanted(sequence.state, sequence, len(sequence.token_ids)) for sequence in ready]

    def stats(self) -> Mapping[str, float]:
        pages = self._drafting.cache.used_pages if self._drafting is not None else 0
        return {
            "model_cache_used_tokens": pages * self._config.page_size,
            "model_read_rows_total": self._rows,
            "model_cache_full_total": self._full,
        }

    @property
    def _started(self) -> TreeDrafting:
        assert self._drafting is not None, "the drafter was not started"
        return self._drafting

    def _start(self) -> None:
        with launching_on(self._config.device):
            self._load()

    def _load(self) -> None:
        config = self._config
        if config.threads:
            torch.set_num_threads(config.threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self._source, dtype=getattr(torch, config.dtype), use_safetensors=True
        )
        model = model.to(config.device).eval().requires_grad_(False)
        expected = _own_hidden(model)
        self._drafting = drafting_on(ModelNetwork(model), config)
        self._check(expected)
        for mode, count in first_batches(self._drafting, config):
            sequences = [DraftSequence(i, [0], 1, self.vocabulary_size, mode=mode) for i in range(count)]
            for sequence in sequences:
                self.open(sequence)
            warm_up(self, sequences)
            for sequence in sequences:
                self.close(sequence)
        self._rows = self._full = 0

    def _reserve(self, sequence: DraftSequence) -> bool:
        if self._started.reserve(sequence.state, len(sequence.token_ids) - sequence.state.entries):
            return True
        self._full += 1
        return False

    def _check(self, expected: Tensor) -> None:
        """Raise `NotSupported` unless the model says through our cache what it says on its own."""
        followed = CacheEntry()
        tokens = _probe(self.vocabulary_size)
        self._started.reserve(followed, len(tokens))
        self._started.extend([Extension(followed, tokens[:5], 0)])
        self._started.extend([Extension(followed, tokens[5:], 5)])
        states = self._started.states
        found = states.read(states.places([followed.pages])).lm_input[0].float()
        self._started.forget(followed)
        if (found - expected).norm() > _TOLERANCE * expected.norm():
            raise NotSupported("this model's attention is not plain causal attention; it cannot draft")


def _settings_of(source: str) -> PretrainedConfig:
    try:
        settings: Any = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise NotSupported(f"{source} cannot be loaded: {str(error).splitlines()[0]}") from None
    shaped = [name for name in _SHAPED_LOGITS if getattr(settings, name, None) not in (None, 1, 1.0)]
    if shaped or settings.get_text_config() is not settings:
        raise NotSupported(f"{settings.model_type} cannot draft: {', '.join(shaped) or 'it takes more than text'}")
    return settings


def _probe(vocabulary_size: int) -> list[int]:
    """Tokens of a short text, all over the vocabulary."""
    return [(7 + 12345 * i) % vocabulary_size for i in range(12)]


@torch.inference_mode()
def _own_hidden(model: Any) -> Tensor:
    """[H] in fp32: the last hidden state of the probe, by the model's own attention."""
    tokens = torch.tensor([_probe(model.config.vocab_size)], device=model.device)
    hidden: Tensor = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden[0, -1].float()


def _create(config: ModelConfig, _: MakePart) -> Drafter:
    return ModelDrafter(config)


SPEC = DrafterSpec("model", "model", ModelConfig, _create)
