"""The SDK against a real server: chunks, results, typed errors, deadlines, cancellation, traces."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waits import HUNG_SECONDS, until

import outrider_client
from outrider import errors
from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2, tree_pb2
from outrider.wire.frames import CorpusInfo
from outrider_client import (
    ChatOptions,
    Client,
    DraftClient,
    FinishReason,
    Policy,
    RunningRequests,
    SamplingParams,
    ServiceUnreachable,
    Speculation,
    SyncClient,
    TokenTree,
    TypicalAcceptance,
    VerificationMode,
    WeightsUpdated,
)


async def test_a_target_that_keeps_the_call_open_is_not_waited_for(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_client.generation._END_SECONDS", 0.2)
    running.target.lingers = 30.0
    async with Client.connect(running.address) as client, asyncio.timeout(HUNG_SECONDS):
        result = await client.generate(text="count").result()
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token", [-1, 2**32])
async def test_token_ids_that_the_contract_cannot_carry(running: Any, token: int) -> None:
    async with Client.connect(running.address) as client:
        with pytest.raises(errors.InvalidField, match=r"tokens\.token_ids"):
            client.generate(token_ids=[1, token])


async def test_chunks_then_result(running: Any) -> None:
    async with Client.connect(running.address) as client:
        generation = client.generate(messages=[("user", "count")], sampling=SamplingParams(max_tokens=7))
        chunks = [chunk async for chunk in generation]
        result = await generation.result()
    assert [chunk.token_ids for chunk in chunks] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [chunk.drafted_tokens for chunk in chunks] == [2, 2, 1]
    assert generation.started is not None
    assert (generation.started.sequence_id, generation.started.mode) == (7, VerificationMode.GREEDY)
    assert result.text == "".join(chunk.text for chunk in chunks)
    assert result.token_ids == tuple(range(7))
    assert result.finish_reason is FinishReason.LENGTH
    assert result.mean_accepted_length == pytest.approx(7 / 3)
    assert 0 < result.time_to_first_token <= result.duration
    assert result.tokens_per_second == pytest.approx(7 / result.duration)


async def test_result_alone_reads_everything(running: Any) -> None:
    async with Client.connect(running.address) as client:
        result = await client.generate(token_ids=[1, 2], speculation=Speculation(enabled=False)).result()
    assert result.speculation.steps == result.completion_tokens == 8
    request, _, _ = running.target.requests[0]
    assert list(request.tokens.token_ids) == [1, 2]
    assert request.speculation.HasField("enabled") and not request.speculation.enabled


async def test_typical_acceptance_is_asked_for_and_told(running: Any) -> None:
    async with Client.connect(running.address) as client:
        for speculation in (
            Speculation(mode=VerificationMode.TYPICAL),
            Speculation(mode=VerificationMode.TYPICAL, typical=TypicalAcceptance(0.2, 0.4)),
            Speculation(),
        ):
            result = await client.generate(token_ids=[1], speculation=speculation).result()
            lossy = speculation.mode is VerificationMode.TYPICAL
            assert (result.lossy, result.lossy_tokens) == ((True, 2) if lossy else (False, 0))
    plain, tuned, other = (request.speculation for request, _, _ in running.target.requests)
    assert plain.mode == tuned.mode == tree_pb2.VERIFICATION_MODE_TYPICAL
    assert not plain.HasField("typical")
    assert (tuned.typical.epsilon, tuned.typical.delta) == (0.2, 0.4)
    assert not other.HasField("typical")


async def test_predictions_are_text_or_token_ids(running: Any) -> None:
    async with Client.connect(running.address) as client:
        for prediction in ("one two", [5, 6], "", None):
            await client.generate(token_ids=[1], prediction=prediction).result()
    text, token_ids, empty, none = (request.prediction for request, _, _ in running.target.requests)
    assert text.text == "one two" and list(token_ids.tokens.token_ids) == [5, 6]
    assert empty.WhichOneof("content") == "text" and none.WhichOneof("content") is None


async def test_a_synchronous_client_predicts_too(running: Any) -> None:
    def ask() -> None:
        with SyncClient.connect(running.address) as client:
            client.generate(token_ids=[1], prediction="one two").result()

    await asyncio.to_thread(ask)
    ((request, _, _),) = running.target.requests
    assert request.prediction.text == "one two"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_ids": "12"}, "token_ids: expected a sequence of whole numbers, got str"),
        ({"token_ids": iter([1])}, "token_ids: expected a sequence of whole numbers, got list_iterator"),
        ({"token_ids": [1.5]}, "token_ids: expected a sequence of whole numbers: 'float'"),
        ({"text": "a", "model": 5}, "model: expected str, got int"),
        ({"text": "a", "timeout": "5"}, "timeout: expected a number, got str"),
        ({"text": "a", "answer_parts": "yes"}, "answer_parts: expected bool, got str"),
        ({"text": "a", "prediction": b"b"}, "prediction: expected str or a sequence of whole numbers, got bytes"),
        ({"text": "a", "prediction": 5}, "prediction: expected a sequence of whole numbers: "),
        ({"text": "\ud800"}, "text: is no text of Unicode"),
        ({"messages": [("user", "\ud800")]}, "chat.messages: is no text of Unicode"),
        ({"text": "a", "sampling": SamplingParams(stop="ab")}, "sampling.stop: expected a tuple of strings, got str"),
        ({"text": "a", "sampling": SamplingParams(max_tokens="3")}, "sampling.max_tokens: 'str' object cannot"),
        ({"text": "a", "sampling": SamplingParams(seed=-1)}, "sampling.seed: Value out of range: -1"),
        ({"text": "a", "sampling": SamplingParams(logit_bias=[1])}, "sampling.logit_bias: "),
    ],
)
async def test_values_of_other_types_are_named(given: dict[str, Any], message: str) -> None:
    """Two letters of a stop string had been two stop strings; protobuf's errors name no argument."""
    async with Client.connect("127.0.0.1:1") as client:
        with pytest.raises((TypeError, errors.InvalidField), match=f"^{re.escape(message)}"):
            client.generate(**given)


