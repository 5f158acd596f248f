"""From OpenAI's request bodies to the contract's values. What is not taken here is disposed of by `request_fields`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from outrider.admission.prompt_limits import MAX_TEMPLATE_BYTES, MOST_CONTEXT, check_bytes, check_tokens
from outrider.errors import InvalidField, PositionOutOfRange
from outrider.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
    VerificationMode,
)
from outrider_client.generation import Speculation
from outrider_client.messages import ChatOptions
from outrider_gateway.chat_messages import chat_turns, content_text
from outrider_gateway.failures import BadField, refusal
from outrider_gateway.fields import Fields, bounded, json_bytes, number, typed, whole, whole_numbers
from outrider_gateway.generation_request import GenerationRequest, Prompt
from outrider_gateway.request_fields import CHAT_FIELDS, COMPLETION_FIELDS, RequestField
from outrider_gateway.structured import Form, structured_output
from outrider_gateway.tools import tool_options

Request = TypeVar("Request", bound=GenerationRequest)
# As OpenAI: the answers of /v1/completions are short unless asked to be long.
_COMPLETION_TOKENS = 16
MAX_UINT32 = 2**32 - 1
MAX_TOKEN_ID = 2**31 - 1
# Kinds of `thinking`; of the last the model decides.
THINKING = ("enabled", "disabled", "adaptive")


def chat_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> GenerationRequest:
    """The body of /v1/chat/completions. Raises `Refused`, also for a text that cannot have as few as `max_prompt`
    tokens."""
    fields = Fields(body)
    prompt = Prompt(messages=chat_turns(fields.pop("messages")))
    size = sum(len(turn.content.encode()) for turn in prompt.messages)
    fitting(check_bytes, size, max_prompt, "messages")
    template = chat_options(fields)
    longest = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = fields.whole("max_completion_tokens", 1, MAX_UINT32)
    # Deprecated at OpenAI, and what most clients send; the newer name wins.
    older = fields.whole("max_tokens", 1, MAX_UINT32)
    logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top and not logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true", "invalid_value")
    sampling = sampling_params(fields, older if max_tokens is None else max_tokens, (top or 0) if logprobs else None)
    request = GenerationRequest(
        True,
        (prompt,),
        sampling,
        logprobs=logprobs,
        prediction=_prediction(fields),
        chat_options=template,
        shows_reasoning=fields.flag("include_reasoning", True),
    )
    return completed(request, fields, max_choices, longest, CHAT_FIELDS, structured_output(fields))


def completion_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> GenerationRequest:
    """The body of /v1/completions. Raises `Refused`, also for a prompt that cannot have as few as `max_prompt`
    tokens."""
    fields = Fields(body)
    prompts = _prompts(fields.pop("prompt"), max_choices, max_prompt)
    max_tokens = fields.whole("max_tokens", 0, MAX_UINT32)
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    echo = fields.flag("echo")
    if max_tokens == 0 and not echo:
        raise BadField("max_tokens", "0 is for echo: nothing would be returned", "invalid_value")
    if echo and logprobs is None and not all(prompt.text for prompt in prompts):
        raise BadField("echo", "of token ids needs logprobs", "unsupported_parameter")
    best_of = fields.whole("best_of", 1, max_choices)
    # One token comes of the pass that ends a prompt, asked for or not.
    longest = _COMPLETION_TOKENS if max_tokens is None else max(1, max_tokens)
    sampling = sampling_params(fields, longest, logprobs)
    if echo and logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=logprobs)
    request = GenerationRequest(
        False, prompts, sampling, logprobs=logprobs is not None, echo=echo, prompt_only=max_tokens == 0
    )
    form = structured_output(fields)
    request = completed(request, fields, max_choices, "max_tokens", COMPLETION_FIELDS, form)
    return _best_of(request, best_of, max_choices)


def _best_of(request: GenerationRequest, made: int | None, max_choices: int) -> GenerationRequest:
    """The request with so many answers to each prompt, of which the `n` best are returned."""
    if made is None or made == request.choices:
        return request
    if made < request.choices:
        raise BadField("best_of", "must be at least n", "invalid_value")
    if request.stream:
        raise BadField("best_of", "cannot be streamed: the best is known at the end", "invalid_value")
    if made * len(request.prompts) > max_choices:
        raise BadField("best_of", f"asks for more than {max_choices} answers", "invalid_value")
    # By which they are ranked.
    sampling = replace(request.sampling, logprobs=request.sampling.logprobs or 0)
    return replace(request, choices=made, returned_choices=request.choices, sampling=sampling)


def completed(
    request: Request,
    fields: Fields,
    max_choices: int,
    longest: str,
    table: Mapping[str, RequestField],
    form: Form | None,
) -> Request:
    """The request with what all endpoints have in common; nothing of the body is left afterwards. `longest` is the
    name by which the request bounds its answers, and `form` the form of its answer."""
    choices = fields.whole("n", 1, max_choices) or 1
    if len(request.prompts) * choices > max_choices:
        raise BadField("prompt", f"asks for more than {max_choices} answers, n to each entry", "invalid_value")
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    speculation, drafts = _extension(fields)
    prompt_logprobs = fields.whole("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and (stream or request.echo):
        raise BadField("prompt_logprobs", "is for answers that are not streamed, without echo", "invalid_value")
    listed = request.logprobs or prompt_logprobs is not None
    if request.sampling.prompt_logprobs is None:
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=prompt_logprobs))
    structured, form_name = form or (None, "")
    request = replace(
        request,
        sampling=replace(request.sampling, structured_output=structured),
        form_name=form_name,
        speculation=replace(speculation, token_texts=listed or drafts),
        drafts=drafts,
        model=fields.short_text("model"),
        choices=choices,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        show_special_tokens=not fields.flag("skip_special_tokens", True),
        special_tokens=special_tokens(fields),
        cache_key=fields.short_text("prompt_cache_key"),
        user=_user(fields.pop("user")),
    )
    fields.end(table)
    # Every limit that does not depend on the model: the target checks the rest.
    try:
        request.sampling.check(MAX_TOKEN_ID + 1)
    except InvalidField as error:
        raise refusal(error, {**request.fields, "max_tokens": longest}) from None
    return request


def special_tokens(fields: Fields) -> bool | None:
    """Whether the text of a special token in a prompt is that token; None for the target's rule."""
    split = fields.pop("split_special_tokens")
    return None if split is None else not typed(split, bool, "split_special_tokens")


