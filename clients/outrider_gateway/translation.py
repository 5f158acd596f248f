"""From OpenAI's request bodies to the contract's values. What is not taken here is disposed of by `request_fields`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

from outrider.admission.prompt_limits import MAX_TEMPLATE_BYTES, MOST_CONTEXT, check_bytes, check_tokens
from outrider.errors import InvalidField, PositionOutOfRange
from outrider.sampling import SamplingParams, VerificationMode
from outrider_client.generation import Speculation
from outrider_client.messages import ChatOptions
from outrider_gateway.bodies import (
    MAX_TOKEN_ID,
    ChatFields,
    CompletionFields,
    Count,
    GenerationFields,
    Name,
    TemplateFields,
    TokenId,
)
from outrider_gateway.chat_messages import chat_turns, content_text
from outrider_gateway.failures import BadField, refusal
from outrider_gateway.fields import BodyObject, Fields, converted, json_bytes, read_object
from outrider_gateway.generation_request import COMPLETION_NAMES, GenerationRequest, Prompt
from outrider_gateway.request_fields import CHAT_FIELDS, COMPLETION_FIELDS, RequestField
from outrider_gateway.structured import Form, structured_output
from outrider_gateway.tools import tool_options

Request = TypeVar("Request", bound=GenerationRequest)


class StreamOptions(BodyObject):
    """`stream_options`. Padding against traffic analysis is not added here."""

    ignored: ClassVar[tuple[str, ...]] = ("include_obfuscation",)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class DraftingOptions(BodyObject):
    """Our own object `outrider`: how drafts are used, and whether the answer shows what was drafted."""

    mode: Literal["auto", "greedy", "coupled", "rejection", "typical"] = "auto"
    speculation: bool = True
    max_nodes: Count | None = None
    corpus: Name = ""
    trees: bool = False
    drafts: bool = False


class Prediction(BodyObject):
    """The text that the caller expects."""

    type: Literal["content"] = "content"
    content: Any = None


class ThinkingSwitch(BodyObject):
    """`thinking` of Anthropic's, DeepSeek's, GLM's and Kimi's APIs. Of the last type the model decides; how long it
    thinks, and whether that is shown, too."""

    ignored: ClassVar[tuple[str, ...]] = ("budget_tokens", "display", "clear_thinking")
    type: Literal["enabled", "disabled", "adaptive"]


class ReasoningSwitches(BodyObject):
    """`reasoning` of OpenRouter's API and of Responses."""

    ignored: ClassVar[tuple[str, ...]] = ("summary", "generate_summary", "max_tokens")
    effort: Any = None
    enabled: bool | None = None


def chat_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> GenerationRequest:
    """The body of /v1/chat/completions. Raises `Refused`, also for a text that cannot have as few as `max_prompt`
    tokens."""
    fields = Fields(body)
    chat = fields.read(ChatFields)
    prompt = Prompt(messages=chat_turns(chat.messages))
    size = sum(len(turn.content.encode()) for turn in prompt.messages)
    fitting(check_bytes, size, max_prompt, "messages")
    template, given = chat_options(fields.read(TemplateFields)), fields.read(GenerationFields)
    # The older name is deprecated at OpenAI, and what most clients send; the newer one wins.
    older, newer = given.max_tokens, chat.max_completion_tokens
    longest = "max_tokens" if newer is None else "max_completion_tokens"
    if chat.top_logprobs and not chat.logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true", "invalid_value")
    max_tokens = older if newer is None else newer
    request = GenerationRequest(
        True,
        (prompt,),
        sampling_params(given, max_tokens, chat.top_logprobs if chat.logprobs else None),
        logprobs=chat.logprobs,
        prediction=_prediction(chat.prediction),
        chat_options=template,
        shows_reasoning=chat.include_reasoning,
    )
    return completed(request, given, fields, max_choices, longest, CHAT_FIELDS, structured_output(given))


