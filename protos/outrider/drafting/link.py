"""The target's way to a draft service over gRPC: one stream, one frame per engine step, for ever reconnecting.

The link has a thread and an event loop of its own, so that neither a long engine step nor a burst of clients delays
a draft. The engine's calls queue and wake the loop; what the draft says is delivered from the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from outrider.busy_polling import BUSY_POLL_SECONDS, BusyPolling
from outrider.drafting.several import SeveralDrafts
from outrider.drafting.stoppable import StoppableLink
from outrider.drafting.stream import DraftConversation
from outrider.errors import CreditExceeded, DraftUnavailable, InvalidField, OutriderError, WrongVocabulary
from outrider.extensions import find_extension
from outrider.pem import check_authority, check_pair
from outrider.runtime import run, until_first_ends
from outrider.settings import MAX_MESSAGE_BYTES, SettingsError, unreadable
from outrider.unreachable import cause_of
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import info_from_pb
from outrider.wire.frames import DraftEvents, DraftInfo, OpenSequence, SequenceAdvance, SequenceFeatures

INPROCESS_SCHEME = "inprocess:"
LINK_GROUP = "outrider.draft_links"
# What gRPC's poller is given to hand out a cancelled call's last events, once at the end. Chosen, not measured.
_LAST_EVENTS_SECONDS = 0.05


def bearer_metadata(token_file: str) -> tuple[tuple[str, str], ...]:
    """What shows the token in a file with every call; nothing where no file is named.

    Raises `SettingsError` for a file that cannot be read, and for one that holds anything but a token.
    """
    if not token_file:
        return ()
    token = _read(token_file).strip()
    # gRPC carries printable ASCII alone, and would refuse each call with words of its own.
    if not token or any(not 0x21 <= byte < 0x7F for byte in token):
        raise SettingsError(f"{token_file}: is not one token of printable ASCII")
    return (("authorization", f"Bearer {token.decode()}"),)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(unreadable(path, error)) from None


@dataclass(frozen=True)
class ChannelTls:
    """PEM: who signed the draft's certificate, and our own key and certificate, where it asks for one."""

    authority: bytes
    key: bytes = b""
    certificate: bytes = b""

    @classmethod
    def of_files(cls, authority: str, key: str = "", certificate: str = "") -> ChannelTls:
        """From PEM files; key and certificate go together. Raises `SettingsError` for files that cannot be read or
        hold something else."""
        check_authority(authority)
        if not key:
            return cls(_read(authority))
        check_pair(certificate, key)
        return cls(_read(authority), _read(key), _read(certificate))

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key or None, self.certificate or None)


@dataclass(frozen=True)
class LinkOptions:
    """How a link connects, and when it gives a connection up. Times in seconds."""

    # Sent with every call, for example ("authorization", "Bearer ...").
    metadata: tuple[tuple[str, str], ...] = ()
    # None is plaintext.
    tls: ChannelTls | None = None
    min_backoff: float = 0.05
    max_backoff: float = 2.0
    # Between meetings with a draft that sends what it may not; doubled each time, until one does well.
    fault_backoff: float = 1.0
    max_fault_backoff: float = 60.0
    connect_timeout: float = 2.0
    # A draft that owes an answer for so long is stuck, even if its transport still answers pings.
    answer_timeout: float = 5.0
    keepalive: float = 10.0
    ping_timeout: float = 2.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    # Features that may wait for a draft that reads slowly; more are dropped.
    max_waiting_feature_bytes: int = 32 * 1024 * 1024
    # After each frame, of a link that has a process, and so an interpreter, of its own.
    busy_poll_seconds: float = BUSY_POLL_SECONDS
    channel_options: tuple[tuple[str, Any], ...] = field(default=())

    def channel(self, address: str) -> grpc.aio.Channel:
        options = [
            ("grpc.keepalive_time_ms", round(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.ping_timeout * 1000)),
            # Without it a frozen peer is not noticed: its kernel goes on acknowledging.
            ("grpc.http2.ping_timeout_ms", round(self.ping_timeout * 1000)),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Back-off is ours; a subchannel shared with an earlier attempt would bring its own.
            ("grpc.use_local_subchannel_pool", 1),
            *self.channel_options,
        ]
        if self.tls is not None:
            return grpc.aio.secure_channel(address, self.tls.credentials(), options=options)
        return grpc.aio.insecure_channel(address, options=options)


# Connects a target: where events go, its vocabulary's size, and the fingerprint of its tokenizer.
Connect = Callable[[DraftEvents, int, str], StoppableLink]


def connect_draft(
    address: str,
    events: DraftEvents,
    vocabulary_size: int,
    tokenizer_fingerprint: str,
    options: LinkOptions | None = None,
) -> StoppableLink:
    """The link for an address: `HOST:PORT`, `unix:PATH`, several of these with commas between them, or
    `inprocess:DRAFTER`.

    Raises `SettingsError` when there can be none, or when that drafter cannot draft for this target.
    """
    return prepare_draft(address, options)(events, vocabulary_size, tokenizer_fingerprint)


