"""Text in and text out of Generate, with a tokenizer of single bytes: "a" is continued with "bcd"."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from scripted_engine import SERVED
from scripted_service import CONFIG
from waits import HUNG_SECONDS

from outrider.errors import InvalidField
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import error_of_rpc
from target_service.text.tokenizer import ModelTokenizer


@pytest.fixture
async def target(targets: Any, model_tokenizer: Any) -> AsyncIterator[Any]:
    async with targets(served=replace(SERVED, tokenizer=model_tokenizer)) as running:
        # Most tokens have a message of their own; a reader that lags gets several in one.
        running.engine.tick = 0.03
        yield running


async def spoken(target: Any, **fields: Any) -> tuple[list[str], pb.GenerateFinished]:
    """The text of each chunk, and how it ended."""
    responses = [response async for response in target.stub.Generate(pb.GenerateRequest(**fields))]
    texts = [response.chunk.text for response in responses if response.HasField("chunk")]
    return texts, responses[-1].finished


def chat(*turns: tuple[str, str]) -> pb.ChatInput:
    return pb.ChatInput(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def prompt_text(target: Any, tokenizer: Any) -> str:
    return str(tokenizer.decode(target.engine.requests[-1].token_ids))


async def test_text_in_and_out(target: Any, model_tokenizer: Any) -> None:
    texts, finished = await spoken(target, text="xa", sampling={"max_tokens": 4})
    assert "".join(texts) == "bcde"
    assert prompt_text(target, model_tokenizer) == "xa"
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 4)


@pytest.mark.parametrize("asked", [{"text": "aé"}, {"chat": chat(("user", "é"))}], ids=["text", "chat"])
async def test_text_that_only_the_tokenizer_knows(targets: Any, model_tokenizer: Any, asked: dict[str, Any]) -> None:
    """Its tokens went to the engine, which looked them up in the model and died."""
    async with targets(served=replace(SERVED, tokenizer=model_tokenizer, vocabulary_size=150)) as target:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await spoken(target, sampling={"max_tokens": 1}, **asked)
        error = error_of_rpc(caught.value)
        assert isinstance(error, InvalidField) and "outside the model's vocabulary" in error.message
        assert target.engine.requests == []


async def test_text_in_other_alphabets(target: Any, model_tokenizer: Any) -> None:
    await spoken(target, text="naïve 漢字 🙂", sampling={"max_tokens": 1})
    assert prompt_text(target, model_tokenizer) == "naïve 漢字 🙂"


async def test_chat_goes_through_the_template(target: Any, model_tokenizer: Any) -> None:
    turns = chat(("system", "be brief"), ("user", "hi"), ("assistant", "yes"), ("user", "go"))
    texts, _ = await spoken(target, chat=turns, sampling={"max_tokens": 2})
    assert prompt_text(target, model_tokenizer) == "[system]be brief[user]hi[assistant]yes[user]go[assistant]"
    assert "".join(texts) == "^_"


async def test_the_last_message_is_continued(target: Any, model_tokenizer: Any) -> None:
    turns = chat(("user", "hi"), ("assistant", "ye"))
    turns.continue_final_message = True
    await spoken(target, chat=turns, sampling={"max_tokens": 1})
    assert prompt_text(target, model_tokenizer) == "[user]hi[assistant]ye"


async def test_a_message_that_the_template_does_not_show_cannot_be_continued(
    targets: Any, model_tokenizer: Any
) -> None:
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    tokenizer = ModelTokenizer(model_tokenizer.backend, chat_template=shouting)
    turns = chat(("user", "hi"), ("assistant", "ye"))
    turns.continue_final_message = True
    async with targets(served=replace(SERVED, tokenizer=tokenizer)) as target:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await spoken(target, chat=turns)
    error = error_of_rpc(caught.value)
    assert isinstance(error, InvalidField) and error.field == "chat.continue_final_message"


async def test_the_template_reads_its_arguments(targets: Any, model_tokenizer: Any) -> None:
    no = "{% if enable_thinking is false %}|no{% endif %}"
    template = "{{ messages[0].content }}" + no + "|{{ budget }}|{{ lists.a[0] }}"
    tokenizer = ModelTokenizer(model_tokenizer.backend, chat_template=template)
    turns = chat(("user", "hi"))
    turns.template_arguments.update({"enable_thinking": False, "budget": 512, "lists": {"a": [1.5]}, "unread": None})
    async with targets(served=replace(SERVED, tokenizer=tokenizer)) as target:
        await spoken(target, chat=turns, sampling={"max_tokens": 1})
        assert prompt_text(target, tokenizer) == "hi|no|512|1.5"
        for taken in ("messages", "tools", "eos_token", "tokenize", "chat_template", "raise_exception"):
            turns = chat(("user", "hi"))
            turns.template_arguments.update({taken: "x"})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await spoken(target, chat=turns)
            error = error_of_rpc(caught.value)
            assert isinstance(error, InvalidField) and error.field == f"chat.template_arguments.{taken}"
        for number in (math.inf, math.nan):
            turns = chat(("user", "hi"))
            turns.template_arguments.update({"budget": {"of": [number]}})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await spoken(target, chat=turns)
            error = error_of_rpc(caught.value)
            assert isinstance(error, InvalidField) and error.field == "chat.template_arguments"


@pytest.mark.parametrize(("shown", "text"), [(False, "\0"), (True, "<s></s>\0")])
async def test_special_tokens_are_part_of_the_text_when_asked_for(target: Any, shown: bool, text: str) -> None:
    asked = {"tokens": {"token_ids": [0]}, "sampling": {"max_tokens": 3, "ignore_eos": True}}
    texts, _ = await spoken(target, show_special_tokens=shown, **asked)
    assert "".join(texts) == text


async def test_stop_string_is_cut_and_its_beginning_held_back(target: Any) -> None:
    """The scripted engine does not look for stop strings, so the text ends where the string begins and stays so."""
    texts, _ = await spoken(target, text="a", sampling={"max_tokens": 8, "stop": ["efg"]})
    assert "".join(texts) == "bcd"


async def test_held_back_text_comes_when_it_was_no_stop_string(target: Any) -> None:
    texts, _ = await spoken(target, text="a", sampling={"max_tokens": 6, "stop": ["efx", "g!"]})
    assert "".join(texts) == "bcdefg"
    # No beginning of a stop string goes out before it is known to be none.
    assert all("bcd".startswith(before) for before in itertools.accumulate(texts[:-1]))


async def test_stop_token_has_no_text(target: Any, model_tokenizer: Any) -> None:
    stop = model_tokenizer.encode("d")
    texts, finished = await spoken(target, text="a", sampling={"stop_token_ids": stop})
    assert "".join(texts) == "bc"
    assert finished.stop_token_id == stop[0]


async def test_bytes_of_no_character_come_with_the_end(target: Any) -> None:
    """The counter walks into bytes that make no character; nothing is lost, and nothing breaks."""
    texts, finished = await spoken(target, text="\x7e", sampling={"max_tokens": 4})
    text = "".join(texts)
    assert text[0] == "\x7f" and "\ufffd" in text[1:]
    assert finished.usage.completion_tokens == 4


async def test_long_text_is_refused_without_holding_up_others(target: Any) -> None:
    long = asyncio.create_task(spoken(target, text="word " * 100_000))
    texts, _ = await spoken(target, text="a", sampling={"max_tokens": 2})
    # In one message or in two, as the loop gets to it.
    assert "".join(texts) == "bc"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await long
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_template_that_refuses_tells_no_content(target: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await spoken(target, chat=chat(("user", "secret words"), ("system", "late")))
    error = error_of_rpc(caught.value)
    assert isinstance(error, InvalidField)
    assert error.field == "chat.messages"
    assert "secret" not in str(caught.value.details())
    assert "system must be first" in error.message


async def test_model_without_a_template(targets: Any, model_tokenizer: Any) -> None:
    plain = ModelTokenizer(model_tokenizer.backend)
    async with targets(served=replace(SERVED, tokenizer=plain)) as target:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await spoken(target, chat=chat(("user", "hi")))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_request_is_a_line_in_the_log(
    targets: Any, model_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Finished, refused, and cancelled: who, how much, how long; and no text."""
    served = replace(SERVED, tokenizer=model_tokenizer)
    async with targets(served=served, config=replace(CONFIG, log_requests=True)) as target:
        with caplog.at_level("INFO", "target_service.telemetry.request_log"):
            await spoken(target, text="opensesame", sampling={"max_tokens": 3})
            with pytest.raises(grpc.aio.AioRpcError):
                await spoken(target, text="opensesame", sampling={"temperature": -1})
            target.engine.tick = 0.001
            call = target.stub.Generate(pb.GenerateRequest(text="opensesame", sampling={"ignore_eos": True}))
            async for response in call:
                if response.HasField("chunk"):
                    break
            call.cancel()
            async with asyncio.timeout(HUNG_SECONDS):
                while len(lines := requests_of(caplog)) < 3:
                    await asyncio.sleep(0.01)
    done, refused, cancelled = lines
    assert (done["call"], done["tenant"], done["outcome"]) == ("Generate", "default", "length")
    assert (done["prompt_tokens"], done["tokens"], done["steps"], done["drafted"]) == ("10", "3", "3", "0.000")
    assert int(done["id"]) > 0 and all(float(done[f"{name}_ms"]) >= 0 for name in ("queue", "prefill", "decode"))
    assert (refused["outcome"], refused["tokens"], refused["id"]) == ("invalid_field", "0", "0")
    assert (cancelled["outcome"], cancelled["prompt_tokens"]) == ("cancelled", "10") and int(cancelled["tokens"]) > 0
    assert "opensesame" not in caplog.text


