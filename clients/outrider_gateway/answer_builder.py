"""What makes the JSON of answers, for every form that they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from outrider_client.results import Chunk, Result, Started
from outrider_gateway.failures import Refused
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.token_texts import TokenTexts


class AnswerBuilder(Protocol):
    """Makes the JSON of one request's answers, from chunks and results in the order in which they come: either whole
    (`keep`, `whole`), or as events of a stream (`chunk`, `last`, `usage_event`)."""

    def started(self, index: int, started: Started) -> None:
        """Note what a target accepted for the answer of an index."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The events of a chunk; may be empty."""

    def last(self, index: int, result: Result) -> bytes:
        """The events that end an answer."""

    def usage_event(self, results: Sequence[Result]) -> bytes:
        """The event with the usage of the whole request, where it asks for one."""

    async def keep(self, index: int, chunk: Chunk) -> None:
        """Note a chunk of an answer that is sent whole."""

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """The answer that is not streamed."""

    @property
    def end(self) -> bytes:
        """What ends a stream behind its last event."""

    def failure(self, refused: Refused) -> bytes:
        """The event of an error behind the first event."""


Request = TypeVar("Request", bound=GenerationRequest)
Built = TypeVar("Built", bound=AnswerBuilder)
# Of a request, its model's name (empty where it is not known yet), and the ids that end answers.
BuildAnswer = Callable[[Request, str, TokenTexts, Sequence[int]], Built]