async def test_a_string_is_enough(running: Any) -> None:
    async with Client.connect(running.address) as client:
        await client.generate("once").result()
        await client.chat("hi").result()
        await client.chat([("user", "hi")], chat_options=ChatOptions(True, False, {"a": [1]})).result()
        with pytest.raises(TypeError, match=r"^text: expected str, got list; a conversation goes to chat\(\)$"):
            client.generate([{"role": "user", "content": "hi"}])
        with pytest.raises(errors.InvalidField, match=r"^chat.template_arguments: must be an object of JSON$"):
            client.chat("hi", chat_options=ChatOptions(template_arguments={"a": object()}))
        with pytest.raises(TypeError, match=r"^chat_options: expected ChatOptions, got dict$"):
            client.chat("hi", chat_options={"continue_final_message": True})

    def ask() -> None:
        with SyncClient.connect(running.address) as client:
            client.generate("once").result()
            client.chat("hi").result()

    await asyncio.to_thread(ask)
    text, chat, options, *others = (request for request, _, _ in running.target.requests)
    assert text.text == "once"
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("user", "hi")]
    assert options.chat.add_generation_prompt and list(options.chat.template_arguments["a"]) == [1]
    assert others == [text, chat]


def test_the_package_lists_what_it_offers() -> None:
    assert {"Client", "SyncClient", "SamplingParams", *outrider_client.__all__} <= {*dir(outrider_client)}
    assert all(getattr(outrider_client, name) is not None for name in outrider_client.__all__)


@pytest.mark.parametrize("ours", [SyncClient.generate, SyncClient.chat, SyncClient.update_weights, SyncClient.info])
def test_a_synchronous_call_takes_what_the_other_takes(ours: Any) -> None:
    theirs = getattr(Client, ours.__name__)
    assert inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()


@pytest.mark.parametrize(
    "given", [{}, {"text": "a", "token_ids": [1]}, {"messages": []}], ids=["nothing", "two", "empty"]
)
async def test_needs_exactly_one_input(running: Any, given: dict[str, Any]) -> None:
    async with Client.connect(running.address) as client:
        with pytest.raises(errors.InvalidField, match="input"):
            client.generate(**given)


async def test_error_is_typed(running: Any) -> None:
    async with Client.connect(running.address) as client:
        with pytest.raises(errors.UnknownModel) as raised:
            await client.generate(text="x", model="other").result()
    assert raised.value.metadata == {"model": "other"}


async def test_deadline_is_typed(running: Any) -> None:
    running.target.step_seconds = 0.2
    async with Client.connect(running.address) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate(text="x", timeout=0.3).result()


