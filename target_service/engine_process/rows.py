"""The engine's values as plain rows and back: what `wire` sends between the target's two processes.

Values that go in come out equal. Rows hold nothing but what JSON knows, and are trusted: both ends are this program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from outrider.errors import InvalidField, OutriderError, all_errors
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import DraftDistribution, TokenTree
from outrider.wire.frames import DraftInfo, FeatureRequest, TreeLimits
from target_service.api.admission import ServedModel
from target_service.core.events import EngineSnapshot
from target_service.core.fairness import Share
from target_service.core.sequence import (
    Finish,
    FinishReason,
    SequenceRequest,
    SequenceTotals,
    StepStats,
    TokenLogprobs,
    Verdict,
)

Row = list[Any]
Fields = dict[str, Any]


def _reader(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """All fields of a dataclass, in order, at the price of one call."""
    read: Callable[[Any], tuple[Any, ...]] = attrgetter(*(field.name for field in dataclasses.fields(kind)))
    return read


def _fields(value: Any, *without: str) -> Fields:
    names = (field.name for field in dataclasses.fields(value) if field.name not in without)
    return {name: getattr(value, name) for name in names}


# Flat dataclasses, whose rows are their fields.
stats_to_row = _reader(StepStats)
totals_to_row = _reader(SequenceTotals)
snapshot_to_row = _reader(EngineSnapshot)


def stats_from_row(row: Row) -> StepStats:
    """See `stats_to_row`."""
    return StepStats(*row)


def totals_from_row(row: Row) -> SequenceTotals:
    """See `totals_to_row`."""
    return SequenceTotals(*row)


def snapshot_from_row(row: Row) -> EngineSnapshot:
    """See `snapshot_to_row`."""
    return EngineSnapshot(*row)


def verdict_to_row(verdict: Verdict) -> tuple[Any, ...]:
    """Called for every sequence in every step: most have neither log-probabilities nor an end."""
    if verdict.finish is None and not verdict.logprobs:
        return verdict
    logprobs = [(entry.logprob, entry.top) for entry in verdict.logprobs]
    finish = None if verdict.finish is None else finish_to_row(verdict.finish)
    return (*verdict[:5], logprobs, finish, *verdict[7:])


def verdict_from_row(row: Row) -> Verdict:
    """See `verdict_to_row`."""
    sequence_id, step, accepted_rows, token_ids, drafted_tokens, logprobs, finish, queue_ns, compute_ns, by_step = row
    return Verdict(
        sequence_id,
        step,
        tuple(accepted_rows),
        tuple(token_ids),
        drafted_tokens,
        tuple([TokenLogprobs(logprob, tuple(map(tuple, top))) for logprob, top in logprobs]) if logprobs else (),
        None if finish is None else finish_from_row(finish),
        queue_ns,
        compute_ns,
        tuple(by_step),
    )


def finish_to_row(finish: Finish) -> Row:
    """Why a sequence ended."""
    return [finish.reason.value, finish.stop_token_id, finish.stop_string]


def finish_from_row(row: Row) -> Finish:
    """See `finish_to_row`."""
    reason, stop_token_id, stop_string = row
    return Finish(FinishReason(reason), stop_token_id, stop_string)


def error_to_row(error: OutriderError) -> Row:
    """An error by its reason, with its facts."""
    return [error.reason, error.message, dict(error.metadata)]


def error_from_row(row: Row) -> OutriderError:
    """See `error_to_row`."""
    reason, message, metadata = row
    kind = next((kind for kind in all_errors() if kind.reason == reason), OutriderError)
    if kind is InvalidField:
        field = metadata["field"]
        return InvalidField(field, message.removeprefix(f"{field}: "))
    return kind(message, **metadata)


def tree_to_row(tree: TokenTree) -> Row:
    """A client's tree, with the distributions it was drawn from."""
    distributions = [
        (row, distribution.token_ids, distribution.weights) for row, distribution in tree.distributions.items()
    ]
    return [tree.token_ids, tree.parents, tree.scores, distributions]


def tree_from_row(row: Row) -> TokenTree:
    """See `tree_to_row`."""
    token_ids, parents, scores, distributions = row
    by_parent = {parent: DraftDistribution(tuple(ids), tuple(weights)) for parent, ids, weights in distributions}
    return TokenTree(tuple(token_ids), tuple(parents), tuple(scores), by_parent)


def request_to_fields(request: SequenceRequest) -> Fields:
    """A request, its sampling parameters as fields of their own."""
    sampling = _fields(request.sampling) | {"logit_bias": list(request.sampling.logit_bias.items())}
    return _fields(request) | {"mode": request.mode.value, "sampling": sampling, "share": _fields(request.share)}


def request_from_fields(fields: Fields) -> SequenceRequest:
    """See `request_to_fields`."""
    sampling = fields["sampling"]
    tuples = {name: tuple(sampling[name]) for name in ("stop", "stop_token_ids")}
    return SequenceRequest(
        **fields
        | {
            "token_ids": tuple(fields["token_ids"]),
            "mode": VerificationMode(fields["mode"]),
            "share": Share(**fields["share"]),
            "sampling": SamplingParams(**sampling | tuples | {"logit_bias": dict(sampling["logit_bias"])}),
        }
    )


def served_to_fields(served: ServedModel) -> Fields:
    """The served model without its tokenizer, which either process loads for itself."""
    return _fields(served, "tokenizer")


def served_from_fields(fields: Fields) -> ServedModel:
    """See `served_to_fields`."""
    return ServedModel(**fields | {"end_token_ids": tuple(fields["end_token_ids"])})


def draft_to_fields(info: DraftInfo) -> Fields:
    """What a draft service says of itself."""
    features = None if info.features is None else _fields(info.features)
    return _fields(info) | {"limits": _fields(info.limits), "features": features}


def draft_from_fields(fields: Fields) -> DraftInfo:
    """See `draft_to_fields`."""
    wanted = fields["features"]
    features = None if wanted is None else FeatureRequest(**wanted | {"layers": tuple(wanted["layers"])})
    return DraftInfo(**fields | {"limits": TreeLimits(**fields["limits"]), "features": features})