def _user(value: Any) -> str:
    """Whom the caller names. What is no text, as of pipelines of Open WebUI, names nobody here."""
    return value if isinstance(value, str) else ""


def chat_options(fields: Fields) -> ChatOptions:
    """How the chat template renders the messages."""
    arguments = dict(typed(fields.pop("chat_template_kwargs", {}), dict, "chat_template_kwargs"))
    # Fields of the top level that are given to the chat template under their own names.
    for name in ("reasoning_effort", "verbosity", "enable_thinking"):
        value = fields.pop(name)
        # The field that is made for it wins.
        if value is not None:
            arguments.setdefault(name, value)
    _read_thinking(fields, arguments)
    if arguments.get("reasoning_effort") == "none":
        # Templates without efforts have this switch.
        arguments.setdefault("enable_thinking", False)
    # The target counts exactly; this is before anything is made of it.
    if arguments and len(json_bytes(arguments, "chat_template_kwargs")) > 2 * MAX_TEMPLATE_BYTES:
        raise BadField("chat_template_kwargs", f"has more than {MAX_TEMPLATE_BYTES} bytes", "invalid_value")
    goes_on = fields.flag("continue_final_message")
    begins = fields.pop("add_generation_prompt")
    return ChatOptions(
        add_generation_prompt=None if begins is None else typed(begins, bool, "add_generation_prompt"),
        continue_final_message=goes_on,
        template_arguments=arguments,
        tools=tool_options(fields),
    )


def _read_thinking(fields: Fields, arguments: dict[str, Any]) -> None:
    """Add to a template's arguments what others than OpenAI call its switches: `thinking` of Anthropic's, DeepSeek's,
    GLM's and Kimi's APIs, `reasoning` of OpenRouter's and of Responses."""
    if (thinking := fields.inner("thinking")) is not None:
        kind = thinking.text("type")
        if kind not in THINKING:
            raise BadField(thinking.path("type"), f"must be one of {', '.join(THINKING)}", "invalid_value")
        # How long, and whether it is shown, is the model's to decide.
        thinking.ignore(("budget_tokens", "display", "clear_thinking"))
        thinking.end()
        if kind != "adaptive":
            arguments.setdefault("enable_thinking", kind == "enabled")
    if (reasoning := fields.inner("reasoning")) is not None:
        if (effort := reasoning.pop("effort")) is not None:
            arguments.setdefault("reasoning_effort", effort)
        if (enabled := reasoning.pop("enabled")) is not None:
            arguments.setdefault("enable_thinking", typed(enabled, bool, reasoning.path("enabled")))
        reasoning.ignore(("summary", "generate_summary", "max_tokens"))
        reasoning.end()


