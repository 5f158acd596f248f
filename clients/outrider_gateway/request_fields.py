"""The fields of a request's body, each once: where it goes, why it has no effect, or why it is refused.

`translation` takes the fields that are TAKEN; `Fields.end` disposes of the others by this table. The tables of
docs/gateway.md are made of it: `python -m outrider_gateway.request_fields docs/gateway.md`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Use(Enum):
    """What is done with a field."""

    TAKEN = "taken"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a body. `note` is where it goes, or why it is ignored or refused. `harmless` are values of a refused
    field that ask for nothing, and are taken."""

    name: str
    use: Use
    note: str
    harmless: tuple[Any, ...] = ()


def _taken(name: str, note: str) -> RequestField:
    return RequestField(name, Use.TAKEN, note)


def _ignored(name: str, note: str) -> RequestField:
    return RequestField(name, Use.IGNORED, note)


def _refused(name: str, note: str, *harmless: Any) -> RequestField:
    return RequestField(name, Use.REFUSED, note, harmless)


_TOOLS = "the names here are tools and tool_choice"
_FORM = "the names here are response_format and structured_outputs"
_MAX_TOKENS = "the name here is max_tokens"
_ALIKE: tuple[RequestField, ...] = (
    _taken("model", "a served name, or the part of one behind its last slash; without it any target answers"),
    _taken("stream", "the answer as server-sent events"),
    _taken("stream_options", "`include_usage`, `continuous_usage_stats`; `include_obfuscation` has no effect"),
    _taken("n", "answers to each prompt"),
    _taken("max_tokens", "at most so many tokens"),
    _taken("min_tokens", "at least so many tokens"),
    _taken("temperature", "1 by default, as at OpenAI; 0 is greedy"),
    _taken("top_p", "sampling"),
    _taken("top_k", "sampling; 0 and -1 keep all"),
    _taken("min_p", "sampling"),
    _taken("presence_penalty", "sampling"),
    _taken("frequency_penalty", "sampling"),
    _taken("repetition_penalty", "sampling"),
    _taken("logit_bias", "sampling, by token id"),
    _taken("seed", "choice i is sampled with seed + i"),
    _taken("stop", "a string or several that end an answer and are no part of it"),
    _taken("stop_token_ids", "tokens that end an answer and are no part of it"),
    _taken("ignore_eos", "goes on past the model's end tokens"),
    _taken("logprobs", "log-probabilities of the tokens"),
    _taken("prompt_logprobs", "log-probabilities of the prompt's tokens, as vLLM lists them; not streamed"),
    _taken("skip_special_tokens", "false shows special tokens in the text"),
    _taken(
        "split_special_tokens",
        "true reads the text of a special token in a prompt as text, false as that token, as transformers' tokenizers "
        "do; by default text in messages ([why](security.md#special-tokens-in-text)), and the token in `prompt`",
    ),
    _taken("prompt_cache_key", "requests with the same key go to the same target"),
    _taken("user", "named in the request log"),
    _taken("outrider", "an object of Outrider's own, see below"),
    _taken(
        "response_format", "the answer's form: `text`, `json_object`, or `json_schema` with `name`, `schema`, `strict`"
    ),
    _taken("structured_outputs", "the answer's form: one of `json`, `json_object`, `regex`, `choice`, `grammar`"),
    _taken("guided_json", "the answer's form: a JSON Schema"),
    _taken("guided_regex", "the answer's form: a regular expression"),
    _taken("guided_choice", "the answer's form: one of these texts"),
    _taken("guided_grammar", "the answer's form: a Lark grammar"),
    _ignored("metadata", "for a provider's own books"),
    _ignored("safety_identifier", "for a provider's own books"),
    _ignored("prompt_cache_retention", "for a provider's own books"),
    _ignored("service_tier", "there is one tier"),
    _ignored("spaces_between_special_tokens", "the model's tokenizer decides this"),
    _ignored("cache_prompt", "a cache changes no answer"),
    _ignored("cache_salt", "a cache changes no answer"),
    _ignored("priority", "tenants' shares decide who comes first"),
    _ignored("request_id", "an answer's header x-request-id names the request"),
    _ignored("rid", "an answer's header x-request-id names the request"),
    _ignored("keep_alive", "the model stays loaded"),
    _ignored("num_ctx", "the context is the target's"),
    _ignored("id_slot", "a cache changes no answer"),
    _ignored("session_id", "for a client's own books"),
    _ignored("chat_id", "for a client's own books"),
    _ignored("conversation_id", "for a client's own books"),
    _ignored("tags", "for a client's own books"),
    _ignored("usage", "usage is always counted"),
    _ignored("provider", "there is one provider"),
    _ignored("route", "there is one provider"),
    _ignored("guided_decoding_backend", "there is one"),
    _ignored("mirostat_tau", "there is no mirostat"),
    _ignored("mirostat_eta", "there is no mirostat"),
    _refused("mirostat", "top_p, top_k and min_p are taken", 0),
    _refused("typical_p", "top_p, top_k and min_p are taken", 1),
    _refused("tfs_z", "top_p, top_k and min_p are taken", 1),
    _refused("top_a", "top_p, top_k and min_p are taken", 0),
    _refused("xtc_probability", "top_p, top_k and min_p are taken", 0),
    _refused("dry_multiplier", "repetition_penalty is taken", 0),
    _refused("no_repeat_ngram_size", "repetition_penalty is taken", 0),
    _refused("random_seed", "the name here is seed"),
    _refused("safe_prompt", "put it into a message", False),
    _refused("transforms", "prompts are not cut", []),
    _refused("plugins", "the caller runs the tools", []),
    _refused("models", "the name here is model", []),
    _refused("format", _FORM, ""),
    _refused("think", "the name here is enable_thinking"),
    _refused("timings_per_token", "metrics have times", False),
    _refused("extra_headers", "it is an argument of openai's Python package", {}),
    _refused("extra_query", "it is an argument of openai's Python package", {}),
    _refused("vllm_xargs", "a request cannot bring code", {}),
    _refused("include_stop_str_in_output", "what ends an answer is no part of it", False),
    _refused("no_stop_trim", "what ends an answer is no part of it", False),
    _refused("stop_regex", "stop takes strings", [], ""),
    _refused("detokenize", "answers are text", True),
    _refused("return_token_ids", "answers are text", False),
    _refused("return_tokens_as_token_ids", "tokens are named by their text", False),
    _refused("return_hidden_states", "answers are text", False),
    _refused("truncate_prompt_tokens", "prompts are not cut", -1),
    _refused("use_beam_search", "there is no beam search", False),
    _refused("length_penalty", "there is no beam search", 1),
    _refused("early_stopping", "there is no beam search", False),
    _refused("bad_words", "logit_bias takes token ids", []),
    _refused("allowed_token_ids", "logit_bias takes token ids", []),
    _refused("logits_processors", "a request cannot bring code", []),
    _refused("custom_logit_processor", "a request cannot bring code"),
    _refused("json_schema", _FORM),
    _refused("grammar", _FORM),
    _refused("regex", _FORM),
    _refused("ebnf", _FORM),
    _refused("lora_path", "there are no adapters"),
    _refused("extra_body", "it is an argument of openai's Python package; its fields belong beside the others", {}),
    _refused("max_new_tokens", _MAX_TOKENS),
    _refused("max_output_tokens", _MAX_TOKENS),
    _refused("n_predict", _MAX_TOKENS),
    _refused("repeat_penalty", "the name here is repetition_penalty", 1),
    _refused("options", "its fields belong beside the others, under OpenAI's names", {}),
)
_BEGINNING = "the target decides with which special tokens a prompt begins"
_CHAT: tuple[RequestField, ...] = (
    _taken(
        "messages", "roles system (or developer), user, assistant and tool; contents are text, parts joined by newlines"
    ),
    _taken("tools", "functions that the answer may call, see below"),
    _taken("tool_choice", "`auto`, `none`, `required`, the function that is called, or `allowed_tools` of either kind"),
    _taken("parallel_tool_calls", "false keeps the answer to one call"),
    _taken("include_reasoning", "false leaves the reasoning out of the answer"),
    _taken("max_completion_tokens", "as max_tokens, and wins over it"),
    _taken("top_logprobs", "alternatives to each token; needs logprobs"),
    _taken("prediction", "the expected answer ([predicted outputs](predicted_outputs.md))"),
    _taken("add_generation_prompt", "false leaves out the beginning of the assistant's answer"),
    _taken("continue_final_message", "the answer goes on with the last message"),
    _taken("chat_template_kwargs", "given to the model's chat template; what it does not read changes nothing"),
    _taken("reasoning_effort", "given to the model's chat template; without effect where it does not read it"),
    _taken("verbosity", "given to the model's chat template; without effect where it does not read it"),
    _taken("enable_thinking", "given to the model's chat template; without effect where it does not read it"),
    _refused("add_special_tokens", _BEGINNING, False),
    _refused("functions", _TOOLS, []),
    _refused("function_call", _TOOLS, "none", "auto"),
    _refused("modalities", "answers are text", ["text"]),
    _refused("audio", "answers are text"),
    _refused("web_search_options", "there is no search"),
    _refused("documents", "put them into a message", []),
    _refused("chat_template", "the model's own is used"),
    _refused("mm_processor_kwargs", "prompts are text", {}),
    _refused("separate_reasoning", "reasoning stands apart from the answer", True),
    _refused("stream_reasoning", "reasoning is streamed as the answer is", True),
    _taken("thinking", "its type is given to the model's chat template as `enable_thinking`"),
    _taken("reasoning", "`effort` as reasoning_effort, `enabled` as enable_thinking"),
    _refused("echo", "it belongs to /v1/completions", False),
    _refused("best_of", "it belongs to /v1/completions", 1),
    _refused("store", "nothing is stored", False),
    _refused("prompt", "it belongs to /v1/completions"),
    _refused("input", "it belongs to the Responses API; the name here is messages"),
    _refused("instructions", "it belongs to the Responses API; use a system message", ""),
)
_COMPLETIONS: tuple[RequestField, ...] = (
    _taken("prompt", "a text, token ids, or a list of either"),
    _taken("echo", "the answer's text begins with the prompt, and `logprobs` with those of its tokens, see below"),
    _taken("best_of", "so many answers to each prompt, of which the n likeliest are returned; not streamed"),
    _refused("add_special_tokens", _BEGINNING, True),
    _refused("suffix", "text is continued at its end", ""),
    _ignored("reasoning_effort", "a prompt has no chat template"),
    _ignored("verbosity", "a prompt has no chat template"),
    _ignored("enable_thinking", "a prompt has no chat template"),
    _ignored("parallel_tool_calls", "there are no tools"),
    _refused("tool_choice", "it belongs to /v1/chat/completions", "none", "auto"),
    _refused("store", "nothing is stored", False),
    _refused("modalities", "answers are text", ["text"]),
    _refused("max_completion_tokens", _MAX_TOKENS),
    _refused("messages", "it belongs to /v1/chat/completions"),
    _refused("tools", "it belongs to /v1/chat/completions", []),
    _refused("chat_template_kwargs", "a prompt has no chat template", {}),
)


