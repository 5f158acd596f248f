"""OpenEngine's Generate over a real socket and a scripted engine: what comes, in which order, and how it ends."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import grpc
import pytest
from generation import answers, asking
from openengine_calls import calling, generate_request, outputs_of, refusal
from scripted_engine import END_TOKEN, SERVED, VOCABULARY, ScriptedEngine
from spans import PARENT, Recorder, check
from waits import HUNG_SECONDS, until

from outrider.errors import QuotaExceeded, SequenceExists, Unauthenticated, UnknownModel, UnknownSequence
from outrider.limits import TenantLimits, TenantTable
from outrider.openengine import openengine_pb2 as pb
from outrider.serving import Authenticator, Caller
from outrider.telemetry.names import OPENENGINE_GENERATE
from target_service.api.admission import Admission
from target_service.core.sequence import PromptLogprobs, SequenceRequest
from target_service.openengine import inference

ACME, OTHER, OPERATOR = "acme-0123456789ab", "other-0123456789ab", "operator-0123456789"
TOKENS = {ACME: Caller("acme"), OTHER: Caller("other"), OPERATOR: Caller("ops", operator=True)}


def bearing(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),)}


class TestAnswers:
    async def test_events_in_order(self, target: Any) -> None:
        request = generate_request(stopping={"max_tokens": 5}, model="counter", extra={"anything": 1})
        said = await outputs_of(target.channel, request)
        assert {response.request_id for response in said.responses} == {"one"}
        assert (said.tokens(), said.ends[0].reason) == ([21, 22, 23, 24, 25], pb.FINISH_REASON_LENGTH)
        usage = said.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 5, 7)
        assert usage.HasField("cached_prompt_tokens") and not usage.HasField("reasoning_tokens")
        assert not any(info.HasField("logprob") or info.token for info in said.infos[0])

    async def test_the_engine_gets_what_targetservice_would_give_it(self, target: Any) -> None:
        sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": 2**63 + 1}
        penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        stopping = {"max_tokens": 3, "min_tokens": 1, "ignore_eos": True}
        stops = {"conditions": [{"stop_token_id": 200}, {"stop_token_id": 201}]}
        logprobs = {"return_output_logprobs": True, "output_candidates": {"top_n": 4}}
        await outputs_of(
            target.channel,
            generate_request(sampling=sampling | penalties, stopping=stopping | stops, response=logprobs),
        )
        same = sampling | penalties | stopping | {"stop_token_ids": [200, 201], "logprobs": 4}
        await answers(target, asking(sampling=same))
        ours, theirs = target.engine.requests
        assert ours == theirs
        assert isinstance(ours, SequenceRequest) and ours.seed == 2**63 + 1

    async def test_defaults_are_targetservices(self, target: Any) -> None:
        await outputs_of(target.channel, generate_request(sampling={"top_k": -1}))
        await answers(target, asking())
        ours, theirs = target.engine.requests
        assert replace(ours, seed=0) == replace(theirs, seed=0)
        assert ours.reuses_pages

    async def test_outputs_have_seeds_of_their_own(self, target: Any) -> None:
        asked = {"num_sequences": 3, "seed": 2**64 - 1, "temperature": 1.0}
        response = {"return_prompt_logprobs": True}
        said = await outputs_of(
            target.channel,
            generate_request(sampling=asked, stopping={"max_tokens": 4}, response=response),
        )
        assert [said.tokens(index) for index in range(3)] == [[21, 22, 23, 24]] * 3
        assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (2, 12)
        assert [request.seed for request in target.engine.requests] == [2**64 - 1, 0, 1]
        # The prompt's log-probabilities are told once.
        assert [request.sampling.prompt_logprobs for request in target.engine.requests] == [0, None, None]

    async def test_pages_of_others_are_passed_over(self, target: Any) -> None:
        await outputs_of(target.channel, generate_request(kv={"bypass_prefix_cache": True, "cache_salt": ""}))
        assert not target.engine.requests[0].reuses_pages

    async def test_log_probabilities(self, target: Any) -> None:
        response = {"return_output_logprobs": True, "output_candidates": {"top_n": 23}}
        code, error = await refusal(target.channel, "Generate", generate_request(response=response))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.metadata["field"] == "response.output_candidates.top_n"
        response["output_candidates"] = {"top_n": 3}
        said = await outputs_of(target.channel, generate_request(0, response=response, stopping={"max_tokens": 2}))
        first, second = said.infos[0]
        assert (first.token_id, first.logprob, first.rank) == (1, -0.5, 2)
        assert [(one.token_id, one.logprob, one.rank) for one in first.candidates] == [
            (0, -1, 1),
            (1, -2, 2),
            (2, -3, 3),
        ]
        assert second.token_id == 2 and second.rank == 3

    async def test_a_token_that_is_no_candidate_has_no_rank(self, target: Any) -> None:
        said = await outputs_of(
            target.channel, generate_request(response={"return_output_logprobs": True}, stopping={"max_tokens": 1})
        )
        (info,) = said.infos[0]
        assert info.logprob == -0.5 and not info.HasField("rank") and not info.candidates

    async def test_fields_of_later_revisions_are_ignored(self, target: Any) -> None:
        # Field 99 as a number, and field 100 as bytes.
        unknown = b"\x98\x06\x07\xa2\x06\x03abc"
        request = generate_request(stopping={"max_tokens": 2}).SerializeToString() + unknown
        assert (await outputs_of(target.channel, request)).tokens() == [21, 22]

    async def test_an_id_is_made_where_none_is_given(self, target: Any) -> None:
        said = [await outputs_of(target.channel, generate_request(request_id="")) for _ in range(2)]
        ids = {response.request_id for one in said for response in one.responses}
        assert len(ids) == 2 and all(ids)


class TestStops:
    async def ended(self, targets: Any, tokenizer: Any, prompt: str, **stopping: Any) -> tuple[str, Any, Any]:
        async with targets(served=replace(SERVED, tokenizer=tokenizer)) as target:
            said = await outputs_of(
                target.channel, generate_request(prompt=prompt, stopping={"max_tokens": 20} | stopping)
            )
            return said.texts[0], said.ends[0], said.tokens()

    @pytest.mark.parametrize(("shows", "text"), [(False, "bcd"), (True, "bcde")])
    async def test_a_token(self, targets: Any, model_tokenizer: Any, shows: bool, text: str) -> None:
        stop = {"conditions": [{"stop_token_id": 3 + ord("e")}], "include_stop_in_output": shows}
        said, end, tokens = await self.ended(targets, model_tokenizer, "a", **stop)
        assert (said, end.reason) == (text, pb.FINISH_REASON_STOP)
        assert end.stop_match.stop_token_id == 3 + ord("e")
        assert tokens == [3 + ord(letter) for letter in "bcde"]

    async def test_the_models_end(self, target: Any) -> None:
        shown = {"include_stop_in_output": True}
        said = await outputs_of(target.channel, generate_request(VOCABULARY - 1, stopping=shown))
        assert said.tokens() == [0, 1, END_TOKEN]
        assert said.ends[0].reason == pb.FINISH_REASON_STOP
        assert said.ends[0].stop_match.eos_token_id == END_TOKEN
        assert said.ends[0].stop_match.WhichOneof("match") == "eos_token_id"


class TestEnds:
    async def test_a_failure_is_the_last_message(self, target: Any) -> None:
        target.engine.paused.set()
        asked = {"sampling": {"num_sequences": 2}, "stopping": {"max_tokens": 9}}
        call = calling(target.channel, "Generate", generate_request(**asked))
        await until(lambda: target.engine.open_sequences == 2)
        target.engine.die(RuntimeError("a bug"))
        responses = [response async for response in call]
        assert await call.code() is grpc.StatusCode.OK
        (last,) = responses
        assert (last.error.code, last.error.retryable, last.error.retry_after_ms) == (
            pb.ERROR_CODE_INTERNAL,
            True,
            1000,
        )
        assert last.error.details["outrider.reason"] == "ENGINE_DEAD"
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 0)
        assert not last.usage.HasField("cached_prompt_tokens")

    async def test_a_cancelled_call_frees_its_request(self, target: Any) -> None:
        call = calling(target.channel, "Generate", generate_request(sampling={"num_sequences": 3}))
        await call.read()
        call.cancel()
        await target.idle()
        # Its id is free again.
        assert (await outputs_of(target.channel, generate_request(stopping={"max_tokens": 1}))).tokens() == [21]

    async def test_a_place_that_is_missing_refuses_the_whole(self, targets: Any) -> None:
        engine = ScriptedEngine(max_sequences=2)
        engine.paused.set()
        async with targets(engine) as target:
            request = generate_request(sampling={"num_sequences": 3})
            code, error = await refusal(target.channel, "Generate", request)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(error, QuotaExceeded)
            await target.idle()
            assert engine.cancelled == [1, 2]


class TestAborts:
    async def aborted(self, target: Any, token: str = "", **fields: Any) -> Any:
        return await calling(target.channel, "Abort", pb.AbortRequest(**fields), **(bearing(token) if token else {}))

    async def test_in_the_middle(self, target: Any) -> None:
        target.engine.pause_after(3)
        call = calling(target.channel, "Generate", generate_request(sampling={"num_sequences": 2}))
        stream = aiter(call)
        said = [await anext(stream) for _ in range(2)]
        await until(target.engine.paused.is_set)
        answer = await self.aborted(target, request_id="one")
        assert answer.status == pb.ABORT_STATUS_ABORTED
        assert target.engine.open_sequences == 0
        said += [response async for response in stream]
        assert await call.code() is grpc.StatusCode.OK
        ends = [response.finished for response in said if response.WhichOneof("event") == "finished"]
        assert [(end.output_index, end.reason) for end in ends] == [
            (0, pb.FINISH_REASON_CANCELLED),
            (1, pb.FINISH_REASON_CANCELLED),
        ]
        heard = sum(len(response.token.tokens) for response in said)
        assert said[-1].usage.completion_tokens == heard and heard >= 2
        again = await self.aborted(target, request_id="one")
        assert again.status == pb.ABORT_STATUS_ALREADY_FINISHED

    async def test_before_it_is_accepted(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As while its text is read: it ends as soon as it begins."""
        goes_on, admitted = asyncio.Event(), Admission.generation
        waits = asyncio.Event()

        async def generation(*arguments: Any) -> Any:
            waits.set()
            await goes_on.wait()
            return await admitted(*arguments)

        monkeypatch.setattr(Admission, "generation", generation)
        target.engine.paused.set()
        call = calling(target.channel, "Generate", generate_request())
        stream = aiter(call)
        first = asyncio.ensure_future(anext(stream))
        await waits.wait()
        assert (await self.aborted(target, request_id="one")).status == pb.ABORT_STATUS_ABORTED
        goes_on.set()
        assert (await first).finished.reason == pb.FINISH_REASON_CANCELLED
        assert [one async for one in stream] == []
        await target.idle()

    async def test_what_is_not_known(self, target: Any) -> None:
        code, error = await refusal(target.channel, "Abort", pb.AbortRequest(request_id="none"))
        assert code is grpc.StatusCode.NOT_FOUND and isinstance(error, UnknownSequence)
        for wrong in (pb.AbortRequest(), pb.AbortRequest(kv_session={"session_id": "x"})):
            assert (await refusal(target.channel, "Abort", wrong))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert (await self.aborted(target, all_requests={})).status == pb.ABORT_STATUS_ALREADY_FINISHED

    async def test_a_refused_request_was_never_there(self, target: Any) -> None:
        await refusal(target.channel, "Generate", generate_request(model="another"))
        assert (await refusal(target.channel, "Abort", pb.AbortRequest(request_id="one")))[
            1
        ].reason == "UNKNOWN_SEQUENCE"

    async def test_an_id_runs_once_in_each_tenant(self, targets: Any) -> None:
        engine = ScriptedEngine()
        engine.paused.set()
        async with targets(engine, authenticator=Authenticator(TOKENS)) as target:
            request = generate_request()
            calls = [calling(target.channel, "Generate", request, **bearing(token)) for token in (ACME, OTHER)]
            await until(lambda: engine.open_sequences == 2)
            code, error = await refusal(target.channel, "Generate", request, **bearing(ACME))
            assert code is grpc.StatusCode.ALREADY_EXISTS and isinstance(error, SequenceExists)
            # Only its own is ended.
            await self.aborted(target, ACME, request_id="one")
            assert [engine.requests[one - 1].tenant for one in engine.cancelled] == ["acme"]
            for call in calls:
                call.cancel()

    @pytest.mark.parametrize(("token", "count"), [(ACME, 1), (OPERATOR, 2)])
    async def test_all_are_the_tenants_or_an_operators(self, targets: Any, token: str, count: int) -> None:
        engine = ScriptedEngine()
        engine.paused.set()
        async with targets(engine, authenticator=Authenticator(TOKENS)) as target:
            calls = [calling(target.channel, "Generate", generate_request(), **bearing(one)) for one in (ACME, OTHER)]
            await until(lambda: engine.open_sequences == 2)
            await self.aborted(target, token, all_requests={})
            assert engine.open_sequences == 2 - count
            for call in calls:
                call.cancel()

    async def test_another_tenants_is_not_found(self, targets: Any) -> None:
        engine = ScriptedEngine()
        engine.paused.set()
        async with targets(engine, authenticator=Authenticator(TOKENS)) as target:
            call = calling(target.channel, "Generate", generate_request(), **bearing(OTHER))
            await until(lambda: engine.open_sequences == 1)
            request = pb.AbortRequest(request_id="one")
            code, _ = await refusal(target.channel, "Abort", request, **bearing(ACME))
            assert code is grpc.StatusCode.NOT_FOUND and engine.open_sequences == 1
            call.cancel()


