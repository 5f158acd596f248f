"""Events of text alone, of which all but the text is made once, are those that are made anew each time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider_client.answers import ContentPart
from outrider_client.results import Chunk
from outrider_gateway.messages_json import MessageBuilder
from outrider_gateway.messages_request import messages_request
from outrider_gateway.response_json import ResponseBuilder
from outrider_gateway.responses_json import ResponsesBuilder
from outrider_gateway.responses_request import responses_request
from outrider_gateway.token_texts import TokenTexts
from outrider_gateway.translation import chat_request, completion_request

TURNS = [{"role": "user", "content": "a"}]
AWKWARD = 'quote " back \\ line \n "text" é 漢 \u2028'
DOORS = {
    "completions": (completion_request, ResponseBuilder, {"prompt": "a"}),
    "chat": (chat_request, ResponseBuilder, {"messages": TURNS}),
    "responses": (responses_request, ResponsesBuilder, {"input": "a"}),
    "messages": (messages_request, MessageBuilder, {"messages": TURNS, "max_tokens": 9}),
}


def events(written: bytes) -> list[dict[str, Any]]:
    lines = written.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("door", DOORS)
def test_each_is_as_the_first(door: str) -> None:
    translate, build, body = DOORS[door]
    builder: Any = build(translate({**body, "stream": True, "model": "m"}, 4, 1000), "m", TokenTexts(), ())  # type: ignore[operator]
    texts = ["first", AWKWARD, "third"]
    *_, first = events(builder.chunk(0, Chunk((1,), "first", 0, 0, parts=(ContentPart("first"),))))
    for place, text in enumerate(texts[1:], 1):
        (event,) = events(builder.chunk(0, Chunk((1,), text, 0, place, parts=(ContentPart(text),))))
        expected = json.loads(json.dumps(first).replace('"first"', json.dumps(text)))
        if "sequence_number" in first:
            expected["sequence_number"] += place
        assert event == expected
        assert list(event) == list(first)
