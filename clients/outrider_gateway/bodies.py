"""The fields of a request's body that are taken, each once: its type and bounds, its default, and where it goes.

The notes are those of docs/gateway.md, see `request_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from outrider.admission.prompt_limits import MAX_MESSAGES
from outrider.admission.tool_limits import MAX_TOOLS
from outrider.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKENS
from outrider.structured_output import MAX_CHOICES

MAX_UINT32 = 2**32 - 1
MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Answers = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63))]
Count = Annotated[int, Meta(ge=0, le=MAX_UINT32)]
# What goes into calls, messages and traces. Chosen: a path of a file system.
Name = Annotated[str, Meta(max_length=4096)]
Object = dict[str, Any]
# Of a conversation or of one message: none is looked at before they are counted.
Entries = Annotated[list[Any], Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[Any], Meta(max_length=MAX_TOOLS)]
Stops = Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)]
Included = Annotated[list[Any], Meta(max_length=32)]
Truncation = Literal["auto", "disabled"]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TEMPLATE = "given to the model's chat template; without effect where it does not read it"
_ARGUMENTS = "given to the model's chat template; what it does not read changes nothing"
_CHOICE = "`auto`, `none`, `required`, the function that is called, or `allowed_tools` of either kind"
_THINKING = "its type is given to the model's chat template as `enable_thinking`"


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: Annotated[Name, "a served name, or its part behind the last slash; without it any target answers"] = ""
    stream: Annotated[bool, "the answer as server-sent events"] = False
    stream_options: Annotated[Object, "`include_usage`, `continuous_usage_stats`; ignored: `include_obfuscation`"] = {}
    n: Annotated[Answers, "answers to each prompt"] = 1
    max_tokens: Annotated[Count | None, "at most so many tokens"] = None
    min_tokens: Annotated[Count, "at least so many tokens"] = 0
    temperature: Annotated[float, Meta(ge=0, le=1e6), "1 by default, as at OpenAI; 0 is greedy"] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1), "sampling"] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_UINT32), "sampling; 0 and -1 keep all"] = 0
    min_p: Annotated[float, Meta(ge=0, le=1), "sampling"] = 0.0
    presence_penalty: Annotated[Penalty, "sampling"] = 0.0
    frequency_penalty: Annotated[Penalty, "sampling"] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6), "sampling"] = 1.0
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS), "sampling, by token id"] = {}
    seed: Annotated[Seed | None, "choice i is sampled with seed + i"] = None
    stop: Annotated[str | Stops, "a string or several that end an answer and are no part of it"] = []
    stop_token_ids: Annotated[StopIds, "tokens that end an answer and are no part of it"] = []
    ignore_eos: Annotated[bool, "goes on past the model's end tokens"] = False
    prompt_logprobs: Annotated[Logprobs | None, "log-probabilities of the prompt, as vLLM lists them; not streamed"] = (
        None
    )
    skip_special_tokens: Annotated[bool, "false shows special tokens in the text"] = True
    split_special_tokens: Annotated[
        bool | None,
        "true reads the text of a special token in a prompt as text, false as that token, as transformers' tokenizers "
        "do; by default text in messages ([why](security.md#special-tokens-in-text)), and the token in `prompt`",
    ] = None
    prompt_cache_key: Annotated[Name, "requests with the same key go to the same target"] = ""
    # What is no text, as of pipelines of Open WebUI, names nobody here.
    user: Annotated[Any, "named in the request log"] = None
    outrider: Annotated[Object, "an object of Outrider's own, see below"] = {}
    response_format: Annotated[Any, "the answer's form: `text`, `json_object`, or `json_schema` with its schema"] = None
    structured_outputs: Annotated[
        Object, "the answer's form: one of `json`, `json_object`, `regex`, `choice`, `grammar`"
    ] = {}
    guided_json: Annotated[Object | str | None, "the answer's form: a JSON Schema"] = None
    guided_regex: Annotated[str | None, "the answer's form: a regular expression"] = None
    guided_choice: Annotated[Choices | None, "the answer's form: one of these texts"] = None
    guided_grammar: Annotated[str | None, "the answer's form: a Lark grammar"] = None


class TemplateFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a chat template renders messages."""

    tools: Annotated[Tools, "functions that the answer may call, see below"] = []
    tool_choice: Annotated[str | Object | None, _CHOICE] = None
    parallel_tool_calls: Annotated[bool, "false keeps the answer to one call"] = True
    add_generation_prompt: Annotated[bool | None, "false leaves out the beginning of the assistant's answer"] = None
    continue_final_message: Annotated[bool, "the answer goes on with the last message"] = False
    chat_template_kwargs: Annotated[Object, _ARGUMENTS] = {}
    reasoning_effort: Annotated[Any, _TEMPLATE] = None
    verbosity: Annotated[Any, _TEMPLATE] = None
    enable_thinking: Annotated[Any, _TEMPLATE] = None
    thinking: Annotated[Any, _THINKING] = None
    reasoning: Annotated[Any, "`effort` as reasoning_effort, `enabled` as enable_thinking"] = None


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a body of /v1/chat/completions has beside them."""

    messages: Annotated[
        Any, "roles system (or developer), user, assistant and tool; contents are text, parts joined by newlines"
    ] = None
    include_reasoning: Annotated[bool, "false leaves the reasoning out of the answer"] = True
    max_completion_tokens: Annotated[Count | None, "as max_tokens, and wins over it"] = None
    logprobs: Annotated[bool, "log-probabilities of the tokens"] = False
    top_logprobs: Annotated[Logprobs, "alternatives to each token; needs logprobs"] = 0
    prediction: Annotated[Any, "the expected answer ([predicted outputs](predicted_outputs.md))"] = None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a body of /v1/completions has beside them."""

    prompt: Annotated[Any, "a text, token ids, or a list of either"] = None
    logprobs: Annotated[Logprobs | None, "log-probabilities of the tokens, and so many alternatives to each"] = None
    echo: Annotated[bool, "the text begins with the prompt, and `logprobs` with those of its tokens, see below"] = False
    best_of: Annotated[
        Answers | None, "so many answers to each prompt, of which the n likeliest are returned; not streamed"
    ] = None


class ResponsesFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a body of /v1/responses has beside `GenerationFields`. OpenAI's limits."""

    input: Annotated[Any, "a user's text, or items: messages, function_call, function_call_output, reasoning"] = None
    instructions: Annotated[str, "a system message before the conversation; not carried on to the next response"] = ""
    previous_response_id: Annotated[Name, "the conversation of a response that is still kept goes on, see below"] = ""
    store: Annotated[bool, "false keeps nothing"] = True
    max_output_tokens: Annotated[Count | None, "at most so many tokens"] = None
    text: Annotated[Object, "`format`: text, json_object, or json_schema with its schema; `verbosity`"] = {}
    reasoning: Annotated[Object, "`effort` is given to the model's chat template; summaries are not made"] = {}
    tools: Annotated[Tools, "functions that the answer may call; tools of OpenAI's own are refused"] = []
    tool_choice: Annotated[str | Object | None, _CHOICE] = None
    parallel_tool_calls: Annotated[bool, "false keeps the answer to one call"] = True
    include: Annotated[Included, "`message.output_text.logprobs`; what else it names is of tools not here"] = []
    top_logprobs: Annotated[Logprobs, "alternatives to each token"] = 0
    truncation: Annotated[Truncation, "`auto`, `disabled`: prompts are not cut; one that is too long is refused"] = (
        "disabled"
    )
    metadata: Annotated[Object, Meta(max_length=16), "comes back with the response"] = {}
    chat_template_kwargs: Annotated[Object, _ARGUMENTS] = {}
    enable_thinking: Annotated[Any, _TEMPLATE] = None


class MessagesFields(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt in a body of /v1/messages."""

    messages: Annotated[Any, "roles user and assistant; contents are text, tool_use, tool_result and thinking"] = None
    system: Annotated[Any, "a system message before the conversation"] = None
    tools: Annotated[Tools, "tools of the caller's own, that is of type custom"] = []
    tool_choice: Annotated[Object | None, "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"] = None
    thinking: Annotated[Any, _THINKING] = None
    chat_template_kwargs: Annotated[Object, _ARGUMENTS] = {}
    enable_thinking: Annotated[Any, _TEMPLATE] = None


class MessageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a body of /v1/messages has beside its prompt and `GenerationFields`."""

    max_tokens: Annotated[Annotated[int, Meta(ge=1, le=MAX_UINT32)], "at most so many tokens; required"]
    stop_sequences: Annotated[str | Stops, "strings that end an answer and are no part of it"] = []
    output_config: Annotated[Object, "`format`: a JSON Schema of the answer; ignored: `effort`, `task_budget`"] = {}
    output_format: Annotated[Any, "as `output_config.format`, its older name"] = None
    metadata: Annotated[Object, "`user_id` is named in the request log"] = {}


class CountFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a body of /v1/messages/count_tokens has beside `MessagesFields`. The form of an answer is no part of it."""

    model: Name = ""
    output_config: Any = None


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize, with `TemplateFields` where it has messages."""

    prompt: Annotated[str | None, "a text; or else `messages`, with the fields of a chat that shape the prompt"] = None
    add_special_tokens: Annotated[
        bool | None, "false leaves out what the tokenizer begins and ends a prompt with; for `prompt`"
    ] = None
    return_token_strs: Annotated[bool, "the text of each token as well"] = False
    model: Name = ""
    messages: Any = None
    split_special_tokens: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    tokens: Annotated[list[Any], "token ids"] = []
    model: Name = ""
