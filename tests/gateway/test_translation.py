"""OpenAI's request bodies, field by field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_tables import rendered

from outrider.errors import InvalidField, QuotaExceeded
from outrider.sampling import SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from outrider_client.answers import ToolCall
from outrider_client.generation import Speculation
from outrider_client.messages import ChatOptions, ChatTurn, ToolChoice, ToolOptions
from outrider_gateway.failures import Refused, refusal
from outrider_gateway.generation_request import CHAT_NAMES, GenerationRequest, Prompt
from outrider_gateway.messages_request import messages_request
from outrider_gateway.request_fields import CHAT_FIELDS, COMPLETION_FIELDS, Use
from outrider_gateway.responses_request import responses_request
from outrider_gateway.translation import chat_request, completion_request

HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def chat(**more: Any) -> GenerationRequest:
    return chat_request({**HELLO, **more}, 8)


def completion(**more: Any) -> GenerationRequest:
    return completion_request({"model": "m", "prompt": "once", **more}, 8)


FORMAT_SCHEMA = "response_format.json_schema.schema"


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def test_bare_requests_have_openais_defaults() -> None:
    asked = chat()
    assert asked.prompts == (Prompt(messages=(ChatTurn("user", "hello"),)),)
    assert asked.sampling == SamplingParams(temperature=1.0)
    assert asked.speculation == Speculation()
    assert (asked.model, asked.choices, asked.stream, asked.logprobs) == ("m", 1, False, False)
    assert completion().sampling == SamplingParams(temperature=1.0, max_tokens=16)
    assert completion().prompts == (Prompt(text="once"),)


def test_every_sampling_field_arrives() -> None:
    asked = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"17": -100, "5": 1.5}, min_tokens=2, max_completion_tokens=9, max_tokens=3,
        stop=["a", "b"], stop_token_ids=[4], ignore_eos=True, seed=7, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    assert asked.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=2, logit_bias={17: -100.0, 5: 1.5}, min_tokens=2, max_tokens=9,
        stop=("a", "b"), stop_token_ids=(4,), ignore_eos=True, seed=7, logprobs=3,
    )  # fmt: skip
    assert asked.logprobs


def test_drafting_options_arrive() -> None:
    asked = chat(outrider={"speculation": False, "mode": "coupled", "max_nodes": 5, "corpus": "docs", "drafts": True})
    assert asked.speculation == Speculation(False, VerificationMode.COUPLED, 5, "docs", token_texts=True)
    assert asked.drafts
    assert chat(outrider={"speculation": True}).speculation == Speculation()


@pytest.mark.parametrize(
    ("content", "said"),
    [("plain", "plain"), ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo")],
)
def test_contents(content: Any, said: str) -> None:
    turns = [{"role": "developer", "content": "brief"}, {"role": "user", "content": content, "name": "ann"}]
    assert chat(messages=turns).prompts[0].messages == (ChatTurn("system", "brief"), ChatTurn("user", said))


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "tool_calls": None}
    assert chat(messages=[*HELLO["messages"], answer]).prompts[0].messages[1] == ChatTurn("assistant", "yes")


def test_tools_and_the_history_of_their_calls() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    chosen = {"type": "function", "function": {"name": "add"}}
    asked = chat(messages=[*HELLO["messages"], *turns], tools=[TOOL], tool_choice=chosen, parallel_tool_calls=False)
    assert asked.prompts[0].messages[1:] == (
        ChatTurn("assistant", "", (ToolCall("a", "add", '{"x": 1}'),), reasoning="hm"),
        ChatTurn("tool", "2", tool_call_id="a"),
    )
    assert asked.chat_options.tools == ToolOptions((TOOL,), ToolChoice.REQUIRED, "add", single_call=True)


def test_of_allowed_tools_the_model_is_told_of_these_alone() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "add"}}
    for mode, choice in (("auto", ToolChoice.AUTO), ("required", ToolChoice.REQUIRED)):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        asked = chat(tools=[other, TOOL], tool_choice=allowed)
        assert asked.chat_options.tools == ToolOptions((TOOL,), choice)
        flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "add"}]}
        tools = [{"type": "function", **each["function"]} for each in (other, TOOL)]
        response = responses_request({"model": "m", "input": "hi", "tools": tools, "tool_choice": flat}, 1)
        assert response.chat_options.tools == ToolOptions((TOOL,), choice)
    gone = {"type": "function", "function": {"name": "gone"}}
    for wrong in (
        {},
        {"mode": "none", "tools": [named]},
        {"tools": []},
        {"tools": [{"type": "function"}]},
        {"tools": [gone]},
        {"tools": [named], "x": 1},
    ):
        with pytest.raises(Refused) as raised:
            chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": wrong})
        assert (raised.value.param or "").startswith("tool_choice.allowed_tools")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("once", (Prompt(text="once"),)),
        ([5, 6], (Prompt(token_ids=(5, 6)),)),
        (["a", "b"], (Prompt(text="a"), Prompt(text="b"))),
        ([[5], [6, 7]], (Prompt(token_ids=(5,)), Prompt(token_ids=(6, 7)))),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[Prompt, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_choices_have_prompts_and_seeds_of_their_own() -> None:
    asked = completion(prompt=["a", "b"], n=2, seed=2**63 - 1)
    assert [asked.prompt(i).text for i in range(asked.answers)] == ["a", "a", "b", "b"]
    assert [asked.seeded(i).seed for i in range(asked.answers)] == [2**63 - 1, 2**63, 2**63 - 1, 2**63]
    assert chat(seed=-1).sampling.seed == 2**64 - 1


HARMLESS: list[dict[str, Any]] = [
    {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
    {"modalities": ["text"]}, {"store": False}, {"metadata": {"a": "b"}}, {"service_tier": "flex"},
    {"safety_identifier": "x"}, {"stop": []}, {"user": {"name": "ann"}},
    {"stop": None}, {"top_k": -1}, {"prediction": None}, {"n": None}, {"parallel_tool_calls": True},
    {"parallel_tool_calls": False}, {"tool_choice": "auto"},
    {"spaces_between_special_tokens": False}, {"cache_prompt": True}, {"priority": 3},
    {"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}, {"stream_options": {}}, {"length_penalty": 1.0},
    {"stream_options": {"include_usage": False}}, {"add_special_tokens": False}, {"include_reasoning": True},
    {"stop": ""}, {"thinking": {"type": "adaptive"}}, {"reasoning": {"summary": "auto", "max_tokens": 9}},
    {"separate_reasoning": True}, {"extra_body": {}}, {"documents": []}, {"detokenize": True}, {"mystery": None},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
]  # fmt: skip


@pytest.mark.parametrize("harmless", HARMLESS)
def test_harmless_fields_are_taken(harmless: dict[str, Any]) -> None:
    stream = harmless.get("stream", False)
    assert chat(**harmless) == replace(chat(), stream=stream, include_usage=stream)


def test_switches_of_reasoning_by_the_names_of_other_apis() -> None:
    assert chat(thinking={"type": "enabled", "budget_tokens": 9}) == chat(enable_thinking=True)
    assert chat(reasoning={"effort": "low"}) == chat(reasoning_effort="low")
    assert chat(reasoning={"enabled": False}) == chat(enable_thinking=False)
    with pytest.raises(Refused, match=r"thinking\.type: must be one of adaptive, disabled, enabled"):
        chat(thinking={"type": "on"})


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "more",
    [
        {"id": "x", "model": "m", "timestamp": 1, "metadata": {}, "weight": 0, "citations": [], "thinking_blocks": []},
        {"content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]},
        {"content": [{"type": "refusal", "refusal": "hello"}]},
    ],
    ids=str,
)
def test_answers_come_back_as_clients_keep_them(more: dict[str, Any]) -> None:
    def asked(**answer: Any) -> GenerationRequest:
        return chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", **answer}])

    assert asked(**more) == asked()


def test_calls_come_back_with_what_others_put_beside_them() -> None:
    def asked(call: dict[str, Any], result: dict[str, Any]) -> GenerationRequest:
        answered = {"role": "assistant", "content": None, "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": "a", "content": "3", **result}
        return chat(messages=[{"role": "user", "content": "hi"}, answered, told], tools=[TOOL])

    theirs = {**CALL, "extra_content": {"google": {}}, "function": {**CALL["function"], "provider_specific_fields": {}}}
    assert asked(theirs, {"status": "success", "is_error": False}) == asked(CALL, {})


def test_an_answer_that_is_all_reasoning_has_no_content() -> None:
    (_, turn) = (
        chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "reasoning": "so"}]).prompts[0].messages
    )
    assert (turn.content, turn.reasoning) == ("", "so")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
# A value of every field that is taken, which makes the request another than without it.
TAKEN: dict[str, Any] = {
    "model": "other", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 5,
    "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "seed": 5, "stop": "x", "stop_token_ids": [5],
    "ignore_eos": True, "logprobs": True, "skip_special_tokens": False,
    "split_special_tokens": True, "prompt_cache_key": "k", "user": "ann",
    "outrider": {"drafts": True}, "messages": [{"role": "user", "content": "other"}], "max_completion_tokens": 5,
    "top_logprobs": 3,
    "prediction": {"type": "content", "content": "x"}, "add_generation_prompt": False, "continue_final_message": True,
    "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "verbosity": "low", "enable_thinking": False,
    "prompt": "other", "echo": True, "best_of": 2, "prompt_logprobs": 0,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": {"type": "null"},
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "include_reasoning": False,
    "thinking": {"type": "disabled"}, "reasoning": {"effort": "low"},
}  # fmt: skip
# What some of them need beside them.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]}, "parallel_tool_calls": {"tools": [TOOL]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (ask, field.name)
        for ask, table in ((chat, CHAT_FIELDS), (completion, COMPLETION_FIELDS))
        for field in table.values()
        if field.use is Use.TAKEN
    ],
)
def test_every_field_that_is_taken_does_something(ask: Any, name: str) -> None:
    value = 3 if (ask, name) == (completion, "logprobs") else TAKEN[name]
    asked = ask(**BESIDE.get(name, {}), **{name: value})
    assert asked != ask(**BESIDE.get(name, {}))


@pytest.mark.parametrize("table", [CHAT_FIELDS, COMPLETION_FIELDS])
def test_every_other_field_is_ignored_or_refused_with_a_reason(table: Any) -> None:
    ask = chat if table is CHAT_FIELDS else completion
    for field in table.values():
        if field.use is Use.IGNORED:
            assert ask(**{field.name: "anything"}) == ask()
        elif field.use is Use.REFUSED:
            for value in field.harmless:
                assert ask(**{field.name: value}) == ask()
            with pytest.raises(Refused) as raised:
                ask(**{field.name: "anything"})
            assert raised.value.message == f"{field.name}: is not supported: {field.note}"
            assert (raised.value.param, raised.value.code) == (field.name, "unsupported_parameter")


def test_the_page_lists_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    assert rendered(page) == page, "run: python tests/page_tables.py docs/gateway.md"
    assert page.count("<!-- fields: ") == len(Use)


@pytest.mark.parametrize(
    ("given", "path", "meant"),
    [
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"temperatur": 0}, "temperatur", "temperature"),
        ({"Stream": True}, "Stream", "stream"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
        ({"outrider": {"draft": True}}, "outrider.draft", "drafts"),
        ({"messages": [{"role": "user", "contents": "x", "content": "x"}]}, "messages[0].contents", "content"),
    ],
)
def test_typing_errors_are_refused_with_what_may_be_meant(given: dict[str, Any], path: str, meant: str) -> None:
    with pytest.raises(Refused) as raised:
        chat(**given)
    meant = path.rpartition(".")[0] + "." * ("." in path) + meant
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, path, "unknown_parameter")
    assert raised.value.message == f"{path}: is no field that is known here; did you mean {meant}?"


def test_nothing_is_guessed_for_a_name_like_no_other() -> None:
    with pytest.raises(Refused) as raised:
        chat(**{"x" * 100_000: 1, "qqq": 1})
    assert "did you mean" not in raised.value.message


def test_template_arguments_have_one_place() -> None:
    asked = chat(reasoning_effort="high", enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert asked.chat_options == ChatOptions(template_arguments={"enable_thinking": False, "reasoning_effort": "high"})
    assert chat().chat_options == ChatOptions()
    assert chat(add_generation_prompt=True).chat_options == ChatOptions(add_generation_prompt=True)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (turn(content="", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**32}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]}, "tool_choice.function.name"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, FORMAT_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, FORMAT_SCHEMA),
        ({"response_format": {"type": "json_object", "other": 1}}, "response_format.other"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"disable_any_whitespace": False}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": _deep(70)}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", "a"]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 65537}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"split_special_tokens": 0}, "split_special_tokens"),
        ({"include_reasoning": 0}, "include_reasoning"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"grammar": "start: \"a\""}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"length_penalty": True}, "length_penalty"),
        ({"store": 0}, "store"),
        ({"prompt": "x"}, "prompt"),
        (turn(content=[{"type": "text", "text": "x", "mood": 1}]), "messages[0].content[0].mood"),
        (turn(content="x", reasoning_content=5), "messages[0].reasoning_content"),
        (turn(content="x", function_call={"name": "f"}), "messages[0].function_call"),
        ({"store": True}, "store"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": "x"}, "prediction"),
        ({"prediction": {"type": "words", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"outrider": True}, "outrider"),
        ({"outrider": {"mode": "magic"}}, "outrider.mode"),
        ({"outrider": {"max_nodes": -1}}, "outrider.max_nodes"),
        ({"outrider": {"other": 1}}, "outrider.other"),
        ({"model": 5}, "model"),
        ({"mystery": 1}, "mystery"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(more: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as raised:
        chat(**more)
    assert raised.value.status == 400
    assert raised.value.param == param
    assert raised.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt"),
        ({"echo": True, "prompt": [5, 6]}, "echo"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"best_of": 5, "prompt": ["a", "b"]}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"tools": [{}]}, "tools"),
    ],
)
def test_refusals_of_completions(more: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as raised:
        completion(**more)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"top_p": 0}, "top_p: must be in (0, 1]"),
        ({"top_p": 2}, "top_p: must be in (0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be in (0, 1e+06]"),
        ({"prompt": 5}, "prompt: must be a text, token ids, or a list of either"),
        ({"prompt": [1.5]}, "prompt[0]: must be a text or a list of token ids"),
        ({"prompt": ["a", 5]}, "prompt[1]: must be a text or a list of token ids"),
        ({"prompt": [5, "a"]}, "prompt[1]: must be a whole number"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: must be in 0..20"),
        ({"stop": 5}, "stop: must be a string or a list"),
        ({"stop": ["a"] * 17}, "stop: has more than 16 entries"),
        ({"guided_choice": []}, "guided_choice: must have 1 to 1024 entries"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]: must be a string"),
        ({"response_format": {}}, "response_format.type: is missing"),
        ({"outrider": {"mode": "x"}}, "outrider.mode: must be one of auto, coupled, greedy, rejection, typical"),
    ],
)
def test_refusals_name_all_that_is_taken(more: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as raised:
        completion(**more)
    assert raised.value.body()["error"]["message"] == message


def test_refusals_of_inputs_name_all_that_is_taken() -> None:
    with pytest.raises(Refused, match="a text or a list of items"):
        responses_request({"model": "tiny", "input": 5}, 8)


def test_best_of_makes_more_answers_than_are_returned() -> None:
    asked = completion(best_of=2, n=2)
    assert (asked.choices, asked.returned_choices, asked.sampling.logprobs) == (2, 0, None)
    asked = completion(best_of=3, n=2, prompt=["a", "b"])
    assert (asked.answers, asked.returned_choices, asked.sampling.logprobs, asked.logprobs) == (6, 2, 0, False)
    assert completion(best_of=1, echo=False, suffix="", logprobs=2).sampling.logprobs == 2


def test_an_echo_with_logprobs_has_those_of_the_prompt() -> None:
    asked = completion(echo=True, logprobs=3, max_tokens=0, prompt=[5, 6])
    assert (asked.sampling.prompt_logprobs, asked.sampling.max_tokens, asked.prompt_only) == (3, 1, True)
    assert asked.speculation.token_texts
    assert completion(echo=True).sampling.prompt_logprobs is None


@pytest.mark.parametrize(("after", "said"), [(0.1, "1"), (1.0, "1"), (1.2, "2"), (30.0, "30")])
def test_a_caller_is_never_told_to_come_back_too_soon(after: float, said: str) -> None:
    refused = refusal(QuotaExceeded("full").after(after), CHAT_NAMES)
    assert (refused.status, refused.headers()["retry-after"]) == (429, said)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([5] * 101, "prompt: the prompt is longer than the context (tokens 101, limit 100)"),
        (
            "ä" * 1601,
            "prompt: the text is longer than the context of 101 tokens: it has 3202 bytes, and more than 3200 are not "
            "read",
        ),
    ],
    ids=["tokens", "bytes"],
)
def test_what_is_too_long_is_told_in_one_unit(prompt: Any, said: str) -> None:
    """Tokens against tokens; bytes against the bytes that the door itself reads at most."""
    with pytest.raises(Refused) as raised:
        completion_request({"model": "m", "prompt": prompt}, 8, 100)
    assert str(raised.value) == said


class Untouched:
    """An element that JSON does not have: whoever looks at it says so."""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt": [Untouched()] * 9}, "more than 8 answers"),
        ({"prompt": [1] + [Untouched()] * 100}, "longer than the context"),
        ({"prompt": [[Untouched()] * 101]}, "longer than the context"),
        ({"prompt": "a" * 3201}, "longer than the context"),
        ({"prompt": ["a", "a" * 3201]}, "longer than the context"),
        ({"stop_token_ids": [Untouched()] * 65}, "more than 64 entries"),
        ({"stop": [Untouched()] * 17}, "more than 16 entries"),
        ({"logit_bias": {Untouched(): 1 for _ in range(1025)}}, "more than 1024 entries"),
    ],
)
def test_lengths_are_checked_before_elements(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said) as raised:
        completion_request({"model": "m", "prompt": "once", **more}, 8, 100)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([Untouched()] * 4097, "1 to 4096 entries"),
        ([{"role": "user", "content": [Untouched()] * 4097}], "more than 4096 entries"),
        ([{"role": "user", "content": "a" * 1700}] * 2, "longer than the context"),
    ],
)
def test_lengths_of_conversations_are_checked_before_elements(messages: list[Any], said: str) -> None:
    with pytest.raises(Refused, match=said) as raised:
        chat_request({"model": "m", "messages": messages}, 8, 100)
    assert raised.value.status == 400 and raised.value.param is not None


@pytest.mark.parametrize(
    ("request_of", "body"),
    [
        (chat_request, {"messages": [{"role": "user", "content": "a"}]}),
        (messages_request, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        (responses_request, {"input": "a"}),
    ],
    ids=["chat", "messages", "responses"],
)
def test_tools_are_counted_before_they_are_looked_at(request_of: Any, body: dict[str, Any]) -> None:
    """A million empty ones had taken a thread for 80 seconds."""
    with pytest.raises(Refused, match="more than 128 entries"):
        request_of({"model": "m", **body, "tools": [Untouched()] * 129}, 8, 100)


def test_allowed_tools_are_counted_before_they_are_looked_at() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [Untouched()] * 129}
    with pytest.raises(Refused, match="more than 128 entries"):
        responses_request({"model": "m", "input": "a", "tools": [], "tool_choice": choice}, 8, 100)


@pytest.mark.parametrize("more", [{"model": "m" * 5000}, {"prompt_cache_key": "k" * 5000}])
def test_names_are_bounded(more: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="more than 4096 characters"):
        chat(**more)


def test_what_a_template_is_given_is_bounded_before_it_is_made_a_message() -> None:
    assert chat(chat_template_kwargs={"a": "b" * 10_000}).chat_options.template_arguments
    with pytest.raises(Refused, match="more than 16384 bytes"):
        chat(chat_template_kwargs={"a": [0] * 100_000})
    deep: Any = 0
    for _ in range(500):
        deep = [deep]
    with pytest.raises(Refused, match="chat_template_kwargs"):
        chat(chat_template_kwargs={"a": deep})


SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "é"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"null"},"a":{"const":"é"}}}'


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput(json_schema=SCHEMA_TEXT),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"guided_json": SCHEMA_TEXT}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choices=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput(choices=("a",))),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": False}},
            StructuredOutput(json_object=True, free_whitespace=True),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            StructuredOutput(json_schema=SCHEMA_TEXT),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": {}}, None),
    ],
)
def test_forms_of_answers(body: dict[str, Any], form: StructuredOutput | None) -> None:
    assert chat(**body).sampling.structured_output == form
    assert completion(**body).sampling.structured_output == form


def test_a_form_that_the_target_refuses_has_the_name_of_the_body() -> None:
    body = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    error = InvalidField("sampling.structured_output.json_schema", "cannot be compiled: why")
    assert refusal(error, chat(response_format=body).fields).param == FORMAT_SCHEMA
    error = InvalidField("sampling.structured_output.regex", "cannot be compiled: why")
    assert refusal(error, completion(guided_regex="a").fields).message == "guided_regex: cannot be compiled: why"
