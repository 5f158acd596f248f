"""Frames that are nearly real: sound ones, spoilt as messages or as bytes. All of it by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_Field = FieldDescriptor
# The ends of what fields hold, and what arithmetic likes least.
_UNSIGNED = (0, 1, 2, 210, 211, 255, 256, 999, 1000, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_UNSIGNED64 = (*_UNSIGNED, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_SIGNED = (0, 1, -1, 2, 77, 2**31 - 1, -(2**31))
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "user", "a/b", "../..", "\x00", "line\nbreak", "x" * 300, "\u202e\U0001f600", "trie", "default")
_RANGES: dict[int, Sequence[Any]] = {
    _Field.CPPTYPE_UINT32: _UNSIGNED,
    _Field.CPPTYPE_UINT64: _UNSIGNED64,
    _Field.CPPTYPE_INT32: _SIGNED,
    _Field.CPPTYPE_INT64: (*_SIGNED, 2**63 - 1, -(2**63)),
    _Field.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 77, -1),
    _Field.CPPTYPE_BOOL: (False, True),
    _Field.CPPTYPE_FLOAT: _REALS,
    _Field.CPPTYPE_DOUBLE: _REALS,
}
# Lists are made so long at most: longer ones are for the tests of each limit.
_LONGEST = 40


class Mutator:
    """Draws spoilt copies of sound messages."""

    def __init__(self, seed: int) -> None:
        self.coins = random.Random(seed)

    def payload(self, sound: Sequence[Message]) -> bytes:
        """The bytes of one of `sound`, usually spoilt: half of them as a message, some of those again as bytes."""
        coins = self.coins
        message = coins.choice(sound)
        kind = coins.random()
        if kind < 0.1:
            return message.SerializeToString()
        if kind < 0.6:
            copy = type(message)()
            copy.CopyFrom(message)
            for _ in range(coins.choice((1, 1, 1, 2, 5))):
                self.spoil(copy)
            payload = copy.SerializeToString()
            return payload if kind < 0.55 else self.spoil_bytes(payload, payload)
        return self.spoil_bytes(message.SerializeToString(), coins.choice(sound).SerializeToString())

    def spoil(self, message: Message) -> None:
        """Change a field of the message or of one inside of it."""
        coins = self.coins
        if not message.DESCRIPTOR.fields:
            return
        field = coins.choice(message.DESCRIPTOR.fields)
        if coins.random() < 0.1:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            values = getattr(message, field.name)
            if value.message_type is not None:
                # It is there once it is looked at.
                self.spoil(values[self._value(key)])
            else:
                values[self._value(key)] = self._value(value)
        elif field.is_repeated:
            self._spoil_many(getattr(message, field.name), field)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self.spoil(inner)
        else:
            setattr(message, field.name, self._value(field))

    def _spoil_many(self, values: Any, field: FieldDescriptor) -> None:
        coins = self.coins
        if field.message_type is not None:
            if values and coins.random() < 0.6:
                self.spoil(coins.choice(values))
            elif len(values) < _LONGEST:
                values.add()
            return
        kind = coins.random()
        if values and kind < 0.4:
            values[coins.randrange(len(values))] = self._value(field)
        elif values and kind < 0.6:
            del values[coins.randrange(len(values)) :]
        elif len(values) < _LONGEST:
            values.extend([self._value(field)] * coins.choice((1, 1, 2, 17)))

    def _value(self, field: FieldDescriptor) -> Any:
        if field.cpp_type == _Field.CPPTYPE_STRING:
            text = self.coins.choice(_TEXTS)
            return text.encode() if field.type == _Field.TYPE_BYTES else text
        return self.coins.choice(_RANGES[field.cpp_type])

    def spoil_bytes(self, payload: bytes, other: bytes) -> bytes:
        """Change bytes of `payload`, or mix it with `other`."""
        ways: tuple[Callable[[bytearray, bytes], bytearray], ...] = (
            self._flip, self._truncate, self._insert, self._splice, self._repeat, self._noise,
        )  # fmt: skip
        found = bytearray(payload)
        for _ in range(self.coins.choice((1, 1, 2, 4))):
            found = self.coins.choice(ways)(found, other)
        return bytes(found)

    def _flip(self, payload: bytearray, _other: bytes) -> bytearray:
        for _ in range(self.coins.randint(1, 4) if payload else 0):
            payload[self.coins.randrange(len(payload))] ^= 1 << self.coins.randrange(8)
        return payload

    def _truncate(self, payload: bytearray, _other: bytes) -> bytearray:
        return payload[: self.coins.randrange(len(payload) + 1)]

    def _insert(self, payload: bytearray, _other: bytes) -> bytearray:
        """A tag of any field and wire type, a varint of ten bytes, or any bytes."""
        place = self.coins.randrange(len(payload) + 1)
        new = self.coins.choice((bytes([self.coins.randrange(256)]), b"\xff" * 9 + b"\x01", self.coins.randbytes(4)))
        return payload[:place] + new + payload[place:]

    def _splice(self, payload: bytearray, other: bytes) -> bytearray:
        cut, place = self.coins.randrange(len(payload) + 1), self.coins.randrange(len(other) + 1)
        return payload[:cut] + other[place:]

    def _repeat(self, payload: bytearray, _other: bytes) -> bytearray:
        """Fields that stand twice are merged, or the last one counts."""
        return payload * self.coins.choice((2, 2, 3))

    def _noise(self, payload: bytearray, _other: bytes) -> bytearray:
        return bytearray(self.coins.randbytes(self.coins.randrange(len(payload) + 8)))
