"""OpenEngine's services of a whole target with a draft: what they say is what TargetService says."""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from openengine_calls import calling, generate_request, outputs_of, refusal
from waits import HUNG_SECONDS, until
from whole_target import Service, whole_target

from outrider.openengine import openengine_pb2 as pb
from outrider.v1 import target_pb2
from target_service.lifecycle import EngineWorker
from target_service.openengine.kv_events import batch_of

PROMPT = [10, 20, 30] * 6
# Of a tiny model with random weights: its answers go on and repeat themselves.
FORTY = {"max_tokens": 40, "ignore_eos": True}
SETTINGS = {"openengine": True, "draft": "inprocess:trie", "row_budget": "all", "kv_events": 64}


@pytest.fixture
def running(tiny_model: Any, model_tokenizer: Any, tmp_path: Path) -> Any:
    return partial(whole_target, tiny_model, model_tokenizer, tmp_path)


async def drafted(service: Service) -> None:
    async with asyncio.timeout(HUNG_SECONDS):
        while (await service.stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())).drafter != "trie":
            await asyncio.sleep(0.02)


async def theirs(service: Service, **fields: Any) -> tuple[list[int], str, list[Any], Any]:
    """Tokens, text, log-probabilities and end of TargetService's answer."""
    request = target_pb2.GenerateRequest(**fields)
    tokens, text, logprobs, end = list[int](), "", list[Any](), None
    async for response in service.stub.Generate(request):
        tokens += response.chunk.token_ids
        text += response.chunk.text
        logprobs += response.chunk.logprobs
        end = response.finished
    return tokens, text, logprobs, end


