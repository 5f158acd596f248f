"""The target's connection to a draft service over gRPC: one stream, one frame per engine step, always reconnecting.

The link has its own thread and event loop, so that neither a long engine step nor a burst of clients delays a draft.
The engine's calls queue and wake the loop; frames of the draft are delivered from the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from outrider.addresses import proxy_options
from outrider.busy_polling import BUSY_POLL_SECONDS, BusyPolling
from outrider.drafting.events import Connected, Disconnected, DraftEvents
from outrider.drafting.listed import FILE_SCHEME, ListedDrafts, listed_addresses
from outrider.drafting.several import SeveralDrafts
from outrider.drafting.stream import DraftConversation
from outrider.errors import CreditExceeded, DraftUnavailable, InvalidField, OutriderError, WrongVocabulary
from outrider.extensions import find_extension
from outrider.pem import check_authority, check_pair
from outrider.runtime import run, until_first_ends
from outrider.settings import MAX_MESSAGE_BYTES, SettingsError, comma_words, read_bytes
from outrider.unreachable import cause_of
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import info_from_pb
from outrider.wire.frames import DraftInfo, OpenSequence, SequenceAdvance, SequenceFeatures, StoppableLink

INPROCESS_SCHEME = "inprocess:"
# A drafter that the target's own passes run: there is no link to it.
IN_PASS_SCHEME = "inpass:"
# Those of them that also draft where passes are not captured, on a CPU.
_IN_EAGER_PASSES = ("assistant",)
LINK_GROUP = "outrider.draft_links"


def bearer_metadata(token_file: str) -> tuple[tuple[str, str], ...]:
    """The metadata of every call that carries the token in a file; empty without a file. Raises `SettingsError` for a
    file that cannot be read or holds anything but one token."""
    if not token_file:
        return ()
    token = read_bytes(token_file).strip()
    # gRPC carries only printable ASCII, and would refuse each call with a less clear error.
    if not token or any(not 0x21 <= byte < 0x7F for byte in token):
        raise SettingsError(f"{token_file}: is not one token of printable ASCII")
    return (("authorization", f"Bearer {token.decode()}"),)


@dataclass(frozen=True)
class ChannelTls:
    """PEM: the authority of the draft's certificate, and our own key and certificate where the draft requires one."""

    authority: bytes
    key: bytes = b""
    certificate: bytes = b""

    @classmethod
    def of_files(cls, authority: str, key: str = "", certificate: str = "") -> ChannelTls:
        """Read PEM files; key and certificate go together. Raises `SettingsError` for unreadable or wrong files."""
        check_authority(authority)
        if not key:
            return cls(read_bytes(authority))
        check_pair(certificate, key)
        return cls(read_bytes(authority), read_bytes(key), read_bytes(certificate))

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key or None, self.certificate or None)


@dataclass(frozen=True)
class LinkOptions:
    """How a link connects, and when it closes a connection. Times in seconds."""

    metadata: tuple[tuple[str, str], ...] = ()  # sent with every call, for example ("authorization", "Bearer ...")
    tls: ChannelTls | None = None  # None is plaintext
    min_backoff: float = 0.05
    max_backoff: float = 2.0
    # Before connecting again to a draft that broke the protocol; doubled each time, until a stream goes well.
    fault_backoff: float = 1.0
    max_fault_backoff: float = 60.0
    connect_timeout: float = 2.0
    # A draft whose answer is overdue by more is stuck, even if its transport still answers pings.
    answer_timeout: float = 5.0
    keepalive: float = 10.0
    ping_timeout: float = 2.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_waiting_feature_bytes: int = 32 * 1024 * 1024  # of features that wait for a slow draft; more are dropped
    busy_poll_seconds: float = BUSY_POLL_SECONDS  # after each frame, for a link in its own process

    def channel(self, address: str) -> grpc.aio.Channel:
        options = [
            ("grpc.keepalive_time_ms", round(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.ping_timeout * 1000)),
            # Without it a frozen peer is not noticed: its kernel still acknowledges.
            ("grpc.http2.ping_timeout_ms", round(self.ping_timeout * 1000)),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # We do the backoff; a subchannel shared with an earlier attempt would add gRPC's.
            ("grpc.use_local_subchannel_pool", 1),
            *proxy_options(address),
        ]
        if self.tls is not None:
            return grpc.aio.secure_channel(address, self.tls.credentials(), options=options)
        return grpc.aio.insecure_channel(address, options=options)


USUAL = LinkOptions()
# Connects a target, given the receiver of events, its vocabulary size and its tokenizer's fingerprint.
Connect = Callable[[DraftEvents, int, str], StoppableLink]


def connect_draft(
    address: str, events: DraftEvents, vocabulary_size: int, fingerprint: str, options: LinkOptions = USUAL
) -> StoppableLink:
    """The link for an address: `HOST:PORT`, `unix:PATH`, several of these with commas between them, `file:PATH` for the
    addresses in a file, or `inprocess:DRAFTER`, with the drafter's flags behind its name. Raises `SettingsError` for a
    wrong address, or a drafter that cannot draft for this target."""
    return prepare_draft(address, options)(events, vocabulary_size, fingerprint)


