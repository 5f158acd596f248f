"""vLLM's model runner and scheduler, as far as a proposer sees them, over a model that is a function.

What is mimicked, of vLLM 0.24's `GPUModelRunner` and `InputBatch`: rows without names, texts and lengths in arrays that
stay; drafts written behind a text before they are verified; prompts read in pieces, with no token until the last; rows
filled and condensed when requests end; rows swapped; a request that has ended in the batch for one more call; no call
at all when a text is near the longest that may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCABULARY = 211
Model = Callable[[Sequence[int]], int]


def vllm_config(*, rows: int = 8, length: int = 512, tokens: int = 6, rank: int = 0, **settings: Any) -> Any:
    """What the proposer reads of vLLM's own; `settings` are those of `additional_config["outrider"]`."""
    return SimpleNamespace(
        additional_config={"outrider": settings},
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=length, get_vocab_size=lambda: VOCABULARY),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2, distributed_executor_backend="mp"),
    )


def reciting(text: Sequence[int]) -> int:
    """A model whose answer hangs on the first token of the prompt and on how many tokens there are: every request that
    begins alike goes on alike, with no period of its own."""
    return (text[0] * 7919 + len(text) * len(text) * 31) % (VOCABULARY - 1) + 1


def repeating(text: Sequence[int]) -> int:
    """A model that goes round in eleven tokens."""
    return (text[0] + len(text) % 11 * 13) % (VOCABULARY - 1) + 1


@dataclass(eq=False)
class Asked:
    """A request, and what has become of it. `drafted` and `accepted` are tokens."""

    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_tokens


def plain(model: Model, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says, token by token."""
    text = list(prompt)
    for _ in range(max_tokens):
        text.append(model(text))
    return text[len(prompt) :]


class Runner:
    """Steps of vLLM with a proposer. Every answer of it is held to what vLLM demands."""

    def __init__(self, config: Any, proposers: Sequence[Any], model: Model = reciting, chunk: int = 512) -> None:
        """`proposers` are those of the tensor-parallel ranks: drafts are read of the first."""
        self._proposers, self._model, self._chunk = proposers, model, chunk
        self._max_rows: int = config.scheduler_config.max_num_seqs
        self._max_length: int = config.model_config.max_model_len
        self._max_drafts: int = config.speculative_config.num_speculative_tokens
        self.rows: list[Asked] = []
        self.waiting: list[Asked] = []
        self._token_ids = np.zeros((self._max_rows, self._max_length), np.int32)
        self._lengths = np.zeros(self._max_rows, np.int32)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Asked:
        request = Asked(list(prompt), max_tokens)
        self.waiting.append(request)
        return request

    def answer(self, *asked: tuple[Sequence[int], int], pause: float = 0.0) -> list[Asked]:
        """Ask all at once, and step until all have ended."""
        requests = [self.ask(*one) for one in asked]
        while not all(request.done for request in requests):
            self.step()
            time.sleep(pause)
        return requests

    def preempt(self, request: Asked) -> None:
        """Out of the batch, to be read again from its first token when there is room."""
        self._place([row for row in self.rows if row is not request])
        request.computed, request.drafts = 0, []
        self.waiting.insert(0, request)

    def swap(self, one: int, other: int) -> None:
        """As attention backends have their rows: decoding first, or last."""
        order = list(self.rows)
        order[one], order[other] = order[other], order[one]
        self._place(order)

    def _place(self, rows: list[Asked]) -> None:
        self.rows = rows
        for row, request in enumerate(rows):
            self._token_ids[row, : len(request.text)] = request.text
            self._lengths[row] = len(request.text)

    def _schedule(self) -> None:
        """Ended ones leave, waiting ones take their places, and the last rows move into places still empty."""
        places: list[Asked | None] = [None if request.done else request for request in self.rows]
        places += [None] * (self._max_rows - len(places))
        for place, request in enumerate(places):
            if request is None and self.waiting:
                places[place] = self.waiting.pop(0)
        while None in places and any(places[places.index(None) :]):
            last = max(place for place, request in enumerate(places) if request is not None)
            places[places.index(None)], places[last] = places[last], None
        self._place([request for request in places if request is not None])

    def step(self) -> None:
        """Schedule, run, verify, commit, propose."""
        self._schedule()
        sampled = [self._run(row, request) for row, request in enumerate(self.rows)]
        for row, (request, tokens) in enumerate(zip(self.rows, sampled, strict=True)):
            begin = self._lengths[row]
            self._token_ids[row, begin : begin + len(tokens)] = tokens
            self._lengths[row] += len(tokens)
            request.output += tokens
            request.drafts = []
        if self.rows and max(self._lengths[: len(self.rows)]) + self._max_drafts <= self._max_length:
            self._propose(sampled)

    def _run(self, row: int, request: Asked) -> list[int]:
        text = request.text
        if request.computed + self._chunk < len(text) - 1:
            request.computed += self._chunk
            return []
        request.computed = len(text)
        self._token_ids[row, len(text) : len(text) + len(request.drafts)] = request.drafts
        accepted: list[int] = []
        for token in [*request.drafts, None]:
            accepted.append(self._model(text + accepted))
            if token != accepted[-1]:
                break
        request.steps += 1
        request.drafted += len(request.drafts)
        request.accepted += len(accepted) - 1
        return accepted[: request.max_tokens - len(request.output)]

    def _propose(self, sampled: list[list[int]]) -> None:
        answers = []
        for proposer in self._proposers:
            answers.append(proposer.propose([*map(list, sampled)], self._lengths, self._token_ids, slot_mappings=None))
        for answer in answers:
            assert isinstance(answer, list) and len(answer) == len(sampled)
            for row, chain in enumerate(answer):
                assert isinstance(chain, list) and len(chain) <= self._max_drafts
                assert all(type(token) is int and 0 <= token < VOCABULARY for token in chain)
                assert self._lengths[row] + len(chain) <= self._max_length
                assert sampled[row] or not chain
        for request, chain in zip(self.rows, answers[0], strict=True):
            request.drafts = [] if request.done else chain
