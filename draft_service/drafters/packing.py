"""Grown trees as the bytes of a `GrowSequences` message, without a Python object for each node.

For sixteen trees of 32 nodes, making tuples and messages one by one takes longer than growing them. The arrays of the
compiled loops are therefore encoded by a compiled loop, by the rules of
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draft_service.compiling import Numbers, Reals, compiled
from outrider.v1 import draft_pb2

RowHeads = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

# Columns of a tree's head: sequence id (its 64 bits), step, first node's id, vocabulary size.
SEQUENCE_ID, STEP, FIRST_ID, VOCABULARY = range(4)
# Wire types of protobuf.
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIELDS = draft_pb2.SequenceGrowth.DESCRIPTOR.fields_by_name
_SEQUENCES = draft_pb2.GrowSequences.DESCRIPTOR.fields_by_name["sequences"].number << 3 | _LENGTH_DELIMITED
_ID_TAG, _STEP_TAG, _FIRST_TAG, _REPLACES_TAG = (
    _FIELDS[name].number << 3 | _VARINT for name in ("sequence_id", "base_step", "first_node_id", "replaces")
)
_PARENTS_TAG, _TOKENS_TAG, _SCORES_TAG = (
    _FIELDS[name].number << 3 | _LENGTH_DELIMITED for name in ("parent_ids", "token_ids", "scores")
)
_SEVEN, _CONTINUED = np.uint64(7), np.uint64(0x80)


def room_for(trees: int, nodes: int) -> int:
    """An upper bound on the bytes of encoded trees."""
    # Most bytes of a tree beside its nodes: ten fields' tags and lengths or numbers; and of one node.
    return trees * (80 + 14 * nodes)


def signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return number - (number >> 63 << 64)


@compiled
def _size(number: int) -> int:
    """Bytes of a varint."""
    left, size = np.uint64(number) >> _SEVEN, 1
    while left != 0:
        left >>= _SEVEN
        size += 1
    return size


@compiled
def _put(out: Octets, at: int, number: int) -> int:
    """Write a varint; returns where it ends."""
    left = np.uint64(number)
    while left >= _CONTINUED:
        out[at] = np.uint8(left & np.uint64(0x7F)) | np.uint8(0x80)
        left >>= _SEVEN
        at += 1
    out[at] = np.uint8(left)
    return at + 1


@compiled
def _put_field(out: Octets, at: int, tag: int, number: int) -> int:
    out[at] = tag
    return int(_put(out, at + 1, number))


@compiled
def pack(trees: Numbers, scores: Reals, sizes: RowHeads, heads: RowHeads, out: Octets) -> int:
    """Encode trees whose root is row 0. Returns bytes written, or -1 when a token is not below its sequence's
    vocabulary size.

    Args:
        trees: [n, 2, ..] tokens and parents; scores: [n, ..].
        sizes: [n, ..], rows of each tree, the root among them, in column 0.
        heads: [n, 4], see `SEQUENCE_ID` and the others.
        out: [`room_for`] filled.
    """
    at = 0
    real = np.empty(1, np.float32)
    octets = real.view(np.uint8)
    for i in range(len(heads)):
        nodes, first = sizes[i, 0] - 1, heads[i, FIRST_ID]
        parent_bytes, token_bytes = 0, 0
        for row in range(1, nodes + 1):
            token, parent = trees[i, 0, row], trees[i, 1, row]
            if token >= heads[i, VOCABULARY]:
                return -1
            token_bytes += _size(token)
            parent_bytes += _size(parent + first - 1 if parent > 0 else 0)
        total = 5 + _size(heads[i, SEQUENCE_ID]) + _size(heads[i, STEP]) + _size(first)
        if nodes > 0:
            total += 3 + token_bytes + parent_bytes + 4 * nodes
            total += _size(token_bytes) + _size(parent_bytes) + _size(4 * nodes)
        at = _put_field(out, at, _SEQUENCES, total)
        at = _put_field(out, at, _ID_TAG, heads[i, SEQUENCE_ID])
        at = _put_field(out, at, _STEP_TAG, heads[i, STEP])
        at = _put_field(out, at, _FIRST_TAG, first)
        if nodes > 0:
            at = _put_field(out, at, _PARENTS_TAG, parent_bytes)
            for row in range(1, nodes + 1):
                parent = trees[i, 1, row]
                at = _put(out, at, parent + first - 1 if parent > 0 else 0)
            at = _put_field(out, at, _TOKENS_TAG, token_bytes)
            for row in range(1, nodes + 1):
                at = _put(out, at, trees[i, 0, row])
            at = _put_field(out, at, _SCORES_TAG, 4 * nodes)
            for row in range(1, nodes + 1):
                real[0] = scores[i, row]
                # Little-endian on every machine that numba compiles for here.
                out[at : at + 4] = octets
                at += 4
        at = _put_field(out, at, _REPLACES_TAG, 1)
    return at
