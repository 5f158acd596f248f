"""Heads that learnt in a moment what a tiny model says, so that their drafts are right often enough."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from conftest import TINY
from eagle_heads import as_module, beginning
from engine_harness import plain_each, request
from hidden_states import states_of
from once import once
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceRequest
from tree_models.layers.paged import UncachedPass

VOCABULARY, HIDDEN, LAYERS = TINY["vocab_size"], TINY["hidden_size"], TINY["num_hidden_layers"]
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}
KINDS: dict[str, dict[str, Any]] = {
    "eagle-3.1": {"kind": "eagle3", "num_features": 2, "feature_layers": (0, 2), "fc_norm": True, "norm_output": True},
    "eagle-1": {"kind": "eagle", "num_features": 1, "feature_layers": (2,), "fc_bias": True},
}
# Which reads one state as it is: tried with fewer tests.
WITHOUT_FC: dict[str, Any] = {"kind": "eagle3", "num_features": 1, "has_fc": False}
# A target's own module, which speaks through the target's embedding and lm_head as they are.
MTP: dict[str, Any] = {"kind": "mtp", "num_features": 1, "input_norm": True}
MAX_TOKENS = 24


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 5, 17, 40)]


def request_of(prompt: Sequence[int], sampling: SamplingParams, max_tokens: int = MAX_TOKENS) -> SequenceRequest:
    return request(prompt, max_tokens, sampling=sampling)


def new_head(teacher: PreTrainedModel, kind: Mapping[str, Any], seed: int = 5) -> EagleHead:
    """Random weights, beside the teacher's embedding."""
    module = kind["kind"] == "mtp"
    config = HeadConfig(
        **(dict(kind) | ({"kind": "eagle"} if module else {})),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        vocab_size=teacher.config.vocab_size,
        draft_vocab_size=teacher.config.vocab_size,
        target_hidden_size=HIDDEN,
    )
    torch.manual_seed(seed)
    made = beginning(EagleHead(as_module(config) if module else config))
    made.embedding.data.copy_(teacher.get_input_embeddings().weight)
    if module:
        made.lm_head.weight.data.copy_(teacher.get_output_embeddings().weight)
        made.embedding.requires_grad_(False)
        made.lm_head.requires_grad_(False)
    return made


@once
def taught_head(
    teacher: PreTrainedModel,
    kind: str,
    max_tokens: int = MAX_TOKENS,
    steps: int = 60,
    samplings: Mapping[str, SamplingParams] = SAMPLINGS,
) -> EagleHead:
    """A head that has seen what the teacher says to every prompt in every way of sampling. Made once for all tests of a
    process, none of which changes it."""
    made = new_head(teacher, (KINDS | {"without fc": WITHOUT_FC})[kind])
    layers = made.config.layers_of(teacher.config.num_hidden_layers)
    _train(made, _texts(teacher, max_tokens, samplings, layers), steps)
    return made.requires_grad_(False).eval()


@once
def taught_modules(teacher: PreTrainedModel, *, normed_state: bool, chained: bool) -> tuple[EagleHead, EagleHead]:
    """Two MTP modules that have seen what `taught_head` has, each of which learnt its own depth and nothing else. Made
    once for all tests of a process, none of which changes them."""
    layers = (LAYERS - (not normed_state),)
    modules = tuple(new_head(teacher, MTP | {"feature_layers": layers}, seed) for seed in (5, 6))
    texts = _texts(teacher, MAX_TOKENS, SAMPLINGS, layers)
    torch.manual_seed(0)
    learning = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=4e-3)
    padded = _Texts(texts)
    for _ in range(90):
        loss, hidden = torch.zeros(()), padded.states
        for k, module in enumerate(modules, start=1):
            of_module, hidden = padded.pass_over(module, hidden if chained else padded.states, k, 0)
            loss = loss + of_module
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    first, second = (module.requires_grad_(False).eval() for module in modules)
    return first, second


def _texts(
    teacher: PreTrainedModel, max_tokens: int, samplings: Mapping[str, SamplingParams], layers: Sequence[int]
) -> list[tuple[list[int], Tensor]]:
    """What the teacher says to every prompt in every way of sampling, and its states."""
    wanted = [request_of(prompt, sampling, max_tokens) for sampling in samplings.values() for prompt in prompts()]
    texts = [[*one.token_ids, *said] for one, said in zip(wanted, plain_each(teacher, wanted), strict=True)]
    return [(tokens, states_of(teacher, tokens, layers)) for tokens in texts]


class _Padded(UncachedPass):
    """Causal attention over rows of texts of the same length, one text after the other."""

    def __init__(self, texts: int) -> None:
        self._texts = texts

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        parts = (part.unflatten(0, (self._texts, -1)).transpose(1, 2) for part in (query, key, value))
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class _Texts:
    """Texts side by side, padded to the longest, since a pass over all of them takes as long as one over each. Rows of
    a text do not see what is behind it, and count only where it has a token to foretell."""

    def __init__(self, texts: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        self._lengths = torch.tensor([len(tokens) for tokens, _ in texts])
        self._ids = pad_sequence([torch.tensor(tokens) for tokens, _ in texts], batch_first=True)
        self.states = pad_sequence([states for _, states in texts], batch_first=True)  # [texts, longest, F * W]

    def pass_over(self, head: EagleHead, features: Tensor, ahead: int, first: int) -> tuple[Tensor, Tensor]:
        """One pass that foretells each text's tokens from `ahead` + 1 on, its rows from position `first` on: the sum of
        the texts' mean losses, and the states [texts, rows, H] that the head carries on. `features` are
        [texts, at least rows, H]."""
        texts, longest = self._ids.shape
        count = longest - ahead - 1
        ids = self._ids[:, ahead : ahead + count].flatten()
        positions = torch.arange(first, first + count).repeat(texts)
        output = head(ids, features[:, :count].flatten(0, 1), positions, _Padded(texts))
        targets = self._ids[:, ahead + 1 :].flatten()
        losses = functional.cross_entropy(head.logits(output.lm_input), targets, reduction="none").view(texts, count)
        rows = (self._lengths - ahead - 1)[:, None]
        loss = torch.where(torch.arange(count) < rows, losses / rows, 0.0).sum()
        return loss, output.carried.view(texts, count, -1)


def _train(head: EagleHead, texts: Sequence[tuple[Sequence[int], Tensor]], steps: int) -> None:
    """Teach the head what followed, by plain teacher forcing."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(head.parameters(), lr=4e-3)
    padded = _Texts(texts)
    for _ in range(steps):
        loss, features = torch.zeros(()), head.project(padded.states)
        for step in range(2):
            # The second step reads the head's own features, as drafting does.
            of_step, features = padded.pass_over(head, features, 1 + step, step)
            loss = loss + of_step
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