def prepare_draft(address: str, options: LinkOptions = USUAL) -> Connect:
    """A function that connects to an address of `connect_draft`, for a target that has a model to load first. A drafter
    in this process is found through the entry points of `LINK_GROUP`, so that this package imports none; it is made
    now, and loads its weights when it is connected. Raises `SettingsError` for what can be refused without the target;
    the function raises it for the rest."""
    if address.startswith(INPROCESS_SCHEME):
        return _prepare_in_process(address)
    if address.startswith(FILE_SCHEME):
        path = Path(address.removeprefix(FILE_SCHEME))
        # Refused now rather than behind the loading of a model.
        listed_addresses(path)
        return _prepare_several(partial(ListedDrafts, path), options)
    if "," not in address:
        return partial(GrpcDraftLink, address, options=options)
    addresses = comma_words(address)
    if len(set(addresses)) < len(addresses) or any(part.startswith(INPROCESS_SCHEME) for part in addresses):
        raise SettingsError(f"{address}: several drafts are services of their own, each named once")
    return _prepare_several(partial(SeveralDrafts, addresses), options)


def prepare_in_pass(address: str, model: str) -> Callable[[Any], Any]:
    """The function that loads the drafter of an `inpass:` address for a target, a `tree_models.in_pass.MakeDrafter`,
    found as drafters in this process are. `model` is the target as `--model` names it. Raises `SettingsError` for what
    can be refused without the target."""
    prepared: Callable[[Any], Any] = _made_here(IN_PASS_SCHEME, address, model)
    return prepared


def runs_in_eager_passes(address: str) -> bool:
    """Whether the drafter of an `inpass:` address also drafts on a CPU, whose passes are not captured."""
    named = address.removeprefix(IN_PASS_SCHEME).split(maxsplit=1)
    return named[:1] != [] and named[0] in _IN_EAGER_PASSES


def _prepare_several(drafts: Callable[..., StoppableLink], options: LinkOptions) -> Connect:
    def connect(events: DraftEvents, vocabulary_size: int, fingerprint: str) -> StoppableLink:
        return drafts(lambda one, member: GrpcDraftLink(one, member, vocabulary_size, fingerprint, options), events)

    return connect


def _prepare_in_process(address: str) -> Connect:
    prepared: Connect = _made_here(INPROCESS_SCHEME, address)

    def connect(events: DraftEvents, vocabulary_size: int, fingerprint: str) -> StoppableLink:
        with _naming(address):
            return prepared(events, vocabulary_size, fingerprint)

    return connect


def _made_here(scheme: str, address: str, *more: str) -> Any:
    """What the draft service in this environment makes of an address of the scheme."""
    extension = find_extension(LINK_GROUP, scheme.removesuffix(":"))
    if extension is None:
        raise SettingsError(f"{address}: no draft service is installed in this environment")
    with _naming(address):
        return extension(address.removeprefix(scheme), *more)


@contextlib.contextmanager
def _naming(address: str) -> Iterator[None]:
    """Raise errors of the block as `SettingsError`, with the address."""
    try:
        yield
    except OutriderError as error:
        raise SettingsError(f"{address}: {error.message}") from None