async def test_the_address_of_a_web_page_is_none() -> None:
    with pytest.raises(ValueError, match=r"leave out http:// and write 127\.0\.0\.1:50051$"):
        Client.connect("http://127.0.0.1:50051")
    with pytest.raises(ValueError, match="with TLS"):
        Client.connect("https://models:50051")
    with pytest.raises(ValueError, match="it has no port"):
        DraftClient.connect("localhost")


async def test_nobody_there(unused_tcp_port: int) -> None:
    async with Client.connect(f"127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(ServiceUnreachable, match=str(unused_tcp_port)):
            await client.info()


async def test_leaving_the_block_cancels(running: Any) -> None:
    running.target.step_seconds = 0.05
    async with Client.connect(running.address) as client:
        async with client.generate(text="x", sampling=SamplingParams(max_tokens=1000)) as generation:
            async for _ in generation:
                break
        await until(lambda: running.target.cancelled)
    assert running.target.cancelled == 1


async def test_finished_is_not_a_cancellation(running: Any) -> None:
    async with Client.connect(running.address) as client:
        async with client.generate(text="x") as generation:
            await generation.result()
        await client.info()
    assert running.target.cancelled == 0


async def test_token_and_tenant(guarded: Any) -> None:
    async with Client.connect(guarded.address, token="sixteen-letters!") as client:
        await client.generate(text="x").result()
    assert guarded.target.requests[0][1] == "acme"
    async with Client.connect(guarded.address) as client:
        with pytest.raises(errors.Unauthenticated):
            await client.info()
    async with Client.connect(guarded.address, token="sixteen-letters!", tenant="other") as client:
        with pytest.raises(errors.PermissionDenied):
            await client.generate(text="x").result()


async def test_span_and_traceparent(running: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with Client.connect(running.address, tracing=Tracing(provider)) as client:
        result = await client.generate(text="x").result()
        with pytest.raises(errors.UnknownModel):
            await client.generate(text="x", model="other").result()
    done, failed = exporter.get_finished_spans()
    specification = next(span for span in telemetry.SPANS if span.service == telemetry.CLIENT)
    assert done.name == specification.name
    assert set(done.attributes or ()) | set(failed.attributes or ()) <= set(specification.attributes)
    assert (failed.attributes or {})["error.type"] == "UNKNOWN_MODEL"
    traceparent = running.target.requests[0][2]["traceparent"]
    assert result.trace_id in traceparent and f"{done.context.span_id:016x}" in traceparent


async def test_info_and_health(running: Any) -> None:
    async with Client.connect(running.address) as client, DraftClient.connect(running.address) as draft:
        info = await client.info()
        assert (info.model, info.max_rows, info.modes) == (
            "scripted",
            64,
            (VerificationMode.GREEDY, VerificationMode.COUPLED),
        )
        assert await client.serving(HUNG_SECONDS) and await draft.serving(HUNG_SECONDS)
        assert (await draft.info()).limits.max_nodes == 63
        running.server.health.set_serving(False)
        assert not await client.serving(HUNG_SECONDS)


async def test_corpus_is_sent_in_pieces(running: Any) -> None:
    async with DraftClient.connect(running.address) as draft:
        added = await draft.add_corpus([[1] * 70_000, [2, 3]], tenant="acme", corpus="docs")
        assert (added.tokens, added.nodes) == (70_002, 140_004)
        running.draft.quota = 1
        with pytest.raises(errors.QuotaExceeded):
            await draft.add_corpus([[1, 2]])
    assert running.draft.taught == [("acme", "docs", 70_002)]


@pytest.mark.parametrize(("token_id", "expected"), [(2**40, ValueError), (-1, ValueError), ("one", TypeError)])
async def test_a_corpus_of_anything_but_token_ids_is_an_error(running: Any, token_id: Any, expected: type) -> None:
    async with DraftClient.connect(running.address) as draft:
        with pytest.raises(expected):
            await draft.add_corpus([[1, token_id]])
        assert (await draft.add_corpus([[1]])).tokens == 1


async def test_errors_of_the_documents_are_the_callers(running: Any) -> None:
    def documents() -> Iterator[list[int]]:
        yield [1]
        raise KeyError("no such document")

    async with DraftClient.connect(running.address) as draft:
        with pytest.raises(KeyError, match="no such document"):
            await draft.add_corpus(documents())


async def test_a_cancelled_corpus_is_cancelled(running: Any) -> None:
    """Also when its documents fail at that moment."""

    def documents() -> Iterator[list[int]]:
        adding.cancel()
        raise KeyError("no such document")
        yield []

    async with DraftClient.connect(running.address) as draft:
        adding = asyncio.create_task(draft.add_corpus(documents()))
        with pytest.raises(asyncio.CancelledError):
            await adding


async def test_corpora_are_listed_and_deleted(running: Any) -> None:
    docs = CorpusInfo("docs", "acme", tokens=3, documents=1, nodes=6, bytes=2**20)
    own = CorpusInfo("", "acme", tokens=2, documents=1, nodes=4, bytes=2**20)
    async with DraftClient.connect(running.address) as draft:
        assert await draft.list_corpora() == []
        await draft.add_corpus([[1, 2, 3]], tenant="acme", corpus="docs")
        await draft.add_corpus([[4, 5]], tenant="acme")
        assert await draft.list_corpora(tenant="acme") == [docs, own]
        assert docs.shared and not own.shared
        with pytest.raises(errors.UnknownCorpus):
            await draft.delete_corpus("docs", tenant="other")
        assert await draft.delete_corpus("docs", tenant="acme") == docs
        assert await draft.list_corpora(tenant="acme") == [own]


async def test_verify_session(running: Any) -> None:
    tree = TokenTree((9, 3, 4), (0, 0, 1), (1.0, 1.0, 1.0))
    async with Client.connect(running.address) as client, client.verify() as session:
        sequence = await session.open([1, 9])
        assert (sequence.root, sequence.max_rows) == (9, 64)
        verdict = await sequence.verify(tree)
        assert verdict.token_ids == (3, 4, 5)
        assert sequence.token_ids == [1, 9, 3, 4, 5]
        with pytest.raises(errors.WrongRoot):
            await sequence.verify(tree)
        while sequence.finish_reason is None:
            await sequence.verify(TokenTree.root_only(sequence.root))
        assert (sequence.step, sequence.finish_reason) == (3, FinishReason.LENGTH)


async def test_verify_sessions_sequences_do_not_mix(running: Any) -> None:
    async with Client.connect(running.address) as client, client.verify() as session:
        first, second = await asyncio.gather(session.open([1]), session.open([2]))
        await asyncio.gather(*(s.verify(TokenTree.root_only(s.root)) for s in (first, second)))
        assert (first.token_ids, second.token_ids) == ([1, 5], [2, 5])
        with pytest.raises(errors.InvalidField, match=r"open\.token_ids"):
            await session.open([])


async def test_verify_after_the_target_is_gone(running: Any) -> None:
    async with Client.connect(running.address) as client, client.verify() as session:
        sequence = await session.open([1])
        await running.server.stop(0)
        # Either means to try elsewhere; which it is depends on whether the last word comes before the connection goes.
        with pytest.raises((ServiceUnreachable, errors.Draining)):
            await sequence.verify(TokenTree.root_only(1))
        with pytest.raises((ServiceUnreachable, errors.Draining)):
            await session.open([1])


@pytest.mark.parametrize("ending", ["client", "session", "sequence"])
async def test_closing_ends_the_steps_under_way(running: Any, ending: str) -> None:
    """Also at a target that answers no more."""
    async with Client.connect(running.address) as client, client.verify() as session:
        sequence = await session.open([1])
        running.target.answering.clear()
        step = asyncio.create_task(sequence.verify(TokenTree.root_only(1)))
        await until(lambda: running.target.trees)
        await {"client": client, "session": session, "sequence": sequence}[ending].close()
        with pytest.raises(errors.UnknownSequence if ending == "sequence" else ServiceUnreachable):
            await asyncio.wait_for(step, HUNG_SECONDS)
        running.target.answering.set()


async def test_steps_and_sequences_after_the_client_is_closed(running: Any) -> None:
    client = Client.connect(running.address)
    async with client.verify() as session:
        sequence = await session.open([1])
        await client.close()
        for work in (sequence.verify(TokenTree.root_only(1)), session.open([1]), sequence.close()):
            with pytest.raises(ServiceUnreachable):
                await asyncio.wait_for(work, HUNG_SECONDS)


async def test_the_verdict_of_a_cancelled_step_is_not_the_next_ones(running: Any) -> None:
    async with Client.connect(running.address) as client, client.verify() as session:
        sequence, other = await session.open([1]), await session.open([2])
        running.target.answering.clear()
        step = asyncio.create_task(sequence.verify(TokenTree((1, 3), (0, 0), (1.0, 1.0))))
        await until(lambda: running.target.trees)
        step.cancel()
        await asyncio.wait([step])
        with pytest.raises(RuntimeError, match="one tree at a time"):
            await sequence.verify(TokenTree.root_only(1))
        running.target.answering.set()
        # The target answers in order.
        await other.verify(TokenTree.root_only(2))
        assert (sequence.token_ids, sequence.step) == ([1, 3, 5], 1)
        verdict = await sequence.verify(TokenTree((5, 4), (0, 0), (1.0, 1.0)))
        assert (verdict.step, verdict.token_ids, sequence.token_ids) == (1, (4, 5), [1, 3, 5, 4, 5])


async def test_a_step_cancelled_as_its_frame_is_written_leaves_the_stream(running: Any) -> None:
    async with Client.connect(running.address) as client, client.verify() as session:
        sequences = [await session.open([1]) for _ in range(8)]
        steps = [asyncio.create_task(sequence.verify(TokenTree.root_only(1))) for sequence in sequences]
        for _ in range(3):
            await asyncio.sleep(0)
        for step in steps:
            step.cancel()
        await asyncio.wait(steps)
        other = await session.open([2])
        await other.verify(TokenTree.root_only(2))
        assert [sequence.token_ids for sequence in sequences] == [[1, 5]] * 8


async def test_a_cancelled_open_leaves_nothing_at_the_target(running: Any) -> None:
    async with Client.connect(running.address) as client, client.verify() as session:
        running.target.answering.clear()
        opening = asyncio.create_task(session.open([1]))
        await until(lambda: running.target.opens)
        opening.cancel()
        await asyncio.wait([opening])
        running.target.answering.set()
        kept = await session.open([2])
        await until(lambda: running.target.closed)
        assert (running.target.closed, kept.sequence_id) == ([1], 2)


async def test_calls_that_come_as_the_target_stops_are_to_be_made_elsewhere(running: Any) -> None:
    """gRPC cancels those that reach a server just then; the caller has cancelled nothing, and may try again."""
    failures: list[Exception] = []
    async with Client.connect(running.address, policy=Policy(attempts=1)) as client:

        async def ask() -> None:
            while not failures:
                try:
                    await client.info()
                except (errors.OutriderError, ServiceUnreachable) as error:
                    failures.append(error)

        asking = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0.1)
        await running.server.stop(0)
        await asyncio.wait_for(asyncio.gather(*asking), HUNG_SECONDS)
    for error in failures:
        assert isinstance(error, ServiceUnreachable | errors.Draining), repr(error)


def test_every_public_name_exists() -> None:
    for name in outrider_client.__all__:
        assert getattr(outrider_client, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = outrider_client.nothing


async def test_updates_of_weights(running: Any) -> None:
    async with Client.connect(running.address) as client:
        done = await client.update_weights(files=[b"abc", b"defg"], running=RunningRequests.CONTINUE)
        assert done == WeightsUpdated(2, 290, 269_000_000, 2.0, 0.1, aborted=3, continued=4)
        begin, *pieces = running.target.updates[0]
        assert (list(begin.begin.files.sizes), begin.begin.running) == ([3, 4], target_pb2.RUNNING_REQUESTS_CONTINUE)
        assert [piece.data for piece in pieces] == [b"abc", b"defg"]
        for both_or_neither in ({}, {"folder": "a", "files": [b"b"]}):
            with pytest.raises(errors.InvalidField):
                await client.update_weights(**both_or_neither)
        with pytest.raises(errors.PermissionDenied):
            await client.update_weights(folder="refused")


async def test_an_update_from_a_file_that_cannot_be_read(running: Any, tmp_path: Path) -> None:
    async with Client.connect(running.address) as client:
        with pytest.raises(OSError, match=str(tmp_path)):
            await client.update_weights(files=[tmp_path])


async def test_updates_without_an_event_loop(running: Any) -> None:
    def update() -> int:
        with SyncClient.connect(running.address) as client:
            return client.update_weights(folder="step-1").model_version

    assert await asyncio.to_thread(update) == 2


def test_a_client_needs_no_service() -> None:
    # What only `outrider[target]` and its like bring; the install tests prove it with a wheel, and take minutes.
    absent = ("msgspec", "numpy", "numba", "torch", "transformers", "opentelemetry.sdk", "prometheus_client", "psutil")
    code = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    code += "import outrider_client, outrider_client.cli.app, outrider_client.cli.base"
    subprocess.run([sys.executable, "-c", code], check=True)
