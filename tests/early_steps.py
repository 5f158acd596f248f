"""Steps on the host that are launched before the results of those before, as on a device: to test that order."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from target_service.execution.batch import StepBatch
from target_service.execution.host_executor import HostSteps, Launched, Ready, StepOnHost
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.verification import TOKEN_BITS


class EarlySteps(HostSteps):
    """`HostSteps`, which let the engine prepare each step before the one under way has ended, and have several passes.
    Pending tokens are those of the step before; their rows move on by the drafted rows that it accepts."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._last: _EarlyStep | None = None

    def launch(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        ready()
        if self._last is not None and min(batch.input.token_ids) < 0:
            counts = self._last.accepted_counts()
            batch = replace(batch.items_shifted(counts), input=batch.input.shifted_by_accepted(counts))
        logits = self._runner.forward(replace(batch.input, token_ids=self._fill_pending(batch.input.token_ids)))
        self._last = _EarlyStep(self._runner, batch, verifiers, logits, passes=passes)
        return self._last

    def _fill_pending(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens, with those that are pending from the last step filled in."""
        if min(token_ids) >= 0:
            return token_ids
        assert self._last is not None, "a token is pending from no step"
        sampled = [_last_token(outcome) if outcome else -1 for outcome in self._last.outcomes()]
        return tuple(token if token >= 0 else sampled[-1 - token] for token in token_ids)


def host_steps(runner: ModelRunner, *, early: bool) -> HostSteps:
    """`EarlySteps`, or the plain ones."""
    return EarlySteps(runner) if early else HostSteps(runner)


@dataclass(eq=False)
class _EarlyStep(StepOnHost):
    can_launch_before_results: bool = True
    passes: int = 1

    def outcomes(self) -> list[Verified | None]:
        verified = self._outcomes is not None
        outcomes = super().outcomes()
        for number in range(1, 1 if verified else self.passes):
            outcomes = self._outcomes = self._run_later_pass(outcomes, number)
        return outcomes

    def accepted_counts(self) -> list[int]:
        """Drafted rows accepted, by place in the batch."""
        return [0 if outcome is None else len(outcome.walk.accepted_rows) for outcome in self.outcomes()]

    def _run_later_pass(self, outcomes: SequenceOf[Verified | None], number: int) -> list[Verified | None]:
        """Outcomes with the token of one more pass for each sequence."""
        sampled = [-1 if one is None else _last_token(one) for one in outcomes]
        logits = self._runner.forward(replace(self._batch.input.advanced_by(number), token_ids=tuple(sampled)))
        later: list[Verified | None] = []
        for item, verifier, outcome in zip(self._batch.items, self._verifiers, outcomes, strict=True):
            assert item.tree is not None and outcome is not None, "every sequence of several passes decodes"
            made = [token & TOKEN_BITS for token in (outcome.walk.next_token, *outcome.following)]
            output = [*item.sequence.output, *made]
            rows = logits[item.first_logit : item.first_logit + 1]
            verified = verifier.verify(item.tree, rows, output, item.sequence.step + number)
            later.append(outcome._replace(following=(*outcome.following, verified.walk.next_token)))
        return later


def _last_token(outcome: Verified) -> int:
    """The last token as the next pass reads it."""
    return (outcome.following[-1] if outcome.following else outcome.walk.next_token) & TOKEN_BITS