class GrpcDraftLink:
    """A `DraftLink` to a draft service. Calls are thread-safe, return at once, and never raise. Calls while no draft is
    connected are dropped: at `Connected` the receiver opens every live sequence again."""

    def __init__(
        self, address: str, events: DraftEvents, vocabulary_size: int, fingerprint: str, options: LinkOptions = USUAL
    ) -> None:
        """Start connecting. `events` receives the outcome and every later change."""
        self._address = address
        self._events = events
        self._vocabulary_size = vocabulary_size
        self._fingerprint = fingerprint
        self._options = options
        # Calls to send, and the bytes of features in each.
        self._outbox: deque[tuple[Callable[[DraftConversation], None], int]] = deque()
        # Of features, in total: posted is counted by the caller, sent by the link's thread.
        self._bytes_posted = self._bytes_sent = 0
        self._connected = False
        self._last_reason = ""
        self._busy_polling = BusyPolling(0.0)
        # The loop's thread sets these before anyone else reads them.
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        self._stopping: asyncio.Event
        self._cut_off: asyncio.Event
        self._cut_off_reason = ""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._main(ready)), name="draft-link", daemon=True)
        self._thread.start()
        ready.wait()

    def open(self, sequence: OpenSequence) -> None:
        self._post(lambda conversation: conversation.open(sequence))

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        size = sum(len(advance.features.data) for advance in advances if advance.features is not None)
        if size and not self._has_room(size):
            advances = [advance._replace(features=None) for advance in advances]
            size = 0
        self._post(lambda conversation: conversation.advance(advances), size)

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        size = sum(len(one.vectors.data) for one in features)
        if self._has_room(size):
            self._post(lambda conversation: conversation.send_features(features), size)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._post(lambda conversation: conversation.close(sequence_ids))

    def cut_off(self, reason: str) -> None:
        """End the stream, also of a draft that reads nothing, and connect again after the backoff of a fault."""

        def cut() -> None:
            self._cut_off_reason = reason
            self._cut_off.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(cut)

    def stop(self) -> None:
        """Disconnect and end the thread. Nothing is delivered afterwards. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def call_when_readable(self, connection: socket.socket, call: Callable[[], None]) -> None:
        """Call `call` on the link's thread whenever the connection is readable, so that what it reads is sent to the
        draft without waking another thread."""
        self._loop.call_soon_threadsafe(self._loop.add_reader, connection, call)

    def busy_poll(self, seconds: float) -> None:
        """Make the link's thread poll for `seconds` after each frame before it sleeps."""
        self._busy_polling.seconds = seconds

    def _has_room(self, size: int) -> bool:
        """Whether features of `size` more bytes may wait. A slow draft without them drafts worse, but keeps up."""
        return self._bytes_posted - self._bytes_sent + size <= self._options.max_waiting_feature_bytes

    def _post(self, command: Callable[[DraftConversation], None], size: int = 0) -> None:
        if not self._connected:
            return
        self._bytes_posted += size
        self._outbox.append((command, size))
        if threading.get_ident() == self._thread.ident:
            # Called from `call_when_readable`: the loop is running.
            self._wake.set()
            return
        # The loop is closed once the link was stopped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    # Everything below runs on the link's thread.

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._wake, self._stopping = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._cut_off = asyncio.Event()
        ready.set()
        await until_first_ends(self._keep_connected(), self._stopping.wait())
        # gRPC delivers the last events of a cancelled call through whichever loop of the process polls first, and logs
        # an error if this loop is closed by then.
        # For gRPC's poller to deliver the last events of a cancelled call, when the link stops. Chosen, not measured.
        await asyncio.sleep(0.05)

    async def _keep_connected(self) -> None:
        options, backoff, fault_backoff = self._options, self._options.min_backoff, 0.0
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
                # Errors of a service are clear already; UNAVAILABLE is gRPC's own.
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    detail = cause_of(detail)[0]
                reason = f"{error.code().name}: {detail}"
                # A bug of the draft, which will likely come again with the next frame.
                at_fault = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    reason = f"what answers at {self._address} is no draft service ({reason})"
            except Exception as error:
                # Such as gRPC's for wrong arguments. A link that ended here would be silent for ever.
                reason = repr(error)
            # Once when it is lost, and again whenever the reason changes.
            if self._connected or reason != self._last_reason:
                self._connected, self._last_reason = False, reason
                self._events.receive(Disconnected(reason))
            # Connect again at once to a draft that had answered, and ever more slowly to one that never does. Spread,
            # so that the many targets of a draft that restarts do not reconnect together.
            backoff = options.min_backoff if conversation.received else min(2 * backoff, options.max_backoff)
            if at_fault:
                fault_backoff = min(max(2 * fault_backoff, options.fault_backoff), options.max_fault_backoff)
            elif conversation.received:
                fault_backoff = 0.0
            await asyncio.sleep(max(backoff, fault_backoff) * random.uniform(0.5, 1.0))

    async def _converse(self, stub: Any, conversation: DraftConversation) -> None:
        """Check the draft's description, then exchange frames until the stream ends or breaks."""
        options = self._options
        response = await stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(), timeout=options.connect_timeout, metadata=options.metadata
        )
        info = info_from_pb(_readable(response))
        self._check(info)
        conversation.max_context = info.max_context
        call = stub.Propose(metadata=options.metadata)
        while self._outbox:
            self._bytes_sent += self._outbox.popleft()[1]
        self._cut_off.clear()
        self._connected, self._last_reason = True, ""
        self._events.receive(Connected(info))
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
                    self._bytes_sent += size
                if not self._outbox:
                    await self._wake.wait()
                    self._wake.clear()
                    self._busy_polling.start()
        except asyncio.InvalidStateError:
            # The call is over; `_read` raises the reason.
            await asyncio.sleep(self._options.answer_timeout)

    async def _watch(self, conversation: DraftConversation) -> None:
        while conversation.silence < self._options.answer_timeout:
            await asyncio.sleep(self._options.answer_timeout / 4)
        raise DraftUnavailable(f"no answer for {self._options.answer_timeout:g} s")

    async def _until_cut_off(self) -> None:
        await self._cut_off.wait()
        raise CreditExceeded(self._cut_off_reason)


def _readable(message: Any) -> Any:
    """The message. Raises `DraftUnavailable` for None, which gRPC returns for malformed bytes."""
    if message is None:
        raise DraftUnavailable("the draft sent bytes that are no message")
    return message