async def test_answers_are_targetservices(running: Any) -> None:
    async with running(**SETTINGS) as service:
        await drafted(service)
        for sampling in (
            {},
            {"temperature": 0.9, "seed": 7},
            {"temperature": 1.3, "seed": 2**64 - 1, "top_k": 9, "top_p": 0.9, "presence_penalty": 0.5},
            {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        ):
            tokens, text, logprobs, end = await theirs(
                service, tokens={"token_ids": PROMPT}, sampling=sampling | FORTY | {"logprobs": 2}
            )
            response = {"return_output_logprobs": True, "output_candidates": {"top_n": 2}}
            request = generate_request(*PROMPT, sampling=sampling, stopping=FORTY, response=response)
            said = await outputs_of(service.channel, request)
            assert (said.tokens(), said.texts[0]) == (tokens, text)
            assert [info.logprob for info in said.infos[0]] == pytest.approx(
                [one.logprob for one in logprobs], abs=1e-5
            )
            assert [[top.token_id for top in info.candidates] for info in said.infos[0]] == [
                [top.token_id for top in one.top] for one in logprobs
            ]
            assert said.usage.prompt_tokens == end.usage.prompt_tokens
            assert said.usage.completion_tokens == end.usage.completion_tokens == 40
            assert said.usage.cached_prompt_tokens == 16


async def test_outputs_of_one_request_are_those_of_several(running: Any) -> None:
    async with running(**SETTINGS) as service:
        await drafted(service)
        seeds = (5, 6, 7)
        alone = [
            await theirs(service, tokens={"token_ids": PROMPT}, sampling=FORTY | {"temperature": 1.0, "seed": seed})
            for seed in seeds
        ]
        sampling = {"num_sequences": 3, "seed": 5, "temperature": 1.0}
        said = await outputs_of(service.channel, generate_request(*PROMPT, sampling=sampling, stopping=FORTY))
        assert [said.tokens(index) for index in range(3)] == [tokens for tokens, _, _, _ in alone]
        assert len({tuple(tokens) for tokens, _, _, _ in alone}) == 3
        assert said.usage.completion_tokens == 120
        await service.pages_free()


async def test_a_stop_string_stays_only_where_it_is_asked_for(running: Any) -> None:
    async with running(**SETTINGS) as service:
        await drafted(service)
        _, text, _, _ = await theirs(service, text="abc", sampling=FORTY)
        stop = text[len(text) // 2 :][:2]
        before = text[: text.index(stop)]
        tokens, cut, _, end = await theirs(service, text="abc", sampling=FORTY | {"stop": [stop]})
        assert (cut, end.stop_string) == (before, stop)
        for shows in (None, False, True):
            shown = {} if shows is None else {"include_stop_in_output": shows}
            stopping = FORTY | {"conditions": [{"stop_text": stop}]} | shown
            said = await outputs_of(service.channel, generate_request(prompt="abc", stopping=stopping))
            assert said.texts[0] == before + (stop if shows else "")
            assert said.tokens() == tokens
            assert said.ends[0].stop_match.stop_text == stop and said.ends[0].reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("guided", "allowed"),
    [
        ({"regex": "[ab]{3}c"}, r"[ab]{3}c"),
        ({"choice": {"choices": ["yes", "no"]}, "backend": "llguidance"}, "yes|no"),
        ({"json_schema": '{"type": "integer", "minimum": 3, "maximum": 8}'}, "[3-8]"),
        ({"json_object": {}}, r"\{.*"),
    ],
)
async def test_forms(running: Any, guided: Any, allowed: str) -> None:
    async with running(**SETTINGS) as service:
        request = generate_request(prompt="a", guided=guided, stopping={"max_tokens": 30})
        said = await outputs_of(service.channel, request)
        assert re.fullmatch(allowed, said.texts[0], re.DOTALL)


async def test_log_probabilities_of_a_prompt(running: Any) -> None:
    async with running(**SETTINGS) as service:
        response = {"return_prompt_logprobs": True, "prompt_candidates": {"top_n": 3}}
        request = generate_request(*PROMPT, response=response, stopping={"max_tokens": 1})
        said = await outputs_of(service.channel, request)
        asked = target_pb2.GenerateRequest(
            tokens={"token_ids": PROMPT}, sampling={"prompt_logprobs": 3, "max_tokens": 1}
        )
        pieces = [one.chunk.prompt_logprobs async for one in service.stub.Generate(asked)]
        expected = [logprob for piece in pieces for logprob in piece.logprobs]
        assert [info.token_id for info in said.prompt] == PROMPT
        assert [info.logprob for info in said.prompt[1:]] == pytest.approx(expected, abs=1e-5)
        tops = [token for piece in pieces for token in piece.top_token_ids]
        assert [one.token_id for info in said.prompt for one in info.candidates] == tops
        assert not said.prompt[0].HasField("logprob")


async def test_pages_of_others_are_passed_over(running: Any) -> None:
    async with running(**SETTINGS) as service:
        said = []
        for bypass in (False, True, False):
            request = generate_request(*PROMPT, stopping=FORTY, kv={"bypass_prefix_cache": bypass})
            said.append(await outputs_of(service.channel, request))
        assert [one.usage.cached_prompt_tokens for one in said] == [0, 0, 16]
        assert said[0].tokens() == said[1].tokens() == said[2].tokens()


async def test_a_cancelled_or_aborted_request_gives_its_pages_back(running: Any) -> None:
    async with running(**SETTINGS) as service:
        service.runner.may_go_on.clear()
        request = generate_request(*PROMPT, stopping={"max_tokens": 200, "ignore_eos": True})
        for ends_it in ("cancel", "abort"):
            service.runner.in_pass.clear()
            call = calling(service.channel, "Generate", request)
            await until(service.runner.in_pass.is_set)
            if ends_it == "cancel":
                call.cancel()
            else:
                await calling(service.channel, "Abort", pb.AbortRequest(request_id="one"))
                (end,) = [response async for response in call]
                assert end.finished.reason == pb.FINISH_REASON_CANCELLED and end.usage.prompt_tokens == len(PROMPT)
            service.runner.may_go_on.set()
            await service.pages_free()
            service.runner.may_go_on.clear()


async def test_events_load_and_drain_of_the_engine(running: Any) -> None:
    async with running(**SETTINGS) as service:
        await outputs_of(service.channel, generate_request(*PROMPT, stopping=FORTY))
        follow = target_pb2.SubscribeKvEventsRequest(from_sequence=1)
        from_first = pb.SubscribeKvEventsRequest(start_sequence_number=1)
        mine = aiter(calling(service.channel, "SubscribeKvEvents", from_first))
        others = service.stub.SubscribeKvEvents(follow)
        stored = 0
        while stored < 3:
            heard, expected = (await anext(mine)).batch, await others.read()
            told = batch_of(expected, pb.STORAGE_MEDIUM_UNSPECIFIED)
            assert (heard.sequence_number, list(heard.events)) == (told.sequence_number, list(told.events))
            stored += sum(len(event.block_stored.block_hashes) for event in heard.events)
        others.cancel()
        load = await calling(service.channel, "GetLoad", pb.GetLoadRequest())
        assert (load.total_kv_blocks, load.running_requests) == (64, 0)
        health = await calling(service.channel, "Health", pb.HealthRequest(include_inference_probe=True))
        assert health.state == pb.HEALTH_STATE_READY and len(health.checks) == 2
        service.runner.may_go_on.clear()
        last = calling(service.channel, "Generate", generate_request(*PROMPT, stopping=FORTY))
        await until(lambda: service.runner.cache.used_pages)
        drain = aiter(calling(service.channel, "Drain", pb.DrainRequest(stop_accepting_new_requests=True)))
        assert (await anext(drain)).in_flight_requests == 1
        code, _ = await refusal(service.channel, "Generate", generate_request(request_id="two"))
        assert code is grpc.StatusCode.UNAVAILABLE
        service.runner.may_go_on.set()
        assert [one.state async for one in drain][-1] == pb.DRAIN_STATE_COMPLETE
        assert [one async for one in last][-1].finished.reason == pb.FINISH_REASON_LENGTH
        # The process goes on until it gets its signal, and does not say that it is healthy.
        health = await calling(service.channel, "Health", pb.HealthRequest())
        assert health.state == pb.HEALTH_STATE_DRAINING and not service.task.done()


async def test_a_drained_target_says_so_once(
    running: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, alive = [0], EngineWorker.alive

    def looked(worker: EngineWorker) -> bool:
        looks[0] += 1
        return alive(worker)

    monkeypatch.setattr(EngineWorker, "alive", looked)
    caplog.set_level(logging.INFO, "outrider.serving.lifecycle")
    async with running(openengine=True) as service:
        request = pb.DrainRequest(stop_accepting_new_requests=True)
        assert [one async for one in calling(service.channel, "Drain", request)][-1].state == pb.DRAIN_STATE_COMPLETE
        caplog.clear()
        enough = looks[0] + 3
        await until(lambda: looks[0] >= enough)
        assert [record.message for record in caplog.records if "health" in record.message] == []


async def test_it_is_served_where_it_is_asked_for(running: Any) -> None:
    async with running() as service:
        for method in ("Generate", "GetServerInfo"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                call = calling(service.channel, method, b"")
                await (call.read() if method == "Generate" else call)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
