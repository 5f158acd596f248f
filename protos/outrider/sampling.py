"""How tokens are drawn and what is reported of them: frozen values, used by clients, target and draft alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput

# Chosen, but for the log-probabilities, of which OpenAI gives as many.
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1


class VerificationMode(Enum):
    """How the target decides which drafted tokens it accepts."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    # Not lossless: see `TypicalAcceptance`.
    TYPICAL = "typical"


# The modes that drafts are made for; TYPICAL uses drafts for GREEDY.
LOSSLESS_MODES = (VerificationMode.GREEDY, VerificationMode.COUPLED, VerificationMode.REJECTION)


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """When a drafted token is probable enough to be kept: p > min(epsilon, delta * exp(-H)), H being the entropy in
    nats of the distribution that the token would be drawn from. Limits: `TypicalAcceptance` in tree.proto.

    The most probable token always passes: with delta < 1, p_max >= exp(-H) > delta * exp(-H).

    Source: Medusa (arXiv 2401.10774), section 2.3.2; the defaults are those of its code, delta = sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def threshold(self, entropy: float) -> float:
        """The probability that a token must exceed, given the distribution's entropy in nats."""
        return min(self.epsilon, self.delta * math.exp(-entropy))

    def check(self, field_path: str = "typical") -> None:
        """Raise `InvalidField` unless both are in (0, 1). NaN fails."""
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value < 1:
                raise InvalidField(f"{field_path}.{name}", "must be in (0, 1)")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Limits and meaning: `SamplingParameters` in tree.proto. `max_tokens` of None means
    the rest of the model's context, at most 1024; None of `logprobs`, `prompt_logprobs` and `structured_output` means
    none."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def shapes_logits(self) -> bool:
        """Whether logits must be changed before the argmax of greedy decoding."""
        structured = self.structured_output is not None
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0 or structured

    def mode(self, asked: VerificationMode | None = None) -> VerificationMode:
        """The mode to use: `asked`, or the temperature's default. Raises `InvalidField` if they do not fit."""
        if asked is None:
            return VerificationMode.GREEDY if self.greedy else VerificationMode.COUPLED
        if asked is not VerificationMode.TYPICAL and (asked is VerificationMode.GREEDY) != self.greedy:
            raise InvalidField("speculation.mode", f"{asked.value} does not fit the temperature")
        return asked

    def check(self, vocabulary_size: int, field_path: str = "sampling") -> None:
        """Raise `InvalidField` for the first parameter outside its limits. NaN fails every range."""

        def need(ok: bool, name: str, limit: str) -> None:
            if not ok:
                raise InvalidField(f"{field_path}.{name}", limit)

        need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "must be finite and >= 0")
        need(self.top_k >= 0, "top_k", "must be >= 0")
        need(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")
        need(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]")
        penalty = self.repetition_penalty
        need(math.isfinite(penalty) and penalty > 0, "repetition_penalty", "must be finite and > 0")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "must be in [-2, 2]")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "must be in [-2, 2]")
        need(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias.items():
            need(0 <= token < vocabulary_size, f"logit_bias[{token}]", f"is not below {vocabulary_size}")
            need(-100 <= bias <= 100, f"logit_bias[{token}]", "must be in [-100, 100]")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        need(self.min_tokens >= 0, "min_tokens", "must be >= 0")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens")
        need(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"has more than {MAX_STOP_STRINGS} entries")
        for i, text in enumerate(self.stop):
            need(0 < len(text.encode()) <= MAX_STOP_BYTES, f"stop[{i}]", f"must have 1 to {MAX_STOP_BYTES} bytes")
        need(len(self.stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"has more than {MAX_STOP_TOKENS} entries")
        for i, token in enumerate(self.stop_token_ids):
            need(0 <= token < vocabulary_size, f"stop_token_ids[{i}]", f"is not below {vocabulary_size}")
        need(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "must fit 64 bits")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            need(count is None or 0 <= count <= MAX_LOGPROBS, name, f"must be 0..{MAX_LOGPROBS}")
        if self.structured_output is not None:
            self.structured_output.check(f"{field_path}.structured_output")
            need(not self.ignore_eos, "ignore_eos", "is not for structured_output, which ends where its form does")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, before penalties and filters, and its alternatives as (token id, log-probability),
    best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(Enum):
    """Why a sequence ended; the values are those of metrics and spans."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
