"""Converts the engine's values to the messages of target.proto, without checks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableMapping, Sequence
from functools import lru_cache

from outrider.answer_parts import AnswerPart, ReasoningPart, ToolCallPart
from outrider.errors import OutriderError
from outrider.sampling import FinishReason, TokenLogprobs
from outrider.tree import VerifiedTree
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.weight_updates import WeightsUpdated
from outrider.wire.encoding import number_tag, sized, sized_tag, varint
from outrider.wire.same_names import message_of, shared_fields
from outrider.wire.trees import DRAFT_REFUSED_KEY, mode_to_pb, status_of
from target_service.core.sequence import PromptLogprobs, SequenceFinished, SequenceRequest, StepVerdict
from target_service.text.tokenizer import ModelTokenizer

# What begins each field of the chunks that are encoded by hand.
_CHUNK, _TIMINGS = (sized_tag(pb.GenerateResponse.DESCRIPTOR, name) for name in ("chunk", "timings"))
_TOKEN_IDS, _TEXT = (sized_tag(pb.GenerateChunk.DESCRIPTOR, name) for name in ("token_ids", "text"))
_DRAFTED_TOKENS, _STEP, _MODEL_VERSION = (
    number_tag(pb.GenerateChunk.DESCRIPTOR, name) for name in ("drafted_tokens", "step", "model_version")
)
_REASONS = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def started(sequence_id: int, request: SequenceRequest, model: str) -> pb.GenerateResponse:
    """The first event: the accepted request, with its seed and mode."""
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            sequence_id=sequence_id,
            prompt_tokens=len(request.token_ids),
            seed=request.seed,
            mode=mode_to_pb(request.mode),
            speculating=request.speculate or bool(request.prediction),
            model=model,
        )
    )


def chunk(verdict: StepVerdict) -> pb.GenerateResponse:
    """One step's tokens."""
    return pb.GenerateResponse(
        chunk=pb.GenerateChunk(
            token_ids=verdict.token_ids,
            drafted_tokens=verdict.drafted_tokens,
            logprobs=_logprobs(verdict.logprobs),
            step=verdict.step,
            drafts_by_step=verdict.drafts_by_step,
            model_version=verdict.model_version,
            tree=_tree(verdict.tree),
        ),
        timings=_timings(verdict),
    )


def encoded_chunk(verdict: StepVerdict, text: str) -> bytes | None:
    """One step's tokens with their text as the bytes of a response; None where a response has more. They are made a
    hundred thousand times a second, and as a message take four times as long."""
    if verdict.logprobs or verdict.drafts_by_step or verdict.tree is not None:
        return None
    ids = [varint(token) for token in verdict.token_ids]
    chunk = sized(_TOKEN_IDS, b"".join(ids)) if ids else b""
    if text:
        chunk += sized(_TEXT, text.encode())
    if verdict.drafted_tokens:
        chunk += _DRAFTED_TOKENS + varint(verdict.drafted_tokens)
    if verdict.step:
        chunk += _STEP + varint(verdict.step)
    if verdict.model_version:
        chunk += _MODEL_VERSION + varint(verdict.model_version)
    return sized(_CHUNK, chunk) + _encoded_timings(verdict.queue_ns, verdict.compute_ns)


@lru_cache(64)
def _encoded_timings(queue_ns: int, compute_ns: int) -> bytes:
    """The times of a step, which are those of many sequences."""
    timings = tree_pb2.Timings(queue_nanoseconds=queue_ns, compute_nanoseconds=compute_ns)
    return sized(_TIMINGS, timings.SerializeToString())


def part(value: AnswerPart) -> pb.AnswerPart:
    """A part of an answer."""
    if isinstance(value, ToolCallPart):
        return pb.AnswerPart(tool_call=message_of(pb.ToolCallPiece, value))
    if isinstance(value, ReasoningPart):
        return pb.AnswerPart(reasoning=value.text)
    return pb.AnswerPart(text=value.text)


def prompt_chunk(event: PromptLogprobs, request: SequenceRequest, names: ModelTokenizer | None) -> pb.GenerateResponse:
    """Log-probabilities of a piece of the prompt, with the texts of tokens where there are `names`."""
    piece = pb.PromptLogprobs(
        token_ids=request.token_ids[event.first : event.first + event.count],
        logprobs=array("f", event.logprobs),
        alternatives=event.alternatives,
        top_token_ids=array("i", event.top_ids),
        top_logprobs=array("f", event.top_logprobs),
    )
    response = pb.GenerateResponse(chunk=pb.GenerateChunk(prompt_logprobs=piece))
    if names is not None:
        add_token_texts(response, names)
    return response