def _by_name(fields: Iterable[RequestField]) -> Mapping[str, RequestField]:
    return {field.name: field for field in fields}


_CHOICES = "a response is one answer"
_RESPONSES: tuple[RequestField, ...] = (
    _taken("input", "a user's text, or items: messages, function_call, function_call_output, reasoning"),
    _taken("instructions", "a system message before the conversation; not carried on to the next response"),
    _taken("previous_response_id", "the conversation of a response that is still kept goes on, see below"),
    _taken("store", "false keeps nothing"),
    _taken("max_output_tokens", "at most so many tokens"),
    _taken("text", "`format`: text, json_object, or json_schema with its schema; `verbosity`"),
    _taken("reasoning", "`effort` is given to the model's chat template; summaries are not made"),
    _taken("tools", "functions that the answer may call; tools of OpenAI's own are refused"),
    _taken("tool_choice", "`auto`, `none`, `required`, the function that is called, or `allowed_tools` of either kind"),
    _taken("parallel_tool_calls", "false keeps the answer to one call"),
    _taken("include", "`message.output_text.logprobs`; what else it names is of tools that are not here"),
    _taken("top_logprobs", "alternatives to each token"),
    _taken("truncation", "`auto` and `disabled`: prompts are not cut, and one that is too long is refused"),
    _taken("metadata", "comes back with the response"),
    _taken("chat_template_kwargs", "given to the model's chat template; what it does not read changes nothing"),
    _taken("enable_thinking", "given to the model's chat template; without effect where it does not read it"),
    _ignored("client_metadata", "for a client's own books"),
    _refused("background", "a response ends with its request", False),
    _refused("conversation", "previous_response_id continues a conversation"),
    _refused("prompt", "prompts are not kept: input takes their text"),
    _refused("max_tool_calls", "the caller runs the tools"),
    _refused("context_management", "prompts are not cut", []),
    _refused("n", _CHOICES, 1),
    _refused("best_of", _CHOICES, 1),
    _refused("logprobs", "the name here is top_logprobs", False),
    _refused("prompt_logprobs", "/v1/chat/completions has them"),
    _refused("messages", "the name here is input"),
    _refused("response_format", "the name here is text.format"),
    _refused("max_tokens", "the name here is max_output_tokens"),
    _refused("max_completion_tokens", "the name here is max_output_tokens"),
    _refused("reasoning_effort", "the name here is reasoning.effort"),
)
_ANTHROPIC = "Anthropic's API has no such field"
_MESSAGES: tuple[RequestField, ...] = (
    _taken("messages", "roles user and assistant; contents are text, tool_use, tool_result and thinking"),
    _taken("system", "a system message before the conversation"),
    _taken("max_tokens", "at most so many tokens; required"),
    _taken("stop_sequences", "strings that end an answer and are no part of it"),
    _taken("tools", "tools of the caller's own, that is of type custom"),
    _taken("tool_choice", "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"),
    _taken("thinking", "its type is given to the model's chat template as `enable_thinking`"),
    _taken("output_config", "`format`: a JSON Schema of the answer; `effort` and `task_budget` have no effect"),
    _taken("output_format", "as `output_config.format`, its older name"),
    _taken("metadata", "`user_id` is named in the request log"),
    _taken("chat_template_kwargs", "given to the model's chat template; what it does not read changes nothing"),
    _taken("enable_thinking", "given to the model's chat template; without effect where it does not read it"),
    _ignored("context_management", "the conversation is taken as it is"),
    _ignored("cache_control", "pages are shared anyway"),
    _ignored("anthropic_version", "it is of Anthropic's own server"),
    _ignored("anthropic_beta", "it is of Anthropic's own server"),
    _ignored("betas", "it is of Anthropic's own server"),
    _ignored("diagnostics", "it is of Anthropic's own server"),
    _ignored("inference_geo", "it is of Anthropic's own server"),
    _ignored("speed", "it is of Anthropic's own server"),
    _ignored("user_profile_id", "it is of Anthropic's own server"),
    _ignored("workspace_id", "it is of Anthropic's own server"),
    _refused("mcp_servers", "the caller runs the tools", []),
    _refused("container", "the caller runs the tools"),
    _refused("thread", "conversations are not kept: messages has all of one"),
    _refused("n", _CHOICES, 1),
    _refused("best_of", _CHOICES, 1),
    _refused("logprobs", _ANTHROPIC, False),
    _refused("prompt_logprobs", _ANTHROPIC),
    _refused("stream_options", _ANTHROPIC, {}),
    _refused("stop", "the name here is stop_sequences"),
    _refused("user", "the name here is metadata.user_id"),
    _refused("response_format", "the name here is output_config.format"),
)
_PROMPTS_ONLY = "prompts are texts and messages"
_TOKENIZE: tuple[RequestField, ...] = (
    _taken("prompt", "a text; or else `messages`, with the fields of a chat that shape the prompt"),
    _taken("add_special_tokens", "false leaves out what the tokenizer begins and ends a prompt with; for `prompt`"),
    _taken("return_token_strs", "the text of each token as well"),
    _refused("chat_template", "the model's own is used"),
    _refused("mm_processor_kwargs", _PROMPTS_ONLY, {}),
    _refused("media_io_kwargs", _PROMPTS_ONLY, {}),
)
_DETOKENIZE: tuple[RequestField, ...] = (_taken("tokens", "token ids"),)

