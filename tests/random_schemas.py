"""JSON schemas drawn from every construct that forms of output are asked for, the same each time."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import quote

Schema = dict[str, Any]
KEYS = ("a", "id", "name", "größe", "名前", "🙂", 'k"q', "back\\slash", "with space", "$ref", "x-y", "Ünï\tcode", "0")
VALUES = ("red", "green", "", "Zoë", "日本語", "🙂🙃", 'quo"te', "back\\slash", "new\nline", "\u2028", 5, -1.5, None,
          True, [1, "x"], {"k": False}, [], {})  # fmt: skip
PATTERNS = (
    "^[a-f]{2}-[0-9]{3}$",
    "^[é日🙂]{1,3}$",
    "^(ab|c)+d?$",
    "^[A-Z][a-z]{0,4}$",
    "^x{2,}y$",
    "^[^a-z]{3}$",
    "^\\d{4}$",
)
FORMATS = ("date", "time", "uuid", "ipv4", "date-time", "email")
DEPTH = 3


class SchemaDice:
    """Draws schemas. Everything that can go on without end can also end."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def document(self) -> Schema:
        """A whole schema, with the definitions that it refers to."""
        dice = self._dice
        if dice.random() < 0.4:
            # Two that are there before anything refers to them, of which one may hold itself.
            self._definitions["plain"] = self._leaf()
            self._definitions["lïst"] = self.closed({"v": self._leaf(), "next": {"anyOf": [{"type": "null"},
                {"$ref": f"#/$defs/{quote('lïst')}"}]}})  # fmt: skip
        schema = self.schema(DEPTH)
        if self._definitions:
            schema = {"$defs": self._definitions, **self.closed({"one": schema, "two": self._reference()})}
        return schema

    def schema(self, depth: int) -> Schema:
        dice = self._dice
        if depth == 0 or dice.random() < 0.2:
            return self._reference() if self._definitions and dice.random() < 0.3 else self._leaf()
        return dice.choice((self._object, self._object, self._array, self._tuple, self._union))(depth - 1)

    def closed(self, properties: dict[str, Schema]) -> Schema:
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def _reference(self) -> Schema:
        return {"$ref": f"#/$defs/{quote(self._dice.choice(list(self._definitions)))}"}

    def _leaf(self) -> Schema:
        dice = self._dice
        low, size = dice.randrange(-500, 500), dice.randrange(1, 2000)
        return dice.choice((
            lambda: {"type": dice.choice(("boolean", "null"))},
            lambda: {"enum": dice.sample(VALUES, dice.randrange(1, 6))},
            lambda: {"const": dice.choice(VALUES)},
            lambda: {"type": "integer", "minimum": low, "maximum": low + size},
            lambda: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + size + 1},
            lambda: {"type": "number", "minimum": low / 8, "maximum": (low + size) / 8},
            lambda: {"type": "number", "exclusiveMinimum": low / 4, "maximum": (low + size) / 4},
            lambda: {"type": "integer", "minimum": 0, "maximum": 40 * size, "multipleOf": dice.randrange(2, 30)},
            lambda: {"type": "string", "minLength": dice.randrange(3), "maxLength": dice.randrange(3, 6)},
            lambda: {"type": "string", "pattern": dice.choice(PATTERNS)},
            lambda: {"type": "string", "format": dice.choice(FORMATS)},
            lambda: {"type": ["integer", "null"], "minimum": low, "maximum": low + size},
            lambda: {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + size}]},
        ))()  # fmt: skip

    def _object(self, depth: int) -> Schema:
        dice, keys = self._dice, self._dice.sample(KEYS, self._dice.randrange(4))
        schema: Schema = {"type": "object", "properties": {key: self.schema(depth) for key in keys}}
        schema["required"] = dice.sample(keys, dice.randrange(len(keys) + 1))
        others = dice.choice((False, False, False, {"type": "boolean"}, True))
        schema["additionalProperties"] = others
        if not keys and dice.random() < 0.5:
            del schema["properties"], schema["required"]
        if dice.random() < 0.2:
            schema |= {"title": "T", "description": "Zweck\n", "examples": [1], "$comment": "c"}
        return schema

    def _array(self, depth: int) -> Schema:
        low = self._dice.randrange(3)
        most = low + self._dice.randrange(3)
        return {"type": "array", "items": self.schema(depth), "minItems": low, "maxItems": most}

    def _tuple(self, depth: int) -> Schema:
        first = [self.schema(depth) for _ in range(self._dice.randrange(1, 4))]
        rest = self._dice.choice((False, {"type": "boolean"}))
        schema = {
            "type": "array",
            "prefixItems": first,
            "items": rest,
            "minItems": self._dice.randrange(len(first) + 1),
        }
        return schema | ({"maxItems": len(first) + 2} if rest else {})

    def _union(self, depth: int) -> Schema:
        if self._dice.random() < 0.5:
            return {"anyOf": [self.schema(depth) for _ in range(self._dice.randrange(1, 4))]}
        # Of each text one alone is right.
        return {"oneOf": [self.closed({"kind": {"const": kind}, "value": self.schema(depth)}) for kind in "äbc"]}


def random_schemas(count: int) -> list[Schema]:
    """That many, no two alike."""
    found: dict[str, Schema] = {}
    seed = 0
    while len(found) < count:
        schema = SchemaDice(seed).document()
        found[json.dumps(schema, sort_keys=True)] = schema
        seed += 1
    return list(found.values())
