"""Requests to generate: what they ask for in the words of TargetService, or why that cannot be had here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import Message

from outrider.errors import InvalidField, PositionOutOfRange
from outrider.openengine import openengine_pb2 as pb
from outrider.v1 import target_pb2
from outrider.wire.same_names import set_fields

_ROUTING_KEY, _RANK_KEY, _PRIORITY_KEY = (
    f"openengine-{name}" for name in ("routing-key", "target-dp-rank", "priority")
)
# Fields of TargetService by the names that they have here, where those differ.
_FIELDS = {
    "text": "prompt",
    "tokens.token_ids": "token_ids.ids",
    "sampling.max_tokens": "stopping.max_tokens",
    "sampling.min_tokens": "stopping.min_tokens",
    "sampling.ignore_eos": "stopping.ignore_eos",
    "sampling.stop": "stopping.conditions",
    "sampling.stop_token_ids": "stopping.conditions",
    "sampling.logprobs": "response.output_candidates.top_n",
    "sampling.prompt_logprobs": "response.prompt_candidates.top_n",
    "sampling.structured_output": "guided",
    "sampling.structured_output.json_schema": "guided.json_schema",
    "sampling.structured_output.json_object": "guided.json_object",
    "sampling.structured_output.regex": "guided.regex",
    "sampling.structured_output.choices": "guided.choice.choices",
}


@dataclass(frozen=True, slots=True)
class WantedOutputs:
    """What a request asks for. `asked` is what TargetService would be asked for one output, and the rest is what it has
    no fields for."""

    asked: target_pb2.GenerateRequest
    outputs: int = 1
    # Whether a stop that the caller gave stays in the text.
    shows_stop: bool = False
    reuses_pages: bool = True
    # Place in the prompt of the first token whose log-probability is told.
    scored_from: int = 0
    # By kind of stop, the places of all in `stopping.conditions`.
    stop_places: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def renamed(self, error: InvalidField | PositionOutOfRange) -> InvalidField:
        """An error about a field of `asked`, with the name that it has in the caller's request."""
        field, _, problem = error.message.partition(": ")
        name, _, index = field.partition("[")
        place = f"[{index}" if index else ""
        kinds = ("sampling.stop", "sampling.stop_token_ids")
        if index and name in kinds:
            kind = kinds.index(name)
            place = f"[{self.stop_places[kind][int(index[:-1])]}].{('stop_text', 'stop_token_id')[kind]}"
        return InvalidField(_FIELDS.get(name, name) + place, problem)