def prepare_draft(address: str, options: LinkOptions | None = None) -> Connect:
    """What connects to an address of `connect_draft`: for a target that has a model to load first, which takes long.

    `inprocess:DRAFTER` is looked up among the entry points of `LINK_GROUP`, so that this package imports no drafters;
    the drafter is made now, and loads what it needs when it is connected.
    Raises `SettingsError` for what can be refused without the target. What it returns raises it for the rest.
    """
    if address.startswith(INPROCESS_SCHEME):
        return _prepare_in_process(address)
    if "," not in address:
        return lambda events, vocabulary_size, fingerprint: GrpcDraftLink(
            address, events, vocabulary_size, fingerprint, options
        )
    every = [one.strip() for one in address.split(",") if one.strip()]
    if len(set(every)) < len(every) or any(one.startswith(INPROCESS_SCHEME) for one in every):
        raise SettingsError(f"{address}: several drafts are services of their own, each named once")

    def connect(events: DraftEvents, vocabulary_size: int, fingerprint: str) -> StoppableLink:
        def connect_one(one: str, member: DraftEvents) -> StoppableLink:
            return GrpcDraftLink(one, member, vocabulary_size, fingerprint, options)

        return SeveralDrafts(every, connect_one, events)

    return connect


def _prepare_in_process(address: str) -> Connect:
    extension: Callable[[str], Connect] | None = find_extension(LINK_GROUP, INPROCESS_SCHEME.rstrip(":"))
    if extension is None:
        raise SettingsError(f"{address}: no draft service is installed in this environment")
    try:
        prepared = extension(address.removeprefix(INPROCESS_SCHEME))
    except OutriderError as error:
        raise SettingsError(f"{address}: {error.message}") from None

    def connect(events: DraftEvents, vocabulary_size: int, fingerprint: str) -> StoppableLink:
        try:
            return prepared(events, vocabulary_size, fingerprint)
        except OutriderError as error:
            raise SettingsError(f"{address}: {error.message}") from None

    return connect