class TestRules:
    async def test_callers_need_their_tokens(self, targets: Any) -> None:
        async with targets(authenticator=Authenticator(TOKENS)) as target:
            for method in ("Generate", "GetServerInfo", "Health", "Abort", "Drain"):
                code, error = await refusal(target.channel, method, b"")
                assert code is grpc.StatusCode.UNAUTHENTICATED and isinstance(error, Unauthenticated)

    async def test_each_output_counts_in_the_tenants_limits(self, targets: Any) -> None:
        table = TenantTable(TenantLimits(streams=2, requests_per_second=0.001, burst=4))
        async with targets(table=table) as target:
            many = generate_request(sampling={"num_sequences": 3}, stopping={"max_tokens": 1})
            code, error = await refusal(target.channel, "Generate", many)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "streams" in error.message
            two = generate_request(sampling={"num_sequences": 2}, stopping={"max_tokens": 1})
            for _ in range(2):
                await outputs_of(target.channel, two)
            code, error = await refusal(target.channel, "Generate", two)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "requests a second" in error.message

    async def test_a_draining_target_refuses(self, target: Any) -> None:
        target.engine.drain()
        code, error = await refusal(target.channel, "Generate", generate_request())
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")

    async def test_another_model_is_not_found(self, target: Any) -> None:
        code, error = await refusal(target.channel, "Generate", generate_request(model="another"))
        assert code is grpc.StatusCode.NOT_FOUND and isinstance(error, UnknownModel)

    async def test_each_output_has_its_span(self, targets: Any) -> None:
        recorder = Recorder()
        async with targets(tracing=recorder.tracing) as target:
            asked = {"sampling": {"num_sequences": 2}, "stopping": {"max_tokens": 3}}
            await outputs_of(target.channel, generate_request(**asked), metadata=(("traceparent", PARENT),))
            engine = target.engine
        spans = recorder.named(OPENENGINE_GENERATE)
        assert len(spans) == 2
        for span in spans:
            check(span)
            assert span.parent is not None and f"{span.parent.span_id:016x}" in PARENT
            assert (span.attributes or {})["gen_ai.usage.output_tokens"] == 3
        assert len({request.traceparent for request in engine.requests}) == 2