def check_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raise `InvalidField` for wrong values of OpenEngine's keys, and for a rank that is not here. A priority is used
    by those alone who say that they have any."""
    found: dict[str, str] = {}
    for key, value in metadata:
        if key not in (_ROUTING_KEY, _RANK_KEY, _PRIORITY_KEY):
            continue
        if key in found:
            raise InvalidField(f"metadata.{key}", "is given more than once")
        found[key] = str(value)
    if not found.get(_ROUTING_KEY, "any"):
        raise InvalidField(f"metadata.{_ROUTING_KEY}", "is empty")
    rank, priority = found.get(_RANK_KEY, "0"), found.get(_PRIORITY_KEY, "0")
    if not (re.fullmatch(r"[0-9]{1,10}", rank) and int(rank) < 2**32):
        raise InvalidField(f"metadata.{_RANK_KEY}", "must be a uint32 in base 10")
    check_rank(int(rank), f"metadata.{_RANK_KEY}")
    if not (re.fullmatch(r"-?[0-9]{1,10}", priority) and -(2**31) <= int(priority) < 2**31):
        raise InvalidField(f"metadata.{_PRIORITY_KEY}", "must be an int32 in base 10")


def check_rank(rank: int, path: str) -> None:
    """Raise `InvalidField` unless it is that of a target: the tensors of a model may be split, and requests are not."""
    if rank:
        raise InvalidField(path, "is not here: a target is one data-parallel rank, 0")


def wanted_outputs(request: pb.GenerateRequest, most_outputs: int) -> WantedOutputs:
    """What a request asks for. Raises `InvalidField` for what cannot be had here; limits are for admission to check."""
    _check_served(request)
    asked = target_pb2.GenerateRequest(model=request.model)
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidField("input", "one of prompt and token_ids must be set")
    if kind == "prompt":
        asked.text = request.prompt
    else:
        asked.tokens.token_ids.extend(request.token_ids.ids)
    outputs = _read_sampling(request.sampling, most_outputs, asked)
    stop_places = _read_stopping(request.stopping, asked)
    for side, name in (("output", "logprobs"), ("prompt", "prompt_logprobs")):
        count = _alternatives(request.response, side)
        if count is not None:
            setattr(asked.sampling, name, count)
    if request.HasField("guided"):
        _read_form(request.guided, asked)
    return WantedOutputs(
        asked,
        outputs,
        request.stopping.include_stop_in_output,
        not request.kv.bypass_prefix_cache,
        request.response.prompt_logprob_start,
        stop_places,
    )


def _check_served(request: pb.GenerateRequest) -> None:
    """Raise `InvalidField` for what no target has."""
    if request.kv.HasField("session"):
        raise InvalidField("kv.session", "is not supported: a target reads and decodes by itself (AGGREGATED)")
    if request.kv.cache_salt:
        raise InvalidField("kv.cache_salt", "is not supported: tenants are what keeps prefixes apart")
    if request.media:
        raise InvalidField("media", "is not supported: the target reads text")
    if request.lora_name:
        raise InvalidField("lora_name", "is not supported: the target has no adapters")


def _read_sampling(sampling: pb.SamplingParams, most_outputs: int, asked: target_pb2.GenerateRequest) -> int:
    """Add how tokens are drawn. Returns how many outputs are asked for."""
    outputs = sampling.num_sequences if sampling.HasField("num_sequences") else 1
    if not 1 <= outputs <= most_outputs:
        raise InvalidField("sampling.num_sequences", f"must be 1..{most_outputs}")
    # SGLang and vLLM keep all tokens with -1.
    if sampling.top_k < -1:
        raise InvalidField("sampling.top_k", "must be -1 or more")
    asked.sampling.top_k = max(0, sampling.top_k)
    for name, value in set_fields(sampling).items():
        if name not in ("num_sequences", "top_k"):
            setattr(asked.sampling, name, value)
    return outputs


def _read_stopping(
    stopping: pb.StoppingOptions, asked: target_pb2.GenerateRequest
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Add when the output ends. Returns the places of stop strings, and those of stop tokens."""
    for name in ("max_tokens", "min_tokens", "ignore_eos"):
        if stopping.HasField(name):
            setattr(asked.sampling, name, getattr(stopping, name))
    texts, token_ids = list[int](), list[int]()
    for place, condition in enumerate(stopping.conditions):
        kind = condition.WhichOneof("condition")
        if kind is None:
            raise InvalidField(f"stopping.conditions[{place}]", "one of stop_text and stop_token_id must be set")
        if kind == "stop_text":
            asked.sampling.stop.append(condition.stop_text)
            texts.append(place)
        else:
            asked.sampling.stop_token_ids.append(condition.stop_token_id)
            token_ids.append(place)
    return tuple(texts), tuple(token_ids)


def _alternatives(response: Message, side: str) -> int | None:
    """How many alternatives to each token of the prompt or the output are wanted, with its own log-probability; None
    without that."""
    switch, name = f"return_{side}_logprobs", f"{side}_candidates"
    wanted = getattr(response, switch) if response.HasField(switch) else None
    if not response.HasField(name):
        return 0 if wanted else None
    if wanted is False:
        raise InvalidField(f"response.{name}", f"must not be set where {switch} is false")
    kind = getattr(response, name).WhichOneof("selection")
    if kind is None:
        raise InvalidField(f"response.{name}", "one of top_n, token_ids and all must be set")
    if kind != "top_n":
        raise InvalidField(f"response.{name}.{kind}", "is not supported; ask for top_n")
    top_n: int = getattr(response, name).top_n
    return top_n


def _read_form(guided: pb.GuidedDecoding, asked: target_pb2.GenerateRequest) -> None:
    """Add the form that the output is kept to."""
    kind, form = guided.WhichOneof("guide"), asked.sampling.structured_output
    if guided.backend not in ("", "guidance", "llguidance"):
        raise InvalidField("guided.backend", "must be empty or llguidance, the only one here")
    if kind == "json_schema":
        form.json_schema = guided.json_schema
    elif kind == "regex":
        form.regex = guided.regex
    elif kind == "json_object":
        form.json_object = True
    elif kind == "choice":
        if not guided.choice.choices:
            raise InvalidField("guided.choice.choices", "is empty")
        form.choices.texts.extend(guided.choice.choices)
    elif kind == "ebnf_grammar":
        raise InvalidField("guided.ebnf_grammar", "is not supported: grammars here are Lark's, not EBNF")
    elif kind == "structural_tag":
        raise InvalidField("guided.structural_tag", "is not supported")
    else:
        raise InvalidField("guided", "one of json_schema, regex, choice and json_object must be set")