def completion_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> GenerationRequest:
    """The body of /v1/completions. Raises `Refused`, also for a prompt that cannot have as few as `max_prompt`
    tokens."""
    fields = Fields(body)
    asked, given = fields.read(CompletionFields), fields.read(GenerationFields)
    prompts = _prompts(asked.prompt, max_choices, max_prompt)
    max_tokens, logprobs, echo = given.max_tokens, asked.logprobs, asked.echo
    if max_tokens == 0 and not echo:
        raise BadField("max_tokens", "0 is for echo: nothing would be returned", "invalid_value")
    if echo and logprobs is None and not all(prompt.text for prompt in prompts):
        raise BadField("echo", "of token ids needs logprobs", "unsupported_parameter")
    # As OpenAI: answers are short unless asked to be long. One token comes of the pass that ends a prompt, asked for or
    # not.
    sampling = sampling_params(given, 16 if max_tokens is None else max(1, max_tokens), logprobs)
    if echo and logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=logprobs)
    request = GenerationRequest(
        False,
        prompts,
        sampling,
        logprobs=logprobs is not None,
        echo=echo,
        prompt_only=max_tokens == 0,
        fields=COMPLETION_NAMES,
    )
    form = structured_output(given)
    request = completed(request, given, fields, max_choices, "max_tokens", COMPLETION_FIELDS, form)
    return _best_of(request, asked.best_of, max_choices)


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
    given: GenerationFields,
    fields: Fields,
    max_choices: int,
    longest: str,
    table: Mapping[str, RequestField],
    form: Form | None,
) -> Request:
    """The request with what all endpoints have in common; nothing of the body is left in `fields` afterwards. `longest`
    is the name by which the request bounds its answers, and `form` the form of its answer."""
    if given.n > max_choices:
        raise BadField("n", f"must be in 1..{max_choices}", "invalid_value")
    if len(request.prompts) * given.n > max_choices:
        raise BadField("prompt", f"asks for more than {max_choices} answers, n to each entry", "invalid_value")
    usage = read_object(StreamOptions, given.stream_options, "stream_options")
    if (usage.include_usage or usage.continuous_usage_stats) and not given.stream:
        raise BadField("stream_options", "needs stream to be true", "invalid_value")
    drafting = read_object(DraftingOptions, given.outrider, "outrider")
    if drafting.trees and not drafting.drafts:
        raise BadField("outrider.trees", "needs drafts to be true", "invalid_value")
    if given.prompt_logprobs is not None and (given.stream or request.echo):
        raise BadField("prompt_logprobs", "is for answers that are not streamed, without echo", "invalid_value")
    if request.sampling.prompt_logprobs is None and given.prompt_logprobs is not None:
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=given.prompt_logprobs))
    if form is not None:
        structured, name = form
        names = {f"structured_output.{structured.form}": name, "structured_output": name}
        sampling = replace(request.sampling, structured_output=structured)
        request = replace(request, sampling=sampling, fields={**request.fields, **names})
    request = replace(
        request,
        speculation=Speculation(
            # Not set where drafts are wanted: a target without a draft then simply has none.
            enabled=None if drafting.speculation else False,
            mode=None if drafting.mode == "auto" else VerificationMode(drafting.mode),
            max_nodes=drafting.max_nodes,
            corpus=drafting.corpus,
            trees=drafting.trees,
            token_texts=request.logprobs or given.prompt_logprobs is not None or drafting.drafts,
        ),
        drafts=drafting.drafts,
        model=given.model,
        choices=given.n,
        stream=given.stream,
        include_usage=usage.include_usage,
        # As vLLM: the one is a part of the other.
        continuous_usage=usage.include_usage and usage.continuous_usage_stats,
        show_special_tokens=not given.skip_special_tokens,
        special_tokens=unsplit(given.split_special_tokens),
        cache_key=given.prompt_cache_key,
        user=given.user if isinstance(given.user, str) else "",
    )
    fields.end(table)
    # Every limit that does not depend on the model: the target checks the rest.
    try:
        request.sampling.check(MAX_TOKEN_ID + 1)
    except InvalidField as error:
        raise refusal(error, {**request.fields, "max_tokens": longest}) from None
    return request


def chat_options(given: TemplateFields) -> ChatOptions:
    """How the chat template renders the messages."""
    arguments = dict(given.chat_template_kwargs)
    # Fields of the top level that are given to the chat template under their own names.
    for name in ("reasoning_effort", "verbosity", "enable_thinking"):
        # The field that is made for it wins.
        if (value := getattr(given, name)) is not None:
            arguments.setdefault(name, value)
    if given.thinking is not None:
        kind = read_object(ThinkingSwitch, given.thinking, "thinking").type
        if kind != "adaptive":
            arguments.setdefault("enable_thinking", kind == "enabled")
    if given.reasoning is not None:
        switches = read_object(ReasoningSwitches, given.reasoning, "reasoning")
        for name, value in (("reasoning_effort", switches.effort), ("enable_thinking", switches.enabled)):
            if value is not None:
                arguments.setdefault(name, value)
    if arguments.get("reasoning_effort") == "none":
        # Templates without efforts have this switch.
        arguments.setdefault("enable_thinking", False)
    # The target counts exactly; this is before anything is made of it.
    if arguments and len(json_bytes(arguments, "chat_template_kwargs")) > 2 * MAX_TEMPLATE_BYTES:
        raise BadField("chat_template_kwargs", f"has more than {MAX_TEMPLATE_BYTES} bytes", "invalid_value")
    return ChatOptions(
        add_generation_prompt=given.add_generation_prompt,
        continue_final_message=given.continue_final_message,
        template_arguments=arguments,
        tools=tool_options(given),
    )


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
    return Prompt(token_ids=converted(value, tuple[TokenId, ...], path))


def unsplit(split: bool | None) -> bool | None:
    """Whether the text of a special token in a prompt is that token; None for the target's rule."""
    return None if split is None else not split


def fitting(check: Callable[[int, int, str], None], size: int, most_tokens: int, path: str) -> None:
    """Raise `Refused` where `check` finds a prompt of this size too long for so many tokens."""
    try:
        check(size, most_tokens, path)
    except PositionOutOfRange as error:
        raise refusal(error, {"input": path.partition("[")[0]}) from None


def sampling_params(given: GenerationFields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """OpenAI's sampling parameters, at its defaults, and the contract's further ones under the names vLLM gave them."""
    # An empty field of a form asks for none.
    stop = given.stop if isinstance(given.stop, list) else [given.stop] * bool(given.stop)
    return SamplingParams(
        temperature=given.temperature,
        # -1 is what other servers take for "off".
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=_logit_bias(given.logit_bias),
        min_tokens=given.min_tokens,
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        # The contract's seeds have no sign.
        seed=given.seed if given.seed is None or given.seed >= 0 else given.seed % 2**64,
        logprobs=logprobs,
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """A map of token ids, which JSON writes as strings."""
    for token in given:
        if not token.isdecimal() or len(token) > 10 or int(token) > MAX_TOKEN_ID:
            raise BadField("logit_bias", f"{token[:20]!r} is not a token id", "invalid_value")
    return {int(token): amount for token, amount in given.items()}


def _prediction(given: Any) -> str | None:
    """The text that the caller expects; None when there is none."""
    if given is None:
        return None
    return content_text(read_object(Prediction, given, "prediction").content, "prediction.content")
