"""Chunks that are encoded by hand are those that protobuf encodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling import TokenLogprobs
from outrider.v1 import target_pb2 as pb
from target_service.api import replies
from target_service.core.sequence import StepVerdict

numbers = st.integers(0, 2**31 - 1)


@given(st.lists(numbers, max_size=9), st.text(max_size=200), numbers, st.integers(0, 2**64 - 1), numbers, numbers)
def test_encoded_as_protobuf_does(
    token_ids: list[int], text: str, drafted: int, step: int, version: int, compute_ns: int
) -> None:
    verdict = StepVerdict(
        1, step, (), tuple(token_ids), drafted, queue_ns=step, compute_ns=compute_ns, model_version=version
    )
    made = replies.chunk(verdict)
    made.chunk.text = text
    encoded = replies.encoded_chunk(verdict, text)
    assert encoded is not None
    assert pb.GenerateResponse.FromString(encoded) == made
    assert encoded == made.SerializeToString()


def test_what_has_more_to_say_is_left_to_protobuf() -> None:
    verdict = StepVerdict(1, 0, (), (5,), 0, (TokenLogprobs(-0.5, ()),))
    assert replies.encoded_chunk(verdict, "") is None
