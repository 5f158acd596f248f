"""Messages from the leading rank to the others, and their frames: structs in msgpack, in the frames of
`outrider.processes.framing`."""

from __future__ import annotations

import msgspec
from torch import Tensor

from outrider.processes.framing import Buffer, framed
from target_service.config import TargetConfig
from target_service.model.forward import ForwardInput
from tree_kernels.attention import AttentionBatch


class _RankMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the messages below."""


class Join(_RankMessage, frozen=True):
    """The first message: what to load, as which rank, and the file at which ranks meet."""

    config: TargetConfig
    rank: int
    store: str


class RunPass(_RankMessage, frozen=True):
    """Run a pass. `logit_rows` are those whose logits are computed, None for all."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    query_starts: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    pages: list[list[int]]
    page_size: int
    parents: tuple[tuple[int, ...] | None, ...]
    logit_rows: tuple[int, ...] | None

    @classmethod
    def of(cls, batch: ForwardInput, token_ids: Tensor, rows: Tensor | int) -> RunPass:
        """Of the arguments of `ModelRunner.compute_logits`."""
        attention = batch.attention
        return cls(
            tuple(token_ids.tolist()),
            batch.positions,
            batch.slots,
            attention.query_starts,
            attention.prefix_lengths,
            [list(held) for held in attention.pages],
            attention.page_size,
            attention.parents,
            None if isinstance(rows, int) else tuple(rows.tolist()),
        )

    @property
    def batch(self) -> ForwardInput:
        """The pass, with logits of `logit_rows`."""
        pages = tuple(tuple(held) for held in self.pages)
        attention = AttentionBatch(self.query_starts, self.prefix_lengths, pages, self.page_size, self.parents)
        return ForwardInput(self.token_ids, self.positions, self.slots, attention, self.logit_rows or ())


class MoveRows(_RankMessage, frozen=True):
    """Move keys and values between slots, as `ModelRunner.move_rows` does."""

    sources: list[int]
    targets: list[int]


RankMessage = Join | RunPass | MoveRows
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankMessage)


def pack(message: RankMessage) -> bytes:
    """The frame of a message."""
    return framed(_encoder.encode(message))


def unpack(body: Buffer) -> RankMessage:
    """The message of a frame's body. Raises `msgspec.DecodeError` for any other."""
    message: RankMessage = _decoder.decode(body)
    return message
