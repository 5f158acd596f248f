"""A target and a draft that answer from a script, on real servers with the services' own plumbing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from google.rpc import status_pb2
from waits import HUNG_SECONDS
from warm_python import warm_python

from outrider import errors
from outrider.serving import Authenticator, Caller, GrpcServer, Service, ServingOptions, current_tenant
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, tree_pb2
from outrider.wire.trees import DRAFT_REFUSED_KEY, status_of

TARGET = "outrider.v1.TargetService"
DRAFT = "outrider.v1.DraftService"
WORDS = ("one", " two", " three", " four", " five", " six", " seven", " eight")
DRAFTED_PER_STEP = 2
_IMPORTED = ("outrider_client.cli.commands", "outrider_client.client", "grpc.aio", "rich.console", "rich.live")


@dataclass
class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Says its words in turn, token i being word i; with speculation, three tokens a step of which two were drafted."""

    dtype: str = "float32"
    drafter: str = "trie"
    model: str = "scripted"
    words: tuple[str, ...] = WORDS
    # What a target says beyond the first version of the contract.
    more_info: dict[str, Any] = field(default_factory=dict)
    # Replaces the tokens that speculative answers hold, for a target that is not lossless.
    lie: Callable[[list[int]], list[int]] = lambda tokens: tokens
    step_seconds: float = 0.0
    requests: list[tuple[target_pb2.GenerateRequest, str, dict[str, str]]] = field(default_factory=list)
    cancelled: int = 0
    updates: list[list[target_pb2.UpdateWeightsRequest]] = field(default_factory=list)
    # Why the draft gave up every request that asks for drafts.
    draft_refused: str = ""
    # Last messages of conversations that are refused.
    refuses: set[str] = field(default_factory=set)
    refusal: str = "the queue is full"
    # How many of the first calls are refused, when each call came, and how long it would wait.
    refusals: int = 0
    # How many questions for what it serves come while it loads.
    loads: int = 0
    # Seconds for which calls are kept open after their last event.
    lingers: float = 0.0
    came: list[float] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    # How many sequences and trees came on Verify streams.
    opens: int = 0
    trees: int = 0
    # The answers of Verify streams wait for it.
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    # Sequences of Verify streams that their clients have closed.
    closed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answering.set()

    def _receive(self, context: Any) -> None:
        self.came.append(time.monotonic())
        self.deadlines.append(context.time_remaining())
        if len(self.came) <= self.refusals:
            raise errors.QuotaExceeded("the queue is full")

    async def Generate(self, request: target_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self._receive(context)
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        self.requests.append((request, current_tenant(), metadata))
        if request.chat.messages and request.chat.messages[-1].content in self.refuses:
            raise errors.QuotaExceeded(self.refusal, waiting=9, limit=8)
        if request.model not in ("", "scripted"):
            raise errors.UnknownModel(f"{request.model} is not served", model=request.model)
        speculating = not request.speculation.HasField("enabled") or request.speculation.enabled
        try:
            await self._write(request, speculating, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _write(self, request: target_pb2.GenerateRequest, speculating: bool, context: Any) -> None:
        await context.write(
            target_pb2.GenerateResponse(
                started=target_pb2.GenerateStarted(
                    sequence_id=7,
                    prompt_tokens=3,
                    seed=11,
                    mode=tree_pb2.VERIFICATION_MODE_GREEDY,
                    speculating=speculating,
                    model="scripted",
                )
            )
        )
        count = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else len(WORDS)
        tokens = [index % len(WORDS) for index in range(count)]
        if speculating:
            tokens = self.lie(tokens)
        width = 1 + DRAFTED_PER_STEP if speculating else 1
        steps = range(0, len(tokens), width)
        for number, start in enumerate(steps):
            await asyncio.sleep(self.step_seconds)
            await context.write(_chunk(self.words, tokens[start : start + width], number, width - 1))
        finished = _finished(len(tokens), len(steps), width - 1)
        if request.speculation.mode == tree_pb2.VERIFICATION_MODE_TYPICAL:
            finished.finished.usage.lossy, finished.finished.usage.lossy_tokens = True, 2
        if speculating and self.draft_refused:
            context.set_trailing_metadata(((DRAFT_REFUSED_KEY, self.draft_refused),))
        await context.write(finished)
        await asyncio.sleep(self.lingers)

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        sequences: dict[int, int] = {}
        async for frame in request_iterator:
            self.opens += frame.HasField("open")
            self.trees += frame.HasField("tree")
            response = self._verify(frame, sequences)
            await self.answering.wait()
            if response is not None:
                await context.write(response)

    def _verify(self, frame: target_pb2.VerifyRequest, sequences: dict[int, int]) -> target_pb2.VerifyResponse | None:
        """Accepts every tree's first chain whole and commits token 5 after it; ends at the third step."""
        kind = frame.WhichOneof("frame")
        if kind == "open":
            if not frame.open.token_ids:
                return _status(errors.InvalidField("open.token_ids", "is empty"), client_tag=frame.open.client_tag)
            sequence_id = len(sequences) + 1
            sequences[sequence_id] = frame.open.token_ids[-1]
            return target_pb2.VerifyResponse(
                opened=target_pb2.VerificationOpened(
                    client_tag=frame.open.client_tag, sequence_id=sequence_id, step=0, seed=3, max_rows=64
                )
            )
        if kind == "close":
            sequences.pop(frame.close.sequence_id, None)
            self.closed.append(frame.close.sequence_id)
            return None
        asked = frame.tree
        if asked.tree.token_ids[0] != sequences.get(asked.sequence_id):
            error = errors.WrongRoot("the tree's root is not the last committed token")
            return _status(error, sequence_id=asked.sequence_id, step=asked.step)
        sequences[asked.sequence_id] = 5
        return target_pb2.VerifyResponse(
            verdict=target_pb2.Verdict(
                sequence_id=asked.sequence_id,
                step=asked.step,
                accepted_rows=range(1, len(asked.tree.token_ids)),
                token_ids=[*asked.tree.token_ids[1:], 5],
                next_step=asked.step + 1,
                finish_reason=target_pb2.FINISH_REASON_LENGTH if asked.step == 2 else 0,
            )
        )

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> Any:  # noqa: ARG002
        self.updates.append([request async for request in request_iterator])
        if self.updates[-1][0].begin.folder == "refused":
            raise errors.PermissionDenied("the token is no operator's")
        return target_pb2.UpdateWeightsResponse(
            model_version=2,
            tensors=290,
            bytes=269_000_000,
            prepare_nanoseconds=2 * 10**9,
            pause_nanoseconds=10**8,
            aborted_sequences=3,
            continued_sequences=4,
        )

    async def GetTargetInfo(  # type: ignore[override]
        self,
        _request: target_pb2.GetTargetInfoRequest,
        context: Any,
    ) -> target_pb2.GetTargetInfoResponse:
        self._receive(context)
        if self.loads > 0:
            self.loads -= 1
            raise errors.Loading("the model is being loaded")
        return target_pb2.GetTargetInfoResponse(
            model=self.model,
            vocabulary_size=len(WORDS),
            max_context=512,
            max_rows=64,
            dtype=self.dtype,
            page_size=16,
            kv_tokens=4096,
            modes=[tree_pb2.VERIFICATION_MODE_GREEDY, tree_pb2.VERIFICATION_MODE_COUPLED],
            drafter=self.drafter,
            end_token_ids=[2],
            version="0",
            **self.more_info,
        )


def _chunk(words: Sequence[str], tokens: Sequence[int], step: int, drafted: int) -> target_pb2.GenerateResponse:
    return target_pb2.GenerateResponse(
        chunk=target_pb2.GenerateChunk(
            token_ids=tokens,
            text="".join(words[token] for token in tokens),
            drafted_tokens=min(drafted, len(tokens)),
            step=step,
        ),
        timings=tree_pb2.Timings(queue_nanoseconds=1, compute_nanoseconds=2),
    )


def _finished(tokens: int, steps: int, drafted: int) -> target_pb2.GenerateResponse:
    return target_pb2.GenerateResponse(
        finished=target_pb2.GenerateFinished(
            finish_reason=target_pb2.FINISH_REASON_LENGTH,
            usage=target_pb2.Usage(prompt_tokens=3, completion_tokens=tokens),
            speculation=target_pb2.SpeculationTotals(
                steps=steps,
                drafted_steps=steps if drafted else 0,
                drafted_tokens=2 * drafted * steps,
                accepted_tokens=drafted * steps,
                drafted_by_depth=[2 * steps] * drafted,
                accepted_by_depth=[steps] * drafted,
            ),
            times=target_pb2.RequestTimes(queue_nanoseconds=10**6, prefill_nanoseconds=10**7, decode_nanoseconds=10**8),
        )
    )


def _status(error: errors.OutriderError, **fields: int) -> target_pb2.VerifyResponse:
    status: status_pb2.Status = status_of(error)
    return target_pb2.VerifyResponse(status=target_pb2.VerificationStatus(status=status, **fields))


@dataclass
class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Counts what it is taught; refuses more than `quota` tokens."""

    quota: int = 10**9
    taught: list[tuple[str, str, int]] = field(default_factory=list)

    async def GetDraftInfo(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        return draft_pb2.GetDraftInfoResponse(
            drafter="trie", limits=draft_pb2.TreeLimits(max_nodes=63, max_depth=12), max_context=8192, version="0"
        )

    async def AddCorpus(self, request_iterator: Any, context: Any) -> Any:  # noqa: ARG002
        tokens, tenant, corpus = 0, "", ""
        async for message in request_iterator:
            tenant, corpus = tenant or message.tenant, corpus or message.corpus
            tokens += len(message.token_ids)
            if tokens > self.quota:
                raise errors.QuotaExceeded("the tenant's corpus quota is used up")
        self.taught.append((tenant, corpus, tokens))
        return draft_pb2.AddCorpusResponse(tokens=tokens, nodes=2 * tokens)

    async def ListCorpora(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        known = [self._described(*each) for each in self.taught if each[1] or each[0] == request.tenant]
        return draft_pb2.ListCorporaResponse(corpora=known)

    async def DeleteCorpus(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        for each in self.taught:
            if each[:2] == (request.tenant, request.corpus):
                self.taught.remove(each)
                return draft_pb2.DeleteCorpusResponse(corpus=self._described(*each))
        raise errors.UnknownCorpus("no corpus of that name was added")

    def _described(self, tenant: str, corpus: str, tokens: int) -> draft_pb2.Corpus:
        return draft_pb2.Corpus(
            corpus=corpus,
            tenant=tenant,
            shared=bool(corpus),
            tokens=tokens,
            documents=1,
            nodes=2 * tokens,
            bytes=2**20,
        )


@dataclass
class Running:
    """A server with its scripts, at `address`."""

    address: str
    target: ScriptedTarget
    draft: ScriptedDraft
    server: GrpcServer


async def serve(
    target: ScriptedTarget,
    draft: ScriptedDraft,
    authenticator: Authenticator,
    listen: str = "127.0.0.1:0",
    only: str = "",
) -> Running:
    """Both services on one port, or `only` the one of this name."""
    services = [
        Service(TARGET, lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)),
        Service(DRAFT, lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)),
    ]
    services = [service for service in services if only in ("", service.name)]
    server = GrpcServer(ServingOptions(listen=listen, authenticator=authenticator), services)
    await server.start()
    server.health.set_serving(True)
    return Running(server.address, target, draft, server)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    """Both services on one port, open to everyone."""
    running = await serve(ScriptedTarget(), ScriptedDraft(), Authenticator())
    yield running
    await running.server.stop(0)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """Starts services as `running`, at an address, with a time that every step takes."""
    async with contextlib.AsyncExitStack() as leave:

        async def start(listen: str = "127.0.0.1:0", step_seconds: float = 0.0) -> Running:
            running = await serve(ScriptedTarget(step_seconds=step_seconds), ScriptedDraft(), Authenticator(), listen)
            leave.push_async_callback(running.server.stop, 0)
            return running

        yield start


@pytest.fixture
async def start_only() -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Starts the target's service alone, or the draft's; gives its address."""
    async with contextlib.AsyncExitStack() as leave:

        async def start(which: str) -> str:
            only = {"target": TARGET, "draft": DRAFT}[which]
            running = await serve(ScriptedTarget(), ScriptedDraft(), Authenticator(), only=only)
            leave.push_async_callback(running.server.stop, 0)
            return running.address

        yield start


@pytest.fixture
async def guarded() -> AsyncIterator[Running]:
    """As `running`, but with a token that belongs to the tenant "acme"."""
    running = await serve(ScriptedTarget(), ScriptedDraft(), Authenticator({"sixteen-letters!": Caller("acme")}))
    yield running
    await running.server.stop(0)


async def _outrider(
    *words: str,
    python: str = sys.executable,
    stdin: str = "",
    environment: dict[str, str] | None = None,
    seconds: float = HUNG_SECONDS,
) -> tuple[int, str, str]:
    """Run the command as a user does. Returns exit status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        "outrider_client.cli",
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "200"} | (environment or {}),
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), seconds)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that starts in a moment, with what clients import."""
    with warm_python(tmp_path_factory.mktemp("python"), os.environ, _IMPORTED) as programs:
        yield str(programs / "python")


@pytest.fixture
def outrider(python: str) -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """The command, run in a process of its own that starts in a moment."""
    return partial(_outrider, python=python)


@pytest.fixture
def start_with() -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """The command, run by the Python that is said."""
    return _outrider
