"""Runs conversations with an engine, many at once, and counts tokens and verified steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared.engine_events import EngineEvents
from benchmarks.shared.workload import LONGEST_PROMPT, Prompt, PromptTurns, chat_tokens
from draft_service.drafters.base import Drafter
from draft_service.in_process import InprocessLink
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, SequenceTotals, StepVerdict
from target_service.engine.engine import Engine
from target_service.model.runner import ModelRunner

# Seeds of sampled requests, the same for every drafter.
_FIRST_SEED = 1000


@dataclass(frozen=True, slots=True)
class Distribution:
    """How tokens are sampled and verified."""

    temperature: float
    mode: VerificationMode
    # Of TYPICAL.
    typical: TypicalAcceptance = field(default_factory=TypicalAcceptance)

    @property
    def name(self) -> str:
        return f"T={self.temperature:g} {self.mode.value}"


@dataclass
class AcceptanceTally:
    """Sums over answers, without the step that ends a prompt and its token, which have no drafts."""

    answers: int = 0
    steps: int = 0
    tokens: int = 0
    drafted_rows: int = 0
    # [d]: steps that accepted a node at depth d + 1.
    reached: list[int] = field(default_factory=list)
    preemptions: int = 0
    lossy_tokens: int = 0
    # From each answer's first token to its last.
    decode_ns: int = 0

    @classmethod
    def of(cls, totals: SequenceTotals) -> AcceptanceTally:
        """Of one answer."""
        return cls(
            answers=1,
            steps=totals.steps - 1,
            tokens=totals.completion_tokens - 1,
            drafted_rows=totals.drafted_tokens,
            reached=list(totals.accepted_by_depth),
            preemptions=totals.preemptions,
            lossy_tokens=totals.lossy_tokens,
            decode_ns=totals.finished_ns - totals.first_token_ns,
        )

    def add(self, other: AcceptanceTally) -> None:
        reached = [a + b for a, b in itertools.zip_longest(self.reached, other.reached, fillvalue=0)]
        for name, value in vars(other).items():
            setattr(self, name, reached if name == "reached" else getattr(self, name) + value)

    def figures(self) -> dict[str, Any]:
        """Tokens per verified step, and the share of steps that reached each depth."""
        steps = max(1, self.steps)
        return {
            "answers": self.answers,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_step": round(self.tokens / steps, 3),
            "drafted_rows_per_step": round(self.drafted_rows / steps, 1),
            "reached_by_depth": [round(count / steps, 4) for count in self.reached],
            "preemptions": self.preemptions,
        }


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request of a conversation: the conversation's index, the turn's number, and all messages so far."""

    index: int
    number: int
    messages: tuple[dict[str, str], ...]


class Talk:
    """One drafter's run over all conversations, in one distribution."""

    def __init__(
        self, runner: ModelRunner, config: TargetConfig, drafter: Drafter, conversations: Sequence[PromptTurns]
    ) -> None:
        self._tokenizer: Any = runner.tokenizer
        self._conversations = conversations
        self._events = EngineEvents(self._collect)
        self._outputs: dict[int, list[int]] = {}
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count(1)
        self._drafter = drafter
        # Without a step cost every drafted row is verified, and every step waits for its drafts.
        self._engine = Engine(runner, config)
        self._link = InprocessLink(drafter, self._engine.drafting)
        self._engine.drafting.attach(self._link)
        self.tallies = {one.task: AcceptanceTally() for one in conversations}
        self.drafter_stats: dict[str, float] = {}
        # Tokens by (conversation, turn), to compare with another run's.
        self.outputs: dict[tuple[int, int], list[int]] = {}

    @property
    def total(self) -> AcceptanceTally:
        """The tallies of all tasks together."""
        total = AcceptanceTally()
        for tally in self.tallies.values():
            total.add(tally)
        return total

    def run(self, distribution: Distribution, max_tokens: int, concurrency: int) -> None:
        """Run every conversation to its end."""
        waiting = deque(
            _Turn(index, 0, ({"role": "user", "content": one.turns[0]},))
            for index, one in enumerate(self._conversations)
        )
        self._engine.start(self._events.deliver)
        try:
            while waiting or self._turns:
                while waiting and len(self._turns) < concurrency:
                    self._submit(waiting.popleft(), distribution, max_tokens)
                if self._turns:
                    waiting.extendleft(self._next_turns())
            # They show trees that are missing for lack of features or cache, which would count as bad ones.
            self.drafter_stats = dict(self._drafter.stats())
        finally:
            self._engine.stop()
            self._link.stop()

    def _collect(self, verdict: StepVerdict) -> None:
        self._outputs[verdict.sequence_id].extend(verdict.token_ids)

    def _submit(self, turn: _Turn, distribution: Distribution, max_tokens: int) -> None:
        ids: Prompt = chat_tokens(self._tokenizer, turn.messages)
        if len(ids) >= LONGEST_PROMPT:
            return
        number = next(self._numbers)
        self._turns[number], self._outputs[number] = turn, []
        sampling = SamplingParams(temperature=distribution.temperature, max_tokens=max_tokens)
        seed = _FIRST_SEED + 2 * turn.index + turn.number
        request = SequenceRequest(ids, sampling, distribution.mode, seed, max_tokens, distribution.typical)
        self._engine.submit(request, number)

    def _next_turns(self) -> Iterable[_Turn]:
        """Wait for an answer and count it. Yields the next turn of its conversation, if any."""
        finished = self._events.wait()
        turn, output = self._turns.pop(finished.sequence_id), self._outputs.pop(finished.sequence_id)
        conversation = self._conversations[turn.index]
        self.tallies[conversation.task].add(AcceptanceTally.of(finished.totals))
        self.outputs[turn.index, turn.number] = output
        following = turn.number + 1
        if following < len(conversation.turns):
            answer = {"role": "assistant", "content": self._tokenizer.decode(output)}
            question = {"role": "user", "content": conversation.turns[following]}
            yield _Turn(turn.index, following, (*turn.messages, answer, question))
