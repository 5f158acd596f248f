"""The form that an answer is to have, by the names of OpenAI and of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from outrider.structured_output import StructuredOutput
from outrider_gateway.bodies import Choices, GenerationFields, Object
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, converted, json_bytes, read_object

# Where a body's form is: the form, and the path by which refusals name it.
Form = tuple[StructuredOutput, str]
# vLLM's forms, by their names in `structured_outputs`; the older fields begin with `guided_`.
_NAMED: dict[str, Callable[[Any, str], StructuredOutput]] = {
    "json": lambda schema, path: StructuredOutput(json_schema=_schema_text(schema, path)),
    "regex": lambda regex, _: StructuredOutput(regex=regex),
    "choice": lambda texts, _: StructuredOutput(choices=tuple(texts)),
    "grammar": lambda grammar, _: StructuredOutput(grammar=grammar),
}


class VllmForms(BodyObject):
    """`structured_outputs`."""

    json: Object | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool | None = None


class PlainForm(BodyObject):
    """A form as OpenAI has it, without a schema."""

    type: Literal["text", "json_object", "json_schema"]


class NestedForm(BodyObject):
    """A form whose schema stands in an object of its own."""

    type: str
    json_schema: Object


class NamedSchema(BodyObject):
    """A schema. Its names are for the caller's own books; it is kept to whether it is strict or not."""

    ignored: ClassVar[tuple[str, ...]] = ("name", "description", "strict")
    schema: Object | str


class SchemaForm(NamedSchema):
    """A form whose schema stands beside its type."""

    type: str


def structured_output(given: GenerationFields) -> Form | None:
    """The form of the answer, and the body's name for it; None for any text. Raises `Refused`, also for several."""
    options = read_object(VllmForms, given.structured_outputs, "structured_outputs")
    typed = json_form(given.response_format, "response_format", nested=True)
    forms = [] if typed is None else [typed]
    for source, prefix in ((options, "structured_outputs."), (given, "guided_")):
        for name, make in _NAMED.items():
            value = getattr(source, name if source is options else prefix + name)
            if value is not None:
                forms.append((make(value, prefix + name), prefix + name))
    if options.json_object:
        forms.append((StructuredOutput(json_object=True), "structured_outputs.json_object"))
    if len(forms) > 1:
        raise BadField(forms[1][1], f"is one form too many beside {forms[0][1]}", "invalid_value")
    if options.disable_any_whitespace is None:
        return forms[0] if forms else None
    if not forms:
        raise BadField("structured_outputs.disable_any_whitespace", "needs a form beside it", "invalid_value")
    form, name = forms[0]
    # Of other forms whitespace is a part.
    json = form.json_object or form.json_schema is not None
    return replace(form, free_whitespace=json and not options.disable_any_whitespace), name


def json_form(value: Any, path: str, *, nested: bool = False) -> Form | None:
    """A form as OpenAI has it, of a field with a type. The schema stands beside the type, or `nested` in an object of
    its own."""
    if value is None:
        return None
    kind = converted(value, Object, path).get("type")
    if kind == "json_schema":
        if nested:
            value, path = read_object(NestedForm, value, path).json_schema, f"{path}.json_schema"
        schema, path = read_object(NamedSchema if nested else SchemaForm, value, path).schema, f"{path}.schema"
        return StructuredOutput(json_schema=_schema_text(schema, path)), path
    kind = read_object(PlainForm, value, path).type
    return (StructuredOutput(json_object=True), f"{path}.type") if kind == "json_object" else None


def _schema_text(schema: Object | str, path: str) -> str:
    """A schema as JSON: an object, or its text."""
    return schema if isinstance(schema, str) else json_bytes(schema, path).decode()
