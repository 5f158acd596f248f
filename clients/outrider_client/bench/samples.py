"""What is measured: one answer, and one block of answers under a mode."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_client.results import Result

PLAIN = "plain"
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Mode:
    """How answers are generated: plainly, by transformers' loop, or with a drafter inside or outside the target."""

    name: str
    placement: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.placement})" if self.placement else self.name

    @property
    def drafts(self) -> bool:
        return self.name not in (PLAIN, TRANSFORMERS)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. Times are seconds on the client's clock; `tpot` is None for answers of one token."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    steps: int
    ttft: float
    tpot: float | None
    duration: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    draft_wait: float = 0.0
    fallback_steps: int = 0

    @classmethod
    def of(cls, result: Result) -> Sample:
        totals = result.speculation
        return cls(
            token_ids=result.token_ids,
            text=result.text,
            prompt_tokens=result.prompt_tokens,
            steps=totals.steps,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            drafted_by_depth=totals.drafted_by_depth,
            accepted_by_depth=totals.accepted_by_depth,
            draft_wait=totals.draft_wait_ns / 1e9,
            fallback_steps=totals.fallback_steps,
            ttft=result.time_to_first_token,
            tpot=result.time_per_output_token,
            duration=result.duration,
        )


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request of the plan and its outcome: a sample, or the reason of its refusal."""

    prompt_id: str
    task: str
    turn: int
    sample: Sample | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Requests that ran together under one mode. `seconds` is the wall clock of the whole block."""

    mode: Mode
    task: str
    concurrency: int
    repeat: int
    seconds: float
    requests: tuple[RequestOutcome, ...]

    @property
    def tokens(self) -> int:
        return sum(len(request.sample.token_ids) for request in self.requests if request.sample)