async def test_a_prompts_log_probabilities_come_in_one_message(targets: Any, model_tokenizer: Any) -> None:
    """Of all its tokens, with scores from where they are asked for."""

    class Scoring(ScriptedEngine):
        def _step(self, sequence_id: int) -> Any:
            begins = self._live[sequence_id].step == 0
            events = super()._step(sequence_id)
            if not begins:
                return events
            scored = array("f", [-1, -2]).tobytes(), array("i", [98, 7, 99, 7]).tobytes()
            tops = array("f", [-1, -3, -2, -3]).tobytes()
            first = PromptLogprobs(sequence_id, 0, 3, *scored, tops, 2)
            second = PromptLogprobs(
                sequence_id, 3, 1, array("f", [-4]).tobytes(), array("i", [5, 6]).tobytes(), tops[:8], 2
            )
            return [first, second, *events]

    async with targets(Scoring(), replace(SERVED, tokenizer=model_tokenizer)) as target:
        response = {"return_prompt_logprobs": True, "prompt_candidates": {"top_n": 2}, "prompt_logprob_start": 2}
        said = await outputs_of(
            target.channel, generate_request(97, 98, 99, 100, response=response, stopping={"max_tokens": 2})
        )
    assert [info.token_id for info in said.prompt] == [97, 98, 99, 100]
    assert [info.HasField("logprob") for info in said.prompt] == [False, False, True, True]
    assert [info.token for info in said.prompt] == [chr(97 - 3 + place) for place in range(4)]
    third, fourth = said.prompt[2:]
    assert (third.logprob, third.rank) == (-2, 1) and not fourth.HasField("rank")
    assert [(one.token_id, one.logprob) for one in third.candidates] == [(99, -2), (7, -3)]
    assert [one.rank for one in fourth.candidates] == [1, 2] and fourth.logprob == -4


async def test_a_reader_that_is_too_slow_is_told_so(targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "UNREAD_STEPS", 4)
    engine = ScriptedEngine(tick=0.0)
    async with targets(engine, replace(SERVED, max_context=1 << 20)) as target:
        # What gRPC buffers for the reader is much more than these steps.
        asked = {"sampling": {"num_sequences": 8}, "stopping": {"max_tokens": 1 << 19}}
        call = calling(target.channel, "Generate", generate_request(**asked))
        async with asyncio.timeout(HUNG_SECONDS):
            await target.idle()
        last = [response async for response in call][-1]
        assert last.error.code == pb.ERROR_CODE_OVERLOADED and last.error.retryable
