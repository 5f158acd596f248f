"""What is measured: blocks of answers, each under one mode."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_client.results import Result

PLAIN = "plain"
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class BenchMode:
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
class RequestOutcome:
    """One request of the plan and its outcome: a result, or the reason of its refusal."""

    prompt_id: str
    turn: int
    result: Result | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Requests that ran together under one mode. `seconds` is the wall clock of the whole block."""

    mode: BenchMode
    task: str
    concurrency: int
    repeat: int
    seconds: float
    requests: tuple[RequestOutcome, ...]

    @property
    def tokens(self) -> int:
        return sum(len(request.result.token_ids) for request in self.requests if request.result)