def add_token_texts(response: pb.GenerateResponse, tokenizer: ModelTokenizer) -> None:
    """Add the text of every token of a chunk, of its log-probabilities and of its tree."""
    chunk = response.chunk
    ids = {*chunk.token_ids, *chunk.tree.tree.token_ids, *chunk.prompt_logprobs.token_ids}
    ids.update(top.token_id for entry in chunk.logprobs for top in entry.top)
    ids.update(chunk.prompt_logprobs.top_token_ids)
    _name_tokens(chunk.token_texts, ids, tokenizer)


def tokenized(token_ids: Sequence[int], names: ModelTokenizer | None) -> pb.TokenizeResponse:
    """The tokens of a text, with their own texts where there are `names`."""
    response = pb.TokenizeResponse(token_ids=token_ids)
    if names is not None:
        _name_tokens(response.token_texts, set(token_ids), names)
    return response


def _name_tokens(texts: MutableMapping[int, pb.TokenText], ids: Iterable[int], tokenizer: ModelTokenizer) -> None:
    for token_id in ids:
        text = texts[token_id]
        text.text, text.special = tokenizer.name(token_id), token_id in tokenizer.special_ids


def finished(event: SequenceFinished, request: SequenceRequest) -> pb.GenerateResponse:
    """The last event: the finish reason, usage and times."""
    finish, totals = event.finish, event.totals
    reply = pb.GenerateFinished(
        finish_reason=_REASONS[finish.reason],
        usage=pb.Usage(
            **shared_fields(pb.Usage, totals),
            accepted_prediction_tokens=totals.accepted_predicted_tokens,
            rejected_prediction_tokens=totals.predicted_tokens - totals.accepted_predicted_tokens,
            lossy=request.lossy,
        ),
        speculation=pb.SpeculationTotals(
            **shared_fields(pb.SpeculationTotals, totals), draft_wait_nanoseconds=totals.draft_wait_ns
        ),
        times=pb.RequestTimes(
            queue_nanoseconds=totals.started_ns - totals.arrived_ns,
            prefill_nanoseconds=totals.first_token_ns - totals.started_ns,
            decode_nanoseconds=totals.finished_ns - totals.first_token_ns,
        ),
    )
    if finish.stop_token_id is not None:
        reply.stop_token_id = finish.stop_token_id
    if finish.stop_string is not None:
        reply.stop_string = finish.stop_string
    return pb.GenerateResponse(finished=reply)


def trailers(draft_refused: str) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a Generate call: why its draft stopped drafting for it, if it did."""
    return ((DRAFT_REFUSED_KEY, draft_refused),) if draft_refused else ()


def opened(client_tag: int, sequence_id: int, request: SequenceRequest, max_rows: int) -> pb.VerifyResponse:
    """The answer to an open. The first tree has step 0."""
    return pb.VerifyResponse(
        opened=pb.VerificationOpened(
            client_tag=client_tag,
            sequence_id=sequence_id,
            step=0,
            seed=request.seed,
            mode=mode_to_pb(request.mode),
            max_rows=max_rows,
        )
    )


def verdict(event: StepVerdict) -> pb.VerifyResponse:
    """The answer to a tree."""
    return pb.VerifyResponse(
        verdict=pb.Verdict(
            sequence_id=event.sequence_id,
            step=event.step,
            accepted_rows=event.accepted_rows,
            token_ids=event.token_ids,
            next_step=event.step + 1,
            finish_reason=pb.FINISH_REASON_UNSPECIFIED if event.finish is None else _REASONS[event.finish.reason],
            logprobs=_logprobs(event.logprobs),
            model_version=event.model_version,
        ),
        timings=_timings(event),
    )


def failed(error: OutriderError, *, sequence_id: int = 0, client_tag: int = 0, step: int = 0) -> pb.VerifyResponse:
    """The answer to a frame that failed; `client_tag` names an open, `sequence_id` any other."""
    return pb.VerifyResponse(
        status=pb.VerificationStatus(sequence_id=sequence_id, client_tag=client_tag, step=step, status=status_of(error))
    )


def updated(result: WeightsUpdated) -> pb.UpdateWeightsResponse:
    """The result of an update of the weights."""
    return pb.UpdateWeightsResponse(
        **shared_fields(pb.UpdateWeightsResponse, result),
        prepare_nanoseconds=round(result.prepare * 1e9),
        pause_nanoseconds=round(result.pause * 1e9),
        aborted_sequences=result.aborted,
        continued_sequences=result.continued,
    )


def _tree(shown: VerifiedTree | None) -> pb.VerifiedTree | None:
    if shown is None:
        return None
    tree = tree_pb2.TokenTree(token_ids=shown.token_ids, parents=shown.parents)
    return pb.VerifiedTree(tree=tree, accepted_rows=shown.accepted_rows)


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=entry.logprob, top=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
        )
        for entry in logprobs
    ]


def _timings(event: StepVerdict) -> tree_pb2.Timings:
    return tree_pb2.Timings(queue_nanoseconds=event.queue_ns, compute_nanoseconds=event.compute_ns)