class GrpcDraftLink:
    """A `DraftLink` to a draft service. Calls are thread-safe, return at once, and never raise.

    What is sent while there is no draft is dropped: `on_connected` asks for every live sequence again.
    """

    def __init__(
        self,
        address: str,
        events: DraftEvents,
        vocabulary_size: int,
        tokenizer_fingerprint: str,
        options: LinkOptions | None = None,
    ) -> None:
        """Start connecting. `events` gets the outcome, and every change of it."""
        self._address = address
        self._events = events
        self._vocabulary_size = vocabulary_size
        self._fingerprint = tokenizer_fingerprint
        self._options = options or LinkOptions()
        # What is to be said, and the bytes of features in it.
        self._outbox: deque[tuple[Callable[[DraftConversation], None], int]] = deque()
        # Of features, in all: the first counted by whoever posts, the second by the link's own thread.
        self._bytes_posted = self._bytes_gone = 0
        self._connected = False
        self._last_reason = ""
        self._busy_polling = BusyPolling(0.0)
        # The loop's thread sets these before anyone else reads them.
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        self._stopping: asyncio.Event
        self._cut_off: asyncio.Event
        self._cut_off_for = ""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._main(ready)), name="draft-link", daemon=True)
        self._thread.start()
        ready.wait()

    def open(self, sequence: OpenSequence) -> None:
        self._post(lambda conversation: conversation.open(sequence))

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        size = sum(len(advance.features.data) for advance in advances if advance.features is not None)
        if size and not self._has_room(size):
            advances = [replace(advance, features=None) for advance in advances]
            size = 0
        self._post(lambda conversation: conversation.advance(advances), size)

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        size = sum(len(one.vectors.data) for one in features)
        if self._has_room(size):
            self._post(lambda conversation: conversation.send_features(features), size)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._post(lambda conversation: conversation.close(sequence_ids))

    def cut_off(self, reason: str) -> None:
        """End the conversation, also with a draft that reads nothing, and meet the draft again after a while."""

        def cut() -> None:
            self._cut_off_for = reason
            self._cut_off.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(cut)

    def stop(self) -> None:
        """Leave the draft and end the thread. Nothing is delivered afterwards. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def call_when_readable(self, connection: socket.socket, call: Callable[[], None]) -> None:
        """Have the link's own thread `call` whenever something can be read from a connection: what is read is on its
        way to the draft without waking another thread."""
        self._loop.call_soon_threadsafe(self._loop.add_reader, connection, call)

    def busy_poll(self, seconds: float) -> None:
        """Have the link's thread poll for so long after each frame before it sleeps."""
        self._busy_polling.seconds = seconds

    def _has_room(self, size: int) -> bool:
        """Whether features of so many bytes may wait too. Without them a slow draft accepts less, and keeps up."""
        return self._bytes_posted - self._bytes_gone + size <= self._options.max_waiting_feature_bytes

    def _post(self, command: Callable[[DraftConversation], None], size: int = 0) -> None:
        if not self._connected:
            return
        self._bytes_posted += size
        self._outbox.append((command, size))
        if threading.get_ident() == self._thread.ident:
            # From `call_when_readable`: the loop is running.
            self._wake.set()
            return
        # A closed loop means that the link was stopped meanwhile.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    # The link's own thread from here on.

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._wake, self._stopping = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._cut_off = asyncio.Event()
        ready.set()
        connecting = asyncio.create_task(self._connect_for_ever())
        await self._stopping.wait()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        # gRPC hands the last events of a cancelled call to whichever loop of the process polls first; one that finds
        # this loop closed already would log an error.
        await asyncio.sleep(_LAST_EVENTS_SECONDS)

    async def _connect_for_ever(self) -> None:
        options, backoff = self._options, self._options.min_backoff
        fault_backoff = 0.0
        while True:
            at_fault = False
            conversation = DraftConversation(self._events, self._vocabulary_size)
            try:
                async with options.channel(self._address) as channel:
                    await self._converse(draft_pb2_grpc.DraftServiceStub(channel), conversation)
                reason = "the draft service ended the stream"
            except OutriderError as error:
                reason = error.message
                at_fault = isinstance(error, CreditExceeded | InvalidField)
            except grpc.aio.AioRpcError as error:
                detail = error.details() or ""
                # Services explain themselves; this is gRPC's own.
                own = error.code() is grpc.StatusCode.UNAVAILABLE
                reason = f"{error.code().name}: {cause_of(detail)[0] if own else detail}"
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    reason = f"what answers at {self._address} is no draft service ({reason})"
            except Exception as error:
                # Such as gRPC's own about what it was given. A link that ended here would never say so.
                reason = repr(error)
            self._lost(reason)
            # A draft that had answered is connected to again at once; one that never answers is not hammered.
            # Spread, so that the many targets of a draft that restarts do not come back together.
            backoff = options.min_backoff if conversation.received else min(2 * backoff, options.max_backoff)
            if at_fault:
                fault_backoff = min(max(2 * fault_backoff, options.fault_backoff), options.max_fault_backoff)
            elif conversation.received:
                fault_backoff = 0.0
            await asyncio.sleep(max(backoff, fault_backoff) * random.uniform(0.5, 1.0))

    def _lost(self, reason: str) -> None:
        """Say why there is no draft: when it is lost, and when the reason has changed since."""
        if self._connected or reason != self._last_reason:
            self._connected, self._last_reason = False, reason
            self._events.on_disconnected(reason)

    async def _converse(self, stub: Any, conversation: DraftConversation) -> None:
        """Check who is there, then talk until the stream ends or breaks."""
        options = self._options
        response = await stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(), timeout=options.connect_timeout, metadata=options.metadata
        )
        info = info_from_pb(_readable(response))
        self._check(info)
        conversation.max_context = info.max_context
        call = stub.Propose(metadata=options.metadata)
        while self._outbox:
            self._bytes_gone += self._outbox.popleft()[1]
        self._cut_off.clear()
        self._connected, self._last_reason = True, ""
        self._events.on_connected(info)
        try:
            await until_first_ends(
                self._read(call, conversation),
                self._write(call, conversation),
                self._watch(conversation),
                self._until_cut_off(),
            )
        finally:
            call.cancel()

    def _check(self, info: DraftInfo) -> None:
        if info.vocabulary_size not in (0, self._vocabulary_size):
            raise WrongVocabulary(
                f"the draft's vocabulary has {info.vocabulary_size} tokens, ours {self._vocabulary_size}"
            )
        if info.tokenizer_fingerprint and self._fingerprint not in ("", info.tokenizer_fingerprint):
            raise WrongVocabulary("the draft was made for another tokenizer")

    async def _read(self, call: Any, conversation: DraftConversation) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            conversation.receive(_readable(frame))
            self._busy_polling.start()
            if conversation.outgoing:
                self._wake.set()

    async def _write(self, call: Any, conversation: DraftConversation) -> None:
        try:
            while True:
                size = 0
                while self._outbox:
                    command, more = self._outbox.popleft()
                    command(conversation)
                    size += more
                try:
                    while conversation.outgoing:
                        await call.write(conversation.outgoing.popleft())
                finally:
                    self._bytes_gone += size
                if not self._outbox:
                    await self._wake.wait()
                    self._wake.clear()
                    self._busy_polling.start()
        except asyncio.InvalidStateError:
            # The call is over; its reader has the reason.
            await asyncio.sleep(self._options.answer_timeout)

    async def _watch(self, conversation: DraftConversation) -> None:
        while conversation.silence < self._options.answer_timeout:
            await asyncio.sleep(self._options.answer_timeout / 4)
        raise DraftUnavailable(f"no answer for {self._options.answer_timeout:g} s")

    async def _until_cut_off(self) -> None:
        await self._cut_off.wait()
        raise CreditExceeded(self._cut_off_for)


def _readable(message: Any) -> Any:
    """The message, where gRPC gives None for bytes that are none. Raises `DraftUnavailable` then."""
    if message is None:
        raise DraftUnavailable("the draft sent bytes that are no message")
    return message
