"""The fields of a request's body, each once: where it goes, why it has no effect, or why it is refused.

Those that are taken are fields of `bodies`; `Fields.end` disposes of the others by this table. The tables of
docs/gateway.md are made of both: `python tests/page_tables.py docs/gateway.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_type_hints

from outrider_gateway.bodies import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerationFields,
    MessageOptions,
    MessagesFields,
    ResponsesFields,
    TemplateFields,
    TokenizeFields,
)


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


def _taken(kind: type[Any]) -> tuple[RequestField, ...]:
    """The fields that a struct has, but for those without a note, which another has too."""
    found = {
        name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    notes = {name: each[-1] for name, each in found.items() if each and isinstance(each[-1], str)}
    return tuple(RequestField(name, Use.TAKEN, note) for name, note in notes.items())


def _fields(table: str, *kinds: type[Any]) -> tuple[RequestField, ...]:
    """The fields of these structs, and those of a table: lines `USE NAME=HARMLESS|HARMLESS NAME: NOTE`, which go on
    where the next one is indented. Harmless values are JSON."""
    fields = [field for kind in kinds for field in _taken(kind)]
    for line in table.strip().replace("\n    ", " ").splitlines():
        names, _, note = line.partition(": ")
        use, *named = names.split()
        for each in named:
            name, _, harmless = each.partition("=")
            values = tuple(json.loads(value) for value in harmless.split("|") if value)
            fields.append(RequestField(name, Use(use), note, values))
    return tuple(fields)


# By where they belong, in the order of the page.
TABLES = {
    "both": _fields("""
ignored metadata safety_identifier prompt_cache_retention: for a provider's own books
ignored service_tier: there is one tier
ignored spaces_between_special_tokens: the model's tokenizer decides this
ignored cache_prompt cache_salt id_slot: a cache changes no answer
ignored priority: tenants' shares decide who comes first
ignored request_id rid: an answer's header x-request-id names the request
ignored keep_alive: the model stays loaded
ignored num_ctx: the context is the target's
ignored session_id chat_id conversation_id tags: for a client's own books
ignored usage: usage is always counted
ignored provider route: there is one provider
ignored guided_decoding_backend: there is one
ignored mirostat_tau mirostat_eta: there is no mirostat
refused mirostat=0 typical_p=1 tfs_z=1 top_a=0 xtc_probability=0: top_p, top_k and min_p are taken
refused dry_multiplier=0 no_repeat_ngram_size=0: repetition_penalty is taken
refused random_seed: the name here is seed
refused safe_prompt=false: put it into a message
refused transforms=[] truncate_prompt_tokens=-1: prompts are not cut
refused plugins=[]: the caller runs the tools
refused models=[]: the name here is model
refused format="" json_schema grammar regex ebnf: the names here are response_format and structured_outputs
refused think: the name here is enable_thinking
refused timings_per_token=false: metrics have times
refused extra_headers={} extra_query={}: it is an argument of openai's Python package
refused vllm_xargs={} logits_processors=[] custom_logit_processor: a request cannot bring code
refused include_stop_str_in_output=false no_stop_trim=false: what ends an answer is no part of it
refused stop_regex=[]|"": stop takes strings
refused detokenize=true return_token_ids=false return_hidden_states=false: answers are text
refused return_tokens_as_token_ids=false: tokens are named by their text
refused use_beam_search=false length_penalty=1 early_stopping=false: there is no beam search
refused bad_words=[] allowed_token_ids=[]: logit_bias takes token ids
refused lora_path: there are no adapters
refused extra_body={}: it is an argument of openai's Python package; its fields belong beside the others
refused max_new_tokens max_output_tokens n_predict: the name here is max_tokens
refused repeat_penalty=1: the name here is repetition_penalty
refused options={}: its fields belong beside the others, under OpenAI's names
""", GenerationFields),
    "chat": _fields("""
refused add_special_tokens=false: the target decides with which special tokens a prompt begins
refused functions=[] function_call="none"|"auto": the names here are tools and tool_choice
refused modalities=["text"] audio: answers are text
refused web_search_options: there is no search
refused documents=[]: put them into a message
refused chat_template: the model's own is used
refused mm_processor_kwargs={}: prompts are text
refused separate_reasoning=true: reasoning stands apart from the answer
refused stream_reasoning=true: reasoning is streamed as the answer is
refused echo=false best_of=1 prompt: it belongs to /v1/completions
refused store=false: nothing is stored
refused input: it belongs to the Responses API; the name here is messages
refused instructions="": it belongs to the Responses API; use a system message
""", ChatFields, TemplateFields),
    "completions": _fields("""
refused add_special_tokens=true: the target decides with which special tokens a prompt begins
refused suffix="": text is continued at its end
ignored reasoning_effort verbosity enable_thinking: a prompt has no chat template
ignored parallel_tool_calls: there are no tools
refused tool_choice="none"|"auto" messages tools=[]: it belongs to /v1/chat/completions
refused store=false: nothing is stored
refused modalities=["text"]: answers are text
refused max_completion_tokens: the name here is max_tokens
refused chat_template_kwargs={}: a prompt has no chat template
""", CompletionFields),
    "responses": _fields("""
ignored client_metadata: for a client's own books
refused background=false: a response ends with its request
refused conversation: previous_response_id continues a conversation
refused prompt: prompts are not kept: input takes their text
refused max_tool_calls: the caller runs the tools
refused context_management=[]: prompts are not cut
refused n=1 best_of=1: a response is one answer
refused logprobs=false: the name here is top_logprobs
refused prompt_logprobs: /v1/chat/completions has them
refused messages: the name here is input
refused response_format: the name here is text.format
refused max_tokens max_completion_tokens: the name here is max_output_tokens
refused reasoning_effort: the name here is reasoning.effort
""", ResponsesFields),
    "messages": _fields("""
ignored context_management: the conversation is taken as it is
ignored cache_control: pages are shared anyway
ignored anthropic_version anthropic_beta betas diagnostics inference_geo speed user_profile_id workspace_id: it is of
    Anthropic's own server
refused mcp_servers=[] container: the caller runs the tools
refused thread: conversations are not kept: messages has all of one
refused n=1 best_of=1: a response is one answer
refused logprobs=false prompt_logprobs stream_options={}: Anthropic's API has no such field
refused stop: the name here is stop_sequences
refused user: the name here is metadata.user_id
refused response_format structured_outputs guided_json guided_regex guided_choice guided_grammar: the name here is
    output_config.format
""", MessagesFields, MessageOptions),
    "/tokenize": _fields("""
refused chat_template: the model's own is used
refused mm_processor_kwargs={} media_io_kwargs={}: prompts are texts and messages
""", TokenizeFields),
    "/detokenize": _taken(DetokenizeFields),
}  # fmt: skip


def _by_name(*tables: str) -> Mapping[str, RequestField]:
    """The fields of these tables, of two with one name the later."""
    return {field.name: field for table in tables for field in TABLES[table]}


TOKENIZE_FIELDS, DETOKENIZE_FIELDS = _by_name("/tokenize"), _by_name("/detokenize")
CHAT_FIELDS, COMPLETION_FIELDS = _by_name("chat", "both"), _by_name("completions", "both")
RESPONSES_FIELDS, MESSAGES_FIELDS = _by_name("both", "responses"), _by_name("both", "messages")
