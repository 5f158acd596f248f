"""OpenAI's own Python package against the gateway, before a real target service with a tiny model."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from outrider.sampling import SamplingParams
from outrider_client import Client

MESSAGES: Any = [{"role": "system", "content": "brief"}, {"role": "user", "content": "say something"}]


async def _plainly(address: str, **sampling: Any) -> Any:
    """The same answer over gRPC."""
    async with Client.connect(address) as client:
        pairs = [(turn["role"], turn["content"]) for turn in MESSAGES]
        return await client.generate(messages=pairs, sampling=SamplingParams(**sampling)).result()


async def test_chat_says_what_grpc_says(real: Any, real_target: str, model: str) -> None:
    expected = await _plainly(real_target, max_tokens=40, temperature=0.8, seed=5)
    answer = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=40, temperature=0.8, seed=5
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == expected.completion_tokens
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens_details is None
    assert answer.model == model
    assert answer.system_fingerprint.startswith("outrider-")


async def test_stream_says_the_same(real: Any, real_target: str, model: str) -> None:
    expected = await _plainly(real_target, max_tokens=40)
    stream = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=40, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"outrider": {"drafts": True}},
    )  # fmt: skip
    text, usage, finish, pieces, totals = "", None, None, "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        extra = (chunk.model_extra or {}).get("outrider", {})
        pieces += "".join(piece["text"] for piece in extra.get("pieces", []))
        totals = extra.get("totals", totals)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == pieces == expected.text
    assert finish == "length"
    assert usage is not None and usage.completion_tokens == 40
    assert totals is not None and totals["completion_tokens"] == 40


async def test_drafted_text_is_marked(real: Any, model: str) -> None:
    """A greedy tiny model soon repeats itself, which a trie drafts."""
    stream = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=200, temperature=0, stream=True,
        extra_body={"outrider": {"drafts": True}},
    )  # fmt: skip
    accepted, drafted, totals = 0, "", {}
    async for chunk in stream:
        extra = chunk.model_extra.get("outrider", {})
        accepted += sum(extra.get("accepted_by_step", []))
        drafted += "".join(piece["text"] for piece in extra.get("pieces", []) if piece["drafted"])
        totals = extra.get("totals", totals)
    assert accepted == totals["accepted_tokens"] > 0
    assert drafted
    assert totals["mean_accepted_length"] > 1


async def test_trees_are_told_when_asked_for(real: Any, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 120, "temperature": 0, "stream": True}
    stream = await real.openai.chat.completions.create(
        **asked, extra_body={"outrider": {"drafts": True, "trees": True}}
    )
    drafted, accepted, totals = 0, 0, {}
    async for chunk in stream:
        extra = chunk.model_extra.get("outrider", {})
        totals = extra.get("totals", totals)
        # Several steps in one chunk have one tree.
        if (tree := extra.get("tree")) and len(extra["accepted_by_step"]) == 1:
            path = [tree["tokens"][row] for row in tree["accepted"]]
            assert [tree["parents"][row] for row in tree["accepted"]] == [0, *tree["accepted"][:-1]][: len(path)]
            assert len(path) == extra["accepted_by_step"][0]
            drafted, accepted = drafted + len(tree["tokens"]) - 1, accepted + len(path)
    assert 0 < accepted <= totals["accepted_tokens"]
    assert accepted < drafted <= totals["drafted_tokens"]
    plain = await real.openai.chat.completions.create(**asked, extra_body={"outrider": {"drafts": True}})
    assert not ["tree" async for chunk in plain if "tree" in chunk.model_extra.get("outrider", {})]
    with pytest.raises(openai.BadRequestError) as caught:
        await real.openai.chat.completions.create(**asked, extra_body={"outrider": {"trees": True}})
    assert caught.value.param == "outrider.trees"


async def test_seeded_choices_differ_and_repeat(real: Any, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3}
    first = await real.openai.chat.completions.create(**asked)
    again = await real.openai.chat.completions.create(**asked)
    said = [choice.message.content for choice in first.choices]
    assert said == [choice.message.content for choice in again.choices]
    assert len(set(said)) == 3


async def test_stop_string_is_not_part_of_the_text(real: Any, real_target: str, model: str) -> None:
    whole = (await _plainly(real_target, max_tokens=40)).text
    stop = whole[10:12]
    answer = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=40, temperature=0, stop=stop
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == whole[: whole.index(stop)]


async def test_logit_bias_decides(real: Any, model: str) -> None:
    answer = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=3, temperature=0, logit_bias={str(3 + ord("z")): 100}
    )
    assert answer.choices[0].message.content == "zzz"


async def test_penalties_change_what_is_said(real: Any, real_target: str, model: str) -> None:
    plain = await _plainly(real_target, max_tokens=60)
    expected = await _plainly(real_target, max_tokens=60, presence_penalty=2.0, frequency_penalty=2.0)
    answer = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=60, temperature=0, presence_penalty=2.0, frequency_penalty=2.0
    )
    assert answer.choices[0].message.content == expected.text != plain.text


async def test_logprobs_name_tokens(real: Any, real_target: str, model: str) -> None:
    expected = await _plainly(real_target, max_tokens=8, logprobs=2)
    answer = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    ascii_only = [entry for entry in content if entry.token.isascii()]
    assert ascii_only and all(entry.bytes == list(entry.token.encode()) for entry in ascii_only)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob <= entry.top_logprobs[0].logprob + 1e-6 for entry in content)
    assert len(expected.token_ids) == 8


async def test_completions_and_their_logprobs(real: Any, model: str) -> None:
    answer = await real.openai.completions.create(
        model=model, prompt=["once", [4, 5, 6]], max_tokens=6, temperature=0, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        lists = choice.logprobs
        assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == 6
        assert lists.text_offset[0] == 0
    assert answer.usage.prompt_tokens == len("once") + 3


async def test_a_prediction_is_counted_and_changes_nothing(real: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    plain = await real.openai.chat.completions.create(**asked)
    said = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None
    # The model's text may hold bytes that are no text, which this vocabulary has no token for.
    for expected in (said.replace("\ufffd", ""), "nothing of the kind"):
        answer = await real.openai.chat.completions.create(**asked, prediction={"type": "content", "content": expected})
        assert answer.choices[0].message.content == said
        details = answer.usage.completion_tokens_details
        assert min(details.accepted_prediction_tokens, details.rejected_prediction_tokens) >= 0


async def test_models_and_errors(real: Any, model: str) -> None:
    assert [entry.id async for entry in real.openai.models.list()] == [model]
    assert (await real.openai.models.retrieve(model)).id == model
    with pytest.raises(openai.NotFoundError) as missing:
        await real.openai.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await real.openai.chat.completions.create(model=model, messages=MESSAGES, tools=[{"type": "function"}])
    assert refused.value.param == "tools[0].function"


async def test_stream_can_be_left(real: Any, model: str) -> None:
    stream = await real.openai.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=400, temperature=0, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await real.idle()
