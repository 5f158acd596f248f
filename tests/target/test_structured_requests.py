"""Requests for a form of output, from the call to the engine: what is refused, who waits, and who does not."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from conftest import make_tiny
from engine_harness import engine_config, request
from scripted_engine import SERVED
from scripted_service import model_tokenizer
from structured_forms import VOCABULARY, trained_tokenizer
from waits import HUNG_SECONDS, wait_until

from benchmarks.shared.loaded_models import runner_for
from outrider.errors import InvalidField
from outrider.sampling import FinishReason, SamplingParams
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire.trees import error_of_rpc, sampling_from_pb, sampling_to_pb
from target_service.api import structured
from target_service.core.sequence import SequenceEvent, SequenceFailed, SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.engine import Engine

END = 2
YES = StructuredOutput(choices=("yes",))


def asked(form: StructuredOutput | None, **more: Any) -> SequenceRequest:
    sampling = SamplingParams(structured_output=form, ignore_eos=form is None)
    return request((5, 9), 8, sampling=sampling, **more)


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput(json_schema="{}", free_whitespace=True),
        StructuredOutput(json_object=True),
        StructuredOutput(regex="a"),
        StructuredOutput(choices=("a", "é")),
        StructuredOutput(grammar="start: 'a'"),
    ],
    ids=lambda form: form.form,
)
def test_forms_cross_the_wire(form: StructuredOutput) -> None:
    params = SamplingParams(structured_output=form)
    assert sampling_from_pb(sampling_to_pb(params), 100) == params


class TestEngine:
    """The engine's thread compiles nothing: a sequence joins the others when its grammar is there."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        model = make_tiny(vocab_size=VOCABULARY, eos_token_id=END)
        runner = runner_for(model, trained_tokenizer(), num_pages=128, page_size=16)
        engine = Engine(runner, engine_config())
        self.events: queue.Queue[SequenceEvent] = queue.Queue()
        engine.start(lambda batch: [self.events.put(event) for event in batch] and None)
        yield engine
        engine.stop()

    @pytest.fixture
    def held(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Compiling waits until this is set."""
        release, constrain = threading.Event(), engine._loop.constrain

        def wait_first(live: Any) -> None:
            if live.sequence.request.sampling.structured_output is not None:
                assert release.wait(HUNG_SECONDS)
            constrain(live)

        monkeypatch.setattr(engine._loop, "constrain", wait_first)
        return release

    def last(self, sequence_id: int) -> tuple[list[int], SequenceEvent]:
        """What a sequence said, and its last event. Events of others are dropped."""
        said: list[int] = []
        while True:
            event = self.events.get(timeout=HUNG_SECONDS)
            if event.sequence_id == sequence_id:
                if not isinstance(event, StepVerdict):
                    return said, event
                said += event.token_ids

    def test_others_run_while_a_grammar_is_compiled(self, engine: Engine, held: threading.Event) -> None:
        first = engine.submit(asked(YES))
        second = engine.submit(asked(None))
        assert isinstance(self.last(second)[1], SequenceFinished)
        assert engine.snapshot().sequences == 1
        held.set()
        said, event = self.last(first)
        assert isinstance(event, SequenceFinished)
        assert event.finish.reason is FinishReason.END_OF_SEQUENCE
        assert trained_tokenizer().decode(said[:-1]) == "yes"

    def test_a_request_may_be_cancelled_meanwhile(self, engine: Engine, held: threading.Event) -> None:
        engine.cancel(engine.submit(asked(YES)))
        wait_until(lambda: engine.snapshot().sequences == 0)
        held.set()
        assert isinstance(self.last(engine.submit(asked(YES)))[1], SequenceFinished)
        assert not engine._compiling

    def test_a_form_that_the_compiler_refuses_fails_its_request_alone(self, engine: Engine) -> None:
        _, event = self.last(engine.submit(asked(StructuredOutput(regex="("))))
        assert isinstance(event, SequenceFailed)
        assert isinstance(event.error, InvalidField)
        assert event.error.field == "sampling.structured_output.regex"
        assert isinstance(self.last(engine.submit(asked(None)))[1], SequenceFinished)

    def test_a_bug_in_the_compiler_fails_its_request_alone(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine._loop, "constrain", lambda _: 1 / 0)
        assert isinstance(self.last(engine.submit(asked(YES)))[1], SequenceFailed)
        assert isinstance(self.last(engine.submit(asked(None)))[1], SequenceFinished)

    def test_a_clients_tree_may_come_before_the_grammar(self, engine: Engine, held: threading.Event) -> None:
        sequence_id = engine.submit(asked(YES, external=True, speculate=False))
        token = trained_tokenizer().encode("yes")[0]
        wrong = token + 1
        engine.verify(sequence_id, TokenTree((9, wrong, token, END, 7), (0, 0, 0, 2, 3), (1.0,) * 5))
        held.set()
        verdict = self.events.get(timeout=HUNG_SECONDS)
        assert isinstance(verdict, StepVerdict)
        assert verdict.accepted_rows == (2, 3)
        assert verdict.token_ids == (token, END)
        assert isinstance(self.last(sequence_id)[1], SequenceFinished)


SERVED_TEXT = replace(SERVED, tokenizer=model_tokenizer())


def generate(form: dict[str, Any], **sampling: Any) -> pb.GenerateRequest:
    output = tree_pb2.StructuredOutput(**form)
    params = tree_pb2.SamplingParameters(structured_output=output, max_tokens=4, **sampling)
    return pb.GenerateRequest(text="abc", sampling=params)


async def refusal(target: Any, asked_for: pb.GenerateRequest) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in target.stub.Generate(asked_for):
            pass
    return error_of_rpc(raised.value)


_FORM = "sampling.structured_output"
_DEEP = '{"a":' * 5000 + "1" + "}" * 5000
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {}, _FORM, "exactly one"),
    ({"regex": "("}, {}, f"{_FORM}.regex", "unclosed group"),
    ({"regex": "a(?=b)"}, {}, f"{_FORM}.regex", "look-around"),
    ({"regex": ""}, {}, f"{_FORM}.regex", "1 to 65536 bytes"),
    ({"json_schema": "{"}, {}, f"{_FORM}.json_schema", "is not JSON"),
    ({"json_schema": "[]"}, {}, f"{_FORM}.json_schema", "JSON object"),
    ({"json_schema": '{"type": "strin"}'}, {}, f"{_FORM}.json_schema", "strin"),
    ({"json_schema": '{"not": {}}'}, {}, f"{_FORM}.json_schema", "not"),
    ({"json_schema": '{"$ref": "http://x/y"}'}, {}, f"{_FORM}.json_schema", "retriev"),
    ({"json_schema": _DEEP}, {}, f"{_FORM}.json_schema", "levels deep"),
    ({"grammar": "start: x"}, {}, f"{_FORM}.grammar", "unknown name"),
    ({"choices": {"texts": ["a", "a"]}}, {}, f"{_FORM}.choices", "different"),
    ({"regex": "a", "free_whitespace": True}, {}, f"{_FORM}.free_whitespace", "JSON"),
    ({"regex": "a"}, {"ignore_eos": True}, "sampling.ignore_eos", "structured_output"),
]


class TestService:
    async def test_bad_forms_are_refused_with_field_and_reason(self, targets: Any) -> None:
        async with targets(served=SERVED_TEXT) as target:
            for form, more, field, reason in REFUSED:
                error = await refusal(target, generate(form, **more))
                assert isinstance(error, InvalidField), form
                assert error.field == field
                assert reason in error.problem
                assert "\n" not in error.problem
            await target.idle()

    async def test_forms_need_a_tokenizer(self, targets: Any) -> None:
        async with targets() as target:
            params = tree_pb2.SamplingParameters(structured_output=tree_pb2.StructuredOutput(regex="a"))
            asked_for = pb.GenerateRequest(tokens=pb.TokenInput(token_ids=[5]), sampling=params)
            error = await refusal(target, asked_for)
            assert (error.reason, "tokenizer" in error.message) == ("NOT_SUPPORTED", True)

    async def test_forms_need_an_end_token(self, targets: Any) -> None:
        async with targets(served=replace(SERVED_TEXT, end_token_ids=())) as target:
            error = await refusal(target, generate({"regex": "a"}))
            assert (error.reason, "end token" in error.message) == ("NOT_SUPPORTED", True)

    async def test_compiling_has_a_limit_and_holds_up_nobody(
        self, targets: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = 0.0
        monkeypatch.setattr(structured, "processor_clock", lambda: lambda: used)
        release = hold_stuck(monkeypatch)
        async with targets(served=SERVED_TEXT) as target:
            used = structured.COMPILE_SECONDS
            error = await refusal(target, generate({"regex": "stuck"}))
            assert error.field == "sampling.structured_output.regex"
            assert "within" in error.problem
            # Its thread is busy still, and another compiles.
            used = 0.0
            events = [event async for event in target.stub.Generate(generate({"regex": "b+"}))]
            assert events[-1].HasField("finished")
            release.set()

    async def test_time_of_other_programs_does_not_count(self, targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = 0

        def unused() -> float:
            nonlocal looks
            looks += 1
            if looks == 3:
                release.set()
            return 0.0

        monkeypatch.setattr(structured, "processor_clock", lambda: unused)
        monkeypatch.setattr(structured.FormCompiler, "seconds", 0.01)
        release = hold_stuck(monkeypatch)
        async with targets(served=SERVED_TEXT) as target:
            events = [event async for event in target.stub.Generate(generate({"regex": "stuck"}))]
            assert events[-1].HasField("finished")
            assert looks >= 3

    def test_a_processor_clock_is_that_of_its_thread(self) -> None:
        clocks, release = queue.SimpleQueue[Callable[[], float]](), threading.Event()

        def wait() -> None:
            clocks.put(structured.processor_clock())
            release.wait(HUNG_SECONDS)

        waiting = threading.Thread(target=wait)
        waiting.start()
        theirs, own = clocks.get(timeout=HUNG_SECONDS), structured.processor_clock()
        before = theirs()
        while own() < 0.05:
            pass
        used = theirs() - before
        release.set()
        waiting.join(HUNG_SECONDS)
        assert used < own()

    async def test_verification_refuses_them_too(self, targets: Any) -> None:
        async with targets(served=SERVED_TEXT) as target:
            params = tree_pb2.SamplingParameters(structured_output=tree_pb2.StructuredOutput(regex="("))
            call = target.stub.Verify()
            await call.write(pb.VerifyRequest(open=pb.OpenVerification(client_tag=7, token_ids=[5], sampling=params)))
            answer = await call.read()
            await call.done_writing()
            assert answer.status.client_tag == 7
            assert "open.sampling.structured_output.regex" in answer.status.status.message
            assert await call.read() == grpc.aio.EOF


def hold_stuck(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the compiling of the regular expression "stuck" until the event is set."""
    release, check = threading.Event(), structured.Grammars.check

    def held(self: Any, form: StructuredOutput, *rest: Any) -> Any:
        assert form.regex != "stuck" or release.wait(HUNG_SECONDS)
        return check(self, form, *rest)

    monkeypatch.setattr(structured.Grammars, "check", held)
    return release


def test_a_schema_is_checked_before_it_is_read() -> None:
    StructuredOutput(json_schema=json.dumps({"a": [[]] * 100})).check()
    nested: dict[str, Any] = {}
    for _ in range(63):
        nested = {"a": nested}
    StructuredOutput(json_schema=json.dumps(nested)).check()
    with pytest.raises(InvalidField, match="levels deep"):
        StructuredOutput(json_schema=json.dumps({"a": {"a": nested}})).check()
    with pytest.raises(InvalidField, match="bytes"):
        StructuredOutput(json_schema=json.dumps({"a": "x" * 65536})).check()
