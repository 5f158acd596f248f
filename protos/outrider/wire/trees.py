"""Between the messages of tree.proto and plain values, and between errors and google.rpc.Status.

Every `*_from_pb` checks what came from outside, in O(fields), before anything is done with it, and raises
`InvalidField` with the field's path, such as `tree.parents[3]`. Every `*_to_pb` trusts its argument. Frames
of draft.proto are in `outrider.wire.drafts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import DOMAIN, InvalidField, OutriderError, all_errors
from outrider.limits import TENANT_NAME
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.structured_output import StructuredOutput
from outrider.tree import MAX_ROWS, DraftDistribution, TokenTree
from outrider.v1 import tree_pb2
from outrider.wire.frames import DEFAULT_TENANT, MAX_VOCABULARY
from outrider.wire.same_names import message_of, set_fields

# Trailing metadata of a Generate call whose draft refused its sequence: the reason of the draft's error.
DRAFT_REFUSED_KEY = "outrider-draft-refused"
_MODES_TO_PB = {mode: tree_pb2.VerificationMode.Value(f"VERIFICATION_MODE_{mode.name}") for mode in VerificationMode}
_MODES = {number: mode for mode, number in _MODES_TO_PB.items()}


def mode_from_pb(number: tree_pb2.VerificationMode.ValueType, field_path: str = "mode") -> VerificationMode | None:
    """The requested mode; None when the choice is left to the target."""
    if number == tree_pb2.VERIFICATION_MODE_UNSPECIFIED:
        return None
    if number not in _MODES:
        raise InvalidField(field_path, f"{number} is no known mode")
    return _MODES[number]


def mode_to_pb(mode: VerificationMode | None) -> tree_pb2.VerificationMode.ValueType:
    """The enum's number; None is UNSPECIFIED."""
    return tree_pb2.VERIFICATION_MODE_UNSPECIFIED if mode is None else _MODES_TO_PB[mode]


def typical_from_pb(pb: tree_pb2.TypicalAcceptance, field_path: str = "typical") -> TypicalAcceptance:
    """The checked rule, with defaults for what is not set."""
    rule = TypicalAcceptance(**set_fields(pb))
    rule.check(field_path)
    return rule


def typical_to_pb(rule: TypicalAcceptance | None) -> tree_pb2.TypicalAcceptance | None:
    return None if rule is None else message_of(tree_pb2.TypicalAcceptance, rule)


def tenant_from_pb(tenant: str, field_path: str = "tenant") -> str:
    """A tenant's name, `DEFAULT_TENANT` for none."""
    return name_from_pb(tenant, field_path) or DEFAULT_TENANT


def name_from_pb(text: str, field_path: str) -> str:
    """The name of a tenant or corpus, or the empty string. Names reach files and logs, hence the alphabet."""
    if text and not TENANT_NAME.fullmatch(text):
        raise InvalidField(field_path, "needs at most 64 characters of [A-Za-z0-9._-]")
    return text


def check_vocabulary_size(size: int, field_path: str) -> None:
    """Raise `InvalidField` for a vocabulary whose ids do not fit where they are kept."""
    if size > MAX_VOCABULARY:
        raise InvalidField(field_path, f"is more than {MAX_VOCABULARY}")


def check_token_ids(token_ids: Sequence[int], vocabulary_size: int, field_path: str) -> None:
    """Raise `InvalidField` for the first id outside of the vocabulary. In messages none is negative."""
    if token_ids and max(token_ids) >= vocabulary_size:
        index = next(i for i, token in enumerate(token_ids) if token >= vocabulary_size)
        raise InvalidField(f"{field_path}[{index}]", f"is not below {vocabulary_size}")


def sampling_from_pb(
    pb: tree_pb2.SamplingParameters, vocabulary_size: int, field_path: str = "sampling"
) -> SamplingParams:
    """Checked sampling parameters, with defaults for what is not set."""
    repeated = {"logit_bias": dict(pb.logit_bias), "stop": tuple(pb.stop), "stop_token_ids": tuple(pb.stop_token_ids)}
    structured = structured_output_from_pb(pb.structured_output) if pb.HasField("structured_output") else None
    params = SamplingParams(**set_fields(pb) | repeated | {"structured_output": structured})
    params.check(vocabulary_size, field_path)
    return params