TOKENIZE_FIELDS = _by_name(_TOKENIZE)
DETOKENIZE_FIELDS = _by_name(_DETOKENIZE)
CHAT_FIELDS = _by_name((*_CHAT, *_ALIKE))
COMPLETION_FIELDS = _by_name((*_COMPLETIONS, *_ALIKE))
# The later of a name counts.
RESPONSES_FIELDS = _by_name((*_ALIKE, *_RESPONSES))
MESSAGES_FIELDS = _by_name((*_ALIKE, *_MESSAGES))

_MARKED = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str) -> str:
    """The page with every marked table of fields replaced. Raises `ValueError` for a mark of another use."""
    return _MARKED.sub(lambda mark: mark[1] + _table(Use(mark[2])) + mark[3], page)


def _table(use: Use) -> str:
    rows = [("field", "of", _HEADS[use]), ("---",) * 3]
    for fields, where in (
        (_ALIKE, "both"),
        (_CHAT, "chat"),
        (_COMPLETIONS, "completions"),
        (_RESPONSES, "responses"),
        (_MESSAGES, "messages"),
        (_TOKENIZE, "/tokenize"),
        (_DETOKENIZE, "/detokenize"),
    ):
        # Fields of one note stand together.
        notes: dict[str, list[str]] = {}
        for field in fields:
            if field.use is use:
                notes.setdefault(field.note, []).append(_shown(field))
        rows += [(", ".join(names), where, note) for note, names in notes.items()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


_HEADS = {Use.TAKEN: "what it does", Use.IGNORED: "why it has no effect", Use.REFUSED: "why it is refused"}


def _shown(field: RequestField) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.harmless)
    return f"`{field.name}`" + (f" (but {values})" if values else "")


def main(arguments: Sequence[str]) -> int:
    for name in arguments:
        path = Path(name)
        path.write_text(render(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
