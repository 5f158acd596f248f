"""Messages between processes of one service: msgspec structs, of which decoding never runs code."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from outrider.processes.children import received
from outrider.processes.framing import Buffer, FrameCutter, framed

Message = TypeVar("Message")


class ProcessMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message, which says on its way of what kind it is."""


class MessageCodec(Generic[Message]):
    """Encodes messages of some kinds, and decodes those alone."""

    def __init__(
        self,
        kinds: Any,
        *,
        form: Any = msgspec.msgpack,
        enc_hook: Callable[[Any], Any] | None = None,
        dec_hook: Callable[[type[Any], Any], Any] | None = None,
    ) -> None:
        """`kinds`: a union of structs. `form`: `msgspec.json` for whole numbers of any size, which msgpack does not
        have. The hooks are msgspec's, for values of other types."""
        self._encoder = form.Encoder(enc_hook=enc_hook)
        self._decoder = form.Decoder(kinds, dec_hook=dec_hook)

    def pack(self, message: Message) -> bytes:
        """The frame of a message."""
        return framed(self._encoder.encode(message))

    def unpack(self, body: Buffer) -> Message:
        """The message of a frame's body. Raises `msgspec.DecodeError` for any other."""
        message: Message = self._decoder.decode(body)
        return message

    def receive(self, connection: socket.socket, frames: FrameCutter | None = None) -> Iterator[Message]:
        """The messages of the process at the other end, until it is gone. `frames` may have the beginning of one."""
        frames = frames or FrameCutter()
        while data := received(connection):
            yield from map(self.unpack, frames.feed(data))