def requests_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """What each line of a request says."""
    name = "target_service.telemetry.request_log"
    lines = [record.getMessage() for record in caplog.records if record.name == name]
    return [dict(word.split("=", 1) for word in line.split()[1:]) for line in lines]


async def test_logs_hold_no_prompt(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        await spoken(target, text="opensesame", sampling={"max_tokens": 3})
        with pytest.raises(grpc.aio.AioRpcError):
            await spoken(target, text="opensesame", sampling={"temperature": -1})
    assert "opensesame" not in caplog.text


async def test_a_predicted_text_is_tokenised_as_it_stands(target: Any, model_tokenizer: Any) -> None:
    limits = {"max_tokens": 2}
    await spoken(target, text="a", prediction=pb.Prediction(text="bcd"), sampling=limits)
    assert target.engine.requests[-1].prediction == tuple(model_tokenizer.encode("bcd"))
    await spoken(target, text="a", prediction=pb.Prediction(tokens=pb.TokenInput(token_ids=[5, 6])), sampling=limits)
    assert target.engine.requests[-1].prediction == (5, 6)
    for nothing in (pb.Prediction(), pb.Prediction(text=""), pb.Prediction(tokens=pb.TokenInput())):
        await spoken(target, text="a", prediction=nothing, sampling=limits)
        assert target.engine.requests[-1].prediction == ()


async def test_a_prediction_is_left_out_where_speculation_is_not_wanted(target: Any) -> None:
    for options in ({"enabled": False}, {"max_nodes": 0}):
        await spoken(
            target, text="a", prediction=pb.Prediction(text="bcd"), speculation=options, sampling={"max_tokens": 2}
        )
        assert target.engine.requests[-1].prediction == ()


async def test_tokens_are_those_that_generate_reads(target: Any) -> None:
    turns = chat(("user", "hé"))
    for asked in ({"text": "hé<s>"}, {"text": "hé<s>", "special_tokens": False}, {"chat": turns}):
        found = await target.stub.Tokenize(pb.TokenizeRequest(token_texts=True, **asked))
        await spoken(target, sampling={"max_tokens": 1}, **asked)
        assert tuple(found.token_ids) == target.engine.requests[-1].token_ids
        texts = {token_id: text.text for token_id, text in found.token_texts.items()}
        text = b"".join(texts[token_id] for token_id in found.token_ids)
        assert (await target.stub.Detokenize(pb.DetokenizeRequest(token_ids=found.token_ids))).text == text.decode()
    assert (await target.stub.Detokenize(pb.DetokenizeRequest())).text == ""


@pytest.mark.parametrize(
    ("call", "request_of", "reason"),
    [
        ("Tokenize", pb.TokenizeRequest(), "INVALID_FIELD"),
        ("Tokenize", pb.TokenizeRequest(text="a", model="another"), "UNKNOWN_MODEL"),
        ("Tokenize", pb.TokenizeRequest(text="a" * 20000), "POSITION_OUT_OF_RANGE"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5, 10**6]), "INVALID_FIELD"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5] * 20000), "POSITION_OUT_OF_RANGE"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5], model="another"), "UNKNOWN_MODEL"),
    ],
)
async def test_tokens_that_are_refused(target: Any, call: str, request_of: Any, reason: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(target.stub, call)(request_of)
    assert error_of_rpc(caught.value).reason == reason
