"""The client for programs without an event loop: the async client, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from outrider.runtime import end_tasks
from outrider.sampling import FinishReason
from outrider.telemetry.tracing import Tracing
from outrider.tree import TokenTree
from outrider_client.client import Client
from outrider_client.connection import Tls
from outrider_client.generation import Generation
from outrider_client.policy import Policy
from outrider_client.results import Chunk, Result, Started, Verdict
from outrider_client.verification import VerifiedSequence, VerifySession

Answer = TypeVar("Answer")
Got = TypeVar("Got")
Given = ParamSpec("Given")
# What a class of the async client is for the class here that stands for it.
Inner = TypeVar("Inner")


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Held to submit work, so that none comes after the loop's end was begun.
        self._submitting = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    def run_coroutine(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine and return its result. An interrupt, such as Ctrl-C, cancels it. Raises `RuntimeError` once
        the loop ends, also for work under way then."""
        with self._submitting:
            if self._ending:
                work.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._ending:
                raise RuntimeError("the client is closed") from None
            raise
        except BaseException:
            future.cancel()
            raise

    def soon(self, work: Callable[[], None]) -> None:
        """Call a function on the loop's thread, without waiting; nothing once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all work, run `last`, and end the loop and its thread. Does nothing the second time."""
        with self._submitting:
            if self._ending:
                return
            self._ending = True
            ended = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        # A loop that stops with tasks leaves the threads that wait for them waiting for ever.
        await end_tasks(*asyncio.all_tasks() - {asyncio.current_task()})
        try:
            if last is not None:
                await last()
        finally:
            await self._loop.shutdown_asyncgens()


class _Facade(ABC, Generic[Inner]):
    """An object of the async client, for threads without a loop. It is closed when a `with` block is left."""

    def __init__(self, loop: _LoopThread, inner: Inner) -> None:
        self._loop = loop
        self._inner = inner

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_in(
    method: Callable[Concatenate[Inner, Given], Got], made: Callable[[_LoopThread, Got], Answer]
) -> Callable[Concatenate[_Facade[Inner], Given], Answer]:
    """A method with the arguments of one of the async client, which returns what is `made` of that one's result."""

    @functools.wraps(method)
    def call(facade: _Facade[Inner], /, *given: Given.args, **named: Given.kwargs) -> Answer:
        return made(facade._loop, method(facade._inner, *given, **named))

    return call


class SyncGeneration(_Facade[Generation]):
    """A running request. Iterate over it for chunks; `result()` reads the rest and returns the totals.

    Leaving a `with` block, `close()`, or dropping it ends the request and frees what it held on the target.
    """

    def __init__(self, loop: _LoopThread, generation: Generation) -> None:
        super().__init__(loop, generation)
        self._chunks = aiter(generation)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = self._loop.run_coroutine(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    @property
    def started(self) -> Started | None:
        """The request as the target accepted it; None until the first event has arrived."""
        return self._inner.started

    @property
    def draft_refused(self) -> str:
        """Why the draft service did not draft for the request, or not to its end; see `Generation`."""
        return self._inner.draft_refused

    def result(self) -> Result:
        """The totals and the whole output, after reading all remaining chunks."""
        return self._loop.run_coroutine(self._inner.result())

    def close(self) -> None:
        """End the request. Does nothing once it has finished."""
        self._loop.soon(self._inner.cancel)

    def __del__(self) -> None:
        # Leaving a loop over the chunks early drops its iterator.
        self.close()

    async def _next(self) -> Chunk | None:
        return await anext(self._chunks, None)


class SyncVerifiedSequence(_Facade[VerifiedSequence]):
    """A sequence that the caller drafts for; see `VerifiedSequence`."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt and everything committed since; the last is the root of the next tree."""
        return self._inner.token_ids

    @property
    def max_rows(self) -> int:
        """How many nodes a tree may have, including the root."""
        return self._inner.max_rows

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it goes on."""
        return self._inner.finish_reason

    def verify(self, tree: TokenTree) -> Verdict:
        """One step: the rows of `tree` that the target accepts, and its own next token."""
        return self._loop.run_coroutine(self._inner.verify(tree))

    def close(self) -> None:
        """End the sequence and free its cache. Does nothing for one that has finished."""
        self._loop.run_coroutine(self._inner.close())


class SyncVerifySession(_Facade[VerifySession]):
    """One `Verify` stream, which carries many sequences. Use it with `with`."""

    open = _as_in(VerifySession.open, lambda loop, opening: SyncVerifiedSequence(loop, loop.run_coroutine(opening)))

    def close(self) -> None:
        """End every open sequence, then the stream."""
        self._loop.run_coroutine(self._inner.close())


class SyncClient(_Facade[Client]):
    """Talks to one target service, from a program without an event loop. Errors are those of `Client`.

    Example:
        with SyncClient.connect("127.0.0.1:50051") as client:
            for chunk in client.chat("What is a bridge?"):
                sys.stdout.write(chunk.text)
    """

    chat = _as_in(Client.chat, SyncGeneration)
    generate = _as_in(Client.generate, SyncGeneration)
    update_weights = _as_in(Client.update_weights, _LoopThread.run_coroutine)
    tokenize = _as_in(Client.tokenize, _LoopThread.run_coroutine)
    detokenize = _as_in(Client.detokenize, _LoopThread.run_coroutine)
    info = _as_in(Client.info, _LoopThread.run_coroutine)
    serving = _as_in(Client.serving, _LoopThread.run_coroutine)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        tls: Tls | None = None,
        token: str = "",
        tenant: str = "",
        tracing: Tracing | None = None,
        policy: Policy | None = None,
    ) -> SyncClient:
        """A client of the target at `address` (HOST:PORT or unix:PATH); arguments as in `Client.connect`."""

        async def made() -> Client:
            return Client.connect(address, tls=tls, token=token, tenant=tenant, tracing=tracing, policy=policy)

        loop = _LoopThread()
        try:
            return cls(loop, loop.run_coroutine(made()))
        except BaseException:
            loop.stop()
            raise

    def verify(self) -> SyncVerifySession:
        """A session in which the caller drafts and the target verifies. Use it with `with`."""

        async def opened() -> VerifySession:
            return self._inner.verify()

        return SyncVerifySession(self._loop, self._loop.run_coroutine(opened()))

    def close(self) -> None:
        """Cancel what runs and close the connection. Does nothing the second time.

        Calls under way in other threads fail with `RuntimeError`, as later calls do.
        """
        self._loop.stop(self._inner.close)