def _prompts(value: Any, max_choices: int, max_prompt: int) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either. Lengths are checked before elements are looked at."""
    if value is None:
        raise BadField("prompt", "is missing", "missing_required_parameter")
    # Not `isinstance`: true and false are no ids.
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return (_prompt(value, "prompt", max_prompt),)
    if not isinstance(value, list):
        raise BadField("prompt", "must be a text, token ids, or a list of either", "invalid_type")
    if not value:
        raise BadField("prompt", "is empty", "invalid_value")
    if len(value) > max_choices:
        raise BadField("prompt", f"asks for more than {max_choices} answers, one to each entry", "invalid_value")
    return tuple(_prompt(entry, f"prompt[{i}]", max_prompt) for i, entry in enumerate(value))


def _prompt(value: Any, path: str, max_prompt: int) -> Prompt:
    if not isinstance(value, str | list):
        raise BadField(path, "must be a text or a list of token ids", "invalid_type")
    if not value:
        raise BadField(path, "is empty", "invalid_value")
    if isinstance(value, str):
        fitting(check_bytes, len(value.encode()), max_prompt, path)
        return Prompt(text=value)
    fitting(check_tokens, len(value), max_prompt, path)
    return Prompt(token_ids=whole_numbers(value, path, 0, MAX_TOKEN_ID))


def fitting(check: Callable[[int, int, str], None], size: int, most_tokens: int, path: str) -> None:
    """Raise `Refused` where `check` finds a prompt of this size too long for so many tokens."""
    try:
        check(size, most_tokens, path)
    except PositionOutOfRange as error:
        raise refusal(error, {"input": path.partition("[")[0]}) from None


def sampling_params(fields: Fields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """OpenAI's sampling parameters, at its defaults, and the contract's further ones under the names vLLM gave them."""
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    stop_ids = typed(fields.pop("stop_token_ids", []), list, "stop_token_ids")
    bounded(stop_ids, MAX_STOP_TOKENS, "stop_token_ids")
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0.0, 1e6),
        # -1 is what other servers take for "off".
        top_k=max(fields.whole("top_k", -1, MAX_UINT32) or 0, 0),
        top_p=fields.positive("top_p", 1.0, 1.0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.positive("repetition_penalty", 1.0, 1e6),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.pop("logit_bias", {})),
        min_tokens=fields.whole("min_tokens", 0, MAX_UINT32) or 0,
        max_tokens=max_tokens,
        stop=_stop(fields.pop("stop", [])),
        stop_token_ids=tuple(whole(i, "stop_token_ids", 0, MAX_TOKEN_ID) for i in stop_ids),
        ignore_eos=fields.flag("ignore_eos"),
        # The contract's seeds have no sign.
        seed=None if seed is None else seed % 2**64,
        logprobs=logprobs,
    )


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        # An empty field of a form asks for none.
        return (value,) if value else ()
    if not isinstance(value, list):
        raise BadField("stop", "must be a string or a list of strings", "invalid_type")
    stops = bounded(value, MAX_STOP_STRINGS, "stop")
    return tuple(typed(stop, str, f"stop[{i}]") for i, stop in enumerate(stops))


def _logit_bias(value: Any) -> dict[int, float]:
    """A map of token ids, which JSON writes as strings."""
    bias = {}
    for token, amount in bounded(typed(value, dict, "logit_bias"), MAX_LOGIT_BIAS, "logit_bias").items():
        if not token.isdecimal() or len(token) > 10 or int(token) > MAX_TOKEN_ID:
            raise BadField("logit_bias", f"{token[:20]!r} is not a token id", "invalid_value")
        bias[int(token)] = number(amount, f"logit_bias.{token}", -100.0, 100.0)
    return bias


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether a last event has the usage, and whether every event has what it is so far."""
    inner = fields.inner("stream_options") or Fields({}, "stream_options")
    include_usage, continuous = inner.flag("include_usage"), inner.flag("continuous_usage_stats")
    if (include_usage or continuous) and not stream:
        raise BadField("stream_options", "needs stream to be true", "invalid_value")
    # Padding against traffic analysis, which this server does not add.
    inner.ignore(("include_obfuscation",))
    inner.end()
    # As vLLM: the one is a part of the other.
    return include_usage, include_usage and continuous


def _extension(fields: Fields) -> tuple[Speculation, bool]:
    """Our own object `outrider`: how drafts are used, and whether the answer shows what was drafted."""
    inner = fields.inner("outrider") or Fields({})
    mode = inner.text("mode", "auto")
    modes = {mode.value: mode for mode in VerificationMode}
    if mode != "auto" and mode not in modes:
        raise BadField(inner.path("mode"), f"must be auto, {', '.join(modes)}", "invalid_value")
    speculation = Speculation(
        # Not set where drafts are wanted: a target without a draft then simply has none.
        enabled=None if inner.flag("speculation", True) else False,
        mode=modes.get(mode),
        max_nodes=inner.whole("max_nodes", 0, MAX_UINT32),
        corpus=inner.short_text("corpus"),
        trees=inner.flag("trees"),
    )
    drafts = inner.flag("drafts")
    if speculation.trees and not drafts:
        raise BadField(inner.path("trees"), "needs drafts to be true", "invalid_value")
    inner.end()
    return speculation, drafts


def _prediction(fields: Fields) -> str | None:
    """The text that the caller expects; None when there is none."""
    inner = fields.inner("prediction")
    if inner is None:
        return None
    if inner.text("type", "content") != "content":
        raise BadField(inner.path("type"), "must be content", "invalid_value")
    expected = content_text(inner.pop("content"), inner.path("content"))
    inner.end()
    return expected
