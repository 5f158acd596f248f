"""Forms of output for tests: schemas of our own, and a vocabulary with tokens across their borders."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from target_service.text.tokenizer import ModelTokenizer

VOCABULARY = 384
_TEXTS = ['{"name": "Zoë", "age": 12, "tags": ["日本語"]}', '{"a":true,"b":false,"c":null}', "🙂 yes no colour"] * 3
_TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
_SHORT = {"type": "string", "maxLength": 3}


def _object(**properties: Any) -> dict[str, Any]:
    """An object with all of these, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "constant": {"const": {"a": [1, "x", None]}},
    "enum": {"enum": ["red", "green", 5, None, [1], {"k": True}]},
    "enum-unicode": {"enum": ["Zoë", "日本語", "🙂", 'quo"te', "back\\slash", "new\nline", "\u2028"]},
    "integer-bounds": {"type": "integer", "minimum": -12, "maximum": 345},
    "integer-exclusive": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 9},
    "number-bounds": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
    "string-length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"},
    "pattern-unicode": {"type": "string", "pattern": "^[é日🙂]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "empty-object": {"type": "object", "additionalProperties": False},
    "empty-array": {"type": "array", "maxItems": 0},
    "flat": _object(name=_SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, ok={"type": "boolean"}),
    "nested": _object(a=_object(b=_object(c=_object(d={"enum": ["x", "y"]})))),
    "optional": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
                 "required": ["b"], "additionalProperties": False},
    "no-properties": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    "typed-others": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    "array-enums": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4},
    "array-objects": {"type": "array", "items": _object(k={"enum": [1, 2]}), "minItems": 2, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["q"]}], "items": False, "minItems": 2},
    "union-types": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
    "union": {"anyOf": [{"const": "left"}, _object(right={"type": "boolean"}), {"type": "null"}]},
    "one-of": {"oneOf": [_object(kind={"const": "a"}, x={"enum": [1]}), _object(kind={"const": "b"}, y={"enum": [2]})]},
    "all-of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "reference": {"$defs": {"c": {"enum": ["r", "g"]}},
                  **_object(one={"$ref": "#/$defs/c"}, two={"$ref": "#/$defs/c"})},
    "recursion": {"$defs": {"node": _TREE}, "$ref": "#/$defs/node"},
    "recursive-array": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}},
                        "$ref": "#/$defs/t"},
    "unicode-keys": _object(**{"größe": {"type": "boolean"}, "名": {"enum": ["日"]}, "k\"q": {"type": "null"}}),
    "described": {"title": "T", "description": "d", "type": "object", "examples": [{"a": 1}],
                  "properties": {"a": {"enum": [1], "default": 1}}, "required": ["a"], "additionalProperties": False},
    "mixed": _object(id={"type": "integer", "minimum": 1, "maximum": 99},
                     tag={"type": "string", "pattern": "^[A-Z]{3}$"},
                     opts={"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2}),
}  # fmt: skip


@functools.cache
def trained_tokenizer() -> ModelTokenizer:
    """Byte-level, of 384 tokens at most: with tokens that hold parts of characters, and several of JSON's signs. Ids 0
    to 2 are pad, begin and end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return ModelTokenizer(tokenizer, special_tokens={"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"})
