"""The form that an answer is to have, by the names of OpenAI and of vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.structured_output import MAX_CHOICES, StructuredOutput
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, bounded, json_bytes, typed

# Where a body's form is: the form, and the path by which refusals name it.
Form = tuple[StructuredOutput, str]


def structured_output(fields: Fields) -> Form | None:
    """The form of the answer, and the body's name for it; None for any text. Raises `Refused`, also for several."""
    options = fields.inner("structured_outputs") or Fields({}, "structured_outputs")
    any_whitespace = options.pop("disable_any_whitespace")
    named = *_named_forms(options, ""), *_named_forms(fields, "guided_")
    found = [json_form(fields, "response_format", nested=True), *named]
    options.end()
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise BadField(forms[1][1], f"is one form too many beside {forms[0][1]}", "invalid_value")
    if any_whitespace is None:
        return forms[0] if forms else None
    path = "structured_outputs.disable_any_whitespace"
    free = not typed(any_whitespace, bool, path)
    if not forms:
        raise BadField(path, "needs a form beside it", "invalid_value")
    form, name = forms[0]
    # Of other forms whitespace is a part.
    json = form.json_object or form.json_schema is not None
    return replace(form, free_whitespace=free and json), name


def json_form(fields: Fields, name: str, *, nested: bool = False) -> Form | None:
    """A form as OpenAI has it, of a field with a type: text, json_object or json_schema. The schema and its name stand
    beside the type, or `nested` in an object of their own."""
    inner = fields.inner(name)
    if inner is None:
        return None
    kind, form = inner.text("type"), None
    if kind == "json_object":
        form = StructuredOutput(json_object=True), inner.path("type")
    elif kind == "json_schema":
        described = inner.inner("json_schema") if nested else inner
        if described is None:
            raise BadField(inner.path("json_schema"), "is missing", "missing_required_parameter")
        # Names for the caller's own books; a schema is kept to whether it is strict or not.
        described.ignore(("name", "description", "strict"))
        path = described.path("schema")
        form = StructuredOutput(json_schema=_schema_text(described.pop("schema"), path)), path
        described.end()
    elif kind != "text":
        raise BadField(inner.path("type"), "must be text, json_object or json_schema", "invalid_value")
    inner.end()
    return form


def _named_forms(fields: Fields, prefix: str) -> list[Form | None]:
    """vLLM's: `structured_outputs`, which has no prefix, and the older fields."""
    forms: list[Form | None] = []
    schema, path = fields.pop(f"{prefix}json"), fields.path(f"{prefix}json")
    if schema is not None:
        forms.append((StructuredOutput(json_schema=_schema_text(schema, path)), path))
    regex, path = fields.pop(f"{prefix}regex"), fields.path(f"{prefix}regex")
    if regex is not None:
        forms.append((StructuredOutput(regex=typed(regex, str, path)), path))
    choices, path = fields.pop(f"{prefix}choice"), fields.path(f"{prefix}choice")
    if choices is not None:
        texts = bounded(typed(choices, list, path), MAX_CHOICES, path)
        if not texts:
            raise BadField(path, "is empty", "invalid_value")
        forms.append((StructuredOutput(choices=tuple(typed(one, str, path) for one in texts)), path))
    grammar, path = fields.pop(f"{prefix}grammar"), fields.path(f"{prefix}grammar")
    if grammar is not None:
        forms.append((StructuredOutput(grammar=typed(grammar, str, path)), path))
    if not prefix and fields.flag("json_object"):
        forms.append((StructuredOutput(json_object=True), fields.path("json_object")))
    return forms


def _schema_text(schema: Any, path: str) -> str:
    """A schema as JSON: an object, or its text."""
    if isinstance(schema, str):
        return schema
    if schema is None:
        raise BadField(path, "is missing", "missing_required_parameter")
    return json_bytes(typed(schema, dict, path), path).decode()
