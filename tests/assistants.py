"""Tiny assistants for tiny Gemma 4 models, by transformers' own classes, and what these draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified_assistant import (
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)

from draft_service.assistant.in_pass import InPassAssistant
from draft_service.drafters.base import DraftSequence
from outrider.drafting.link import prepare_in_pass
from outrider.tree import TokenTree
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner, runner_over
from target_service.model.support import description_of
from tree_kernels.growth import GREEDY_TEMPERATURE
from tree_models.building import build
from tree_models.in_pass import SequenceKeys, pass_target
from tree_models.layers.placing import Placement
from tree_models.reference import published_tensors

# Of `windowed_models.WINDOWED`: with layers that share keys, with values that are keys, and both.
TARGETS = ("gemma4", "gemma4, experts", "gemma4_unified")
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]


class Known(NamedTuple):
    """What a target has computed of a text."""

    states: Tensor  # [1, L, W] after the last norm
    keys: dict[str, tuple[Tensor, Tensor]]  # by type of layer, [1, Hkv, L, D] each


def make_assistant(target: PreTrainedModel, folder: Path, *, ordered: bool = False) -> Any:
    """An assistant of random weights, and its folder as transformers writes it. With `ordered` it has logits of some
    clusters of tokens alone."""
    own, kinds = target.config, list(target.config.layer_types)
    # The widths of heads, and the number of those of keys, are the target's.
    within, full = (own.per_layer_config[kinds.index(kind)] for kind in _TYPES[1:])
    text = AutoConfig.for_model(
        own.model_type, vocab_size=own.vocab_size, sliding_window=own.sliding_window, layer_types=_TYPES,
        rope_parameters=own.rope_parameters, max_position_embeddings=own.max_position_embeddings,
        head_dim=within.head_dim, global_head_dim=full.head_dim, num_key_value_heads=within.num_key_value_heads,
        num_global_key_value_heads=full.num_key_value_heads, attention_k_eq_v=getattr(own, "attention_k_eq_v", False),
        num_attention_heads=4, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_kv_shared_layers=3,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, enable_moe_block=False, use_double_wide_mlp=False,
    )  # fmt: skip
    unified = own.model_type == "gemma4_unified_text"
    config = (Gemma4UnifiedAssistantConfig if unified else Gemma4AssistantConfig)(
        text_config=text, backbone_hidden_size=own.hidden_size, use_ordered_embeddings=ordered,
        num_centroids=own.vocab_size // 10, centroid_intermediate_top_k=5,
    )  # fmt: skip
    made = Gemma4UnifiedAssistantForCausalLM if unified else Gemma4AssistantForCausalLM
    torch.manual_seed(5)
    assistant = made(config).eval()
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(own.vocab_size))
    assistant.save_pretrained(folder)
    return assistant


@torch.no_grad()
def known_of(target: Any, text: Sequence[int]) -> Known:
    made = target(
        input_ids=torch.tensor([text]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
    )
    return Known(made.hidden_states[-1], dict(made.shared_kv_states))


@torch.no_grad()
def chain_of(assistant: Any, target: Any, text: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The tokens that transformers drafts behind a text, by its own candidate generator's steps, and the probability of
    each."""
    known = known_of(target, text[:-1])
    state, token, embed = known.states[:, -1:], torch.tensor([text[-1:]]), target.get_input_embeddings()
    tokens, probs = list[int](), list[float]()
    for _ in range(count):
        made = assistant(
            inputs_embeds=torch.cat([embed(token), state], dim=-1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=known.keys,
        )
        token, state = made.logits.argmax(-1), made.last_hidden_state
        tokens.append(int(token))
        probs.append(float((made.logits / GREEDY_TEMPERATURE).softmax(-1).max()))
    return tokens, probs


def teach(assistant: Any, target: Any, texts: Sequence[Sequence[int]], begin: int, folder: Path) -> None:
    """Teach an assistant the next token of each text from the token `begin` on, and write it again."""
    rows, places = list[tuple[Tensor, Tensor, int]](), list[tuple[dict[str, tuple[Tensor, Tensor]], int]]()
    longest = max(map(len, texts)) - 1
    embed = target.get_input_embeddings()
    for text in texts:
        known = known_of(target, text[:-1])
        for length in range(begin, len(text)):
            joined = torch.cat([embed(torch.tensor(text[length - 1 : length])), known.states[0, length - 2][None]], -1)
            rows.append((joined.detach(), torch.tensor(length - 1), text[length]))
            places.append((known.keys, length - 1))
    inputs = torch.stack([one for one, _, _ in rows])
    positions = torch.stack([one for _, one, _ in rows])[:, None]
    wanted = torch.tensor([one for _, _, one in rows])
    # The last key of each is the last.
    mask = torch.stack([(torch.arange(longest) >= longest - count).long() for _, count in places])
    keys = {kind: _shifted(places, kind, longest) for kind in ("full_attention", "sliding_attention")}
    optimiser = torch.optim.Adam(assistant.parameters(), lr=3e-3)
    for _ in range(60):
        made = assistant(inputs_embeds=inputs, position_ids=positions, attention_mask=mask, shared_kv_states=keys)
        loss = functional.cross_entropy(made.logits[:, 0], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assistant.save_pretrained(folder)


def _shifted(places: Sequence[tuple[dict[str, tuple[Tensor, Tensor]], int]], kind: str, longest: int) -> Any:
    """Keys and values [rows, Hkv, longest, D] of one type of layers, so many of each text at the end of its row."""
    return tuple(
        torch.cat(
            [functional.pad(held[kind][part][:, :, :count], (0, 0, longest - count, 0)) for held, count in places]
        )
        for part in range(2)
    )


def assisted_runner(target: PreTrainedModel, folder: Path, flags: str = "", **sizes: Any) -> ModelRunner:
    """A runner of a target with the assistant in a folder; `sizes` as in `runner_over`."""
    description = description_of(target.config)
    assert description is not None
    decoder = build(description, published_tensors(target), Placement(target.device, target.dtype))
    make = prepare_in_pass(f"inpass:assistant --head {folder} {flags}", "")
    usual: dict[str, Any] = {"num_pages": 64, "page_size": 16, "end_token_ids": ()}
    return runner_over(decoder, None, in_pass=make(pass_target(decoder, "")), **(usual | sizes))


class AloneAssistant:
    """A runner's assistant that drafts for single texts, which its target reads when a tree is asked for."""

    def __init__(self, runner: ModelRunner) -> None:
        drafter = runner.in_pass
        assert isinstance(drafter, InPassAssistant)
        self._runner, self._keys = runner, SequenceKeys((), 0)
        # In falling order, so that none stands where its number says.
        self._pages = sorted(runner.cache.allocate(runner.cache.num_pages))[::-1]
        self._drafter = drafter.on_host(runner.attention, runner.cache, lambda _: self._keys)
        self._drafter.start()
        self.open, self.close = self._drafter.open, self._drafter.close

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """The trees of one sequence, whose state the target keeps too."""
        (sequence,) = sequences
        read = tuple(sequence.token_ids[:-1])
        self._runner.forward(ForwardInput.of_sequence(read, range(len(read)), self._pages, self._runner.cache))
        self._keys = SequenceKeys(self._pages, len(read))
        assert self._runner.hooks is not None and sequence.features is not None
        sequence.features.append(self._runner.hooks.states(len(read)).clone(), 0)
        return self._drafter.propose(sequences)

    def tree_of(self, text: Sequence[int], **asked: Any) -> TokenTree:
        """The tree behind a text."""
        sequence = DraftSequence(1, list(text), 1, self._runner.vocabulary_size, **asked)
        self.open(sequence)
        (tree,) = self.propose([sequence])
        self.close(sequence)
        return tree