def sampling_to_pb(params: SamplingParams) -> tree_pb2.SamplingParameters:
    """Every parameter, also defaults; None stays absent."""
    structured = structured_output_to_pb(params.structured_output)
    return message_of(tree_pb2.SamplingParameters, params, structured_output=structured)


def structured_output_from_pb(pb: tree_pb2.StructuredOutput) -> StructuredOutput:
    """The form of an output; `SamplingParams.check` checks it."""
    return StructuredOutput(**set_fields(pb) | {"choices": tuple(pb.choices.texts)})


def structured_output_to_pb(value: StructuredOutput | None) -> tree_pb2.StructuredOutput | None:
    if value is None:
        return None
    choices = tree_pb2.Choices(texts=value.choices) if value.choices else None
    # False would be a form of its own.
    return message_of(tree_pb2.StructuredOutput, value, choices=choices, json_object=value.json_object or None)


def distributions_from_pb(
    pbs: Iterable[tree_pb2.DraftDistribution], vocabulary_size: int, field_path: str
) -> dict[int, DraftDistribution]:
    """Checked distributions by parent; the caller checks that the parents exist."""
    distributions: dict[int, DraftDistribution] = {}
    for i, pb in enumerate(pbs):
        if pb.parent in distributions:
            raise InvalidField(f"{field_path}[{i}].parent", "has a distribution already")
        distribution = DraftDistribution(tuple(pb.token_ids), tuple(pb.weights))
        distribution.check(vocabulary_size, f"{field_path}[{i}]")
        distributions[pb.parent] = distribution
    return distributions


def distributions_to_pb(distributions: Mapping[int, DraftDistribution]) -> list[tree_pb2.DraftDistribution]:
    """The distributions by parent: a row of a tree, or a node id of a growth."""
    return [
        tree_pb2.DraftDistribution(parent=parent, token_ids=distribution.token_ids, weights=distribution.weights)
        for parent, distribution in distributions.items()
    ]


def tree_from_pb(
    pb: tree_pb2.TokenTree, vocabulary_size: int, max_rows: int = MAX_ROWS, field_path: str = "tree"
) -> TokenTree:
    """A tree that keeps every rule of `TokenTree`."""
    return TokenTree.checked(
        pb.token_ids,
        pb.parents,
        pb.scores,
        distributions_from_pb(pb.distributions, vocabulary_size, f"{field_path}.distributions"),
        vocabulary_size=vocabulary_size,
        max_rows=max_rows,
        field_path=field_path,
    )


def tree_to_pb(tree: TokenTree) -> tree_pb2.TokenTree:
    return tree_pb2.TokenTree(
        token_ids=tree.token_ids,
        parents=tree.parents,
        scores=tree.scores,
        distributions=distributions_to_pb(tree.distributions),
    )


def status_of(error: OutriderError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details: list[Message] = [info]
    if isinstance(error, InvalidField):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def error_of(status: status_pb2.Status) -> OutriderError:
    """The typed error behind a status; a plain `OutriderError` for one that is not ours."""
    info, retry, retry_after = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), None
    for detail in status.details:
        # Unpack returns False and leaves its argument unchanged when the detail is of another type.
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    kinds = {kind.reason: kind for kind in all_errors()}
    kind = kinds.get(info.reason, OutriderError) if info.domain == DOMAIN else OutriderError
    if kind is InvalidField:
        # In the metadata too.
        field = info.metadata.get("field", "")
        return InvalidField(field, status.message.removeprefix(f"{field}: "))
    error = kind(status.message)
    error.metadata, error.retry_after = dict(info.metadata), retry_after
    return error


def error_of_rpc(error: grpc.RpcError) -> OutriderError:
    """The typed error behind a failed call, from its status details. A transport failure, which has no details, becomes
    a plain `OutriderError` with the code's name in its metadata."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # A proxy changed the code or the message, so the details no longer belong to them.
        status = None
    if status is not None:
        return error_of(status)
    return OutriderError(str(error.details()), code=error.code().name)
