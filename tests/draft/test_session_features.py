"""Features of a stream's sequences: with advances, in pieces, and malformed ones, which harm their sequence only."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from draft_harness import draft_over
from eagle_drafting import draft, make_drafter, same_tree, states_of, text
from eagle_heads import VOCABULARY, make_head
from scripted_drafter import Listener, ScriptedDrafter, opening
from torch import Tensor

from draft_service.drafters.base import features_of
from draft_service.drafters.hidden_states import read_vectors
from draft_service.in_process import InprocessLink
from draft_service.session import ProposeSession, SequenceAdmission
from outrider.errors import InvalidField, OutriderError, UnknownSequence
from outrider.tree import TokenTree
from outrider.v1 import draft_pb2
from outrider.wire.drafts import advance_to_pb, info_from_pb
from outrider.wire.frames import SequenceAdvance, SequenceFeatures, SequenceGrowth, Vectors
from outrider.wire.hidden_states import features_to_pb

WIDTH = 48
LENGTH = 12


def travelling(states: Tensor) -> Vectors:
    """[n, width] as they are sent."""
    return Vectors("float32", states.shape[1], states.numpy().tobytes())


def session_of(length: int = LENGTH) -> ProposeSession:
    session = ProposeSession(make_drafter(), SequenceAdmission(10), "default")
    session.grant(100)
    session.open(opening(1, text(length), vocabulary_size=VOCABULARY))
    session.propose_growth()
    return session


def tree_of(growth: SequenceGrowth, root: int) -> TokenTree:
    shift = growth.first_node_id - 1
    parents = (0, *(parent - shift if parent else 0 for parent in growth.parent_ids))
    return TokenTree((root, *growth.token_ids), parents, (1.0, *growth.scores))


def test_features_with_an_advance_belong_to_the_tokens_before_the_new_root() -> None:
    tokens, states = text(LENGTH + 3), states_of(make_head(), LENGTH + 3)
    session = session_of()
    session.add_features(SequenceFeatures(1, 0, travelling(states[: LENGTH - 5])))
    # A prompt's last piece and what the step committed come together.
    session.advance(SequenceAdvance(1, 1, tuple(tokens[LENGTH:]), travelling(states[LENGTH - 5 : LENGTH + 2])))
    (growth,) = session.propose_growth()
    same_tree(tree_of(growth, tokens[-1]), draft(make_drafter(), tokens, states))


def test_growth_is_owed_once_an_open_in_the_middle_has_its_features() -> None:
    tokens, states = text(LENGTH), states_of(make_head(), LENGTH)
    session = session_of()
    session.add_features(SequenceFeatures(1, 3, travelling(states[3:7])))
    session.absorb([1])
    assert session.propose_growth() == []
    session.add_features(SequenceFeatures(1, 7, travelling(states[7 : LENGTH - 1])))
    session.absorb([1])
    (growth,) = session.propose_growth()
    assert growth.base_step == 0 and growth.token_ids
    assert tree_of(growth, tokens[-1]).token_ids[0] == tokens[-1]


def test_a_sequence_that_begins_alike_says_what_it_needs_no_more() -> None:
    tokens, states = text(LENGTH), states_of(make_head(), LENGTH)
    session = session_of()
    assert session.open(opening(2, tokens, vocabulary_size=VOCABULARY)).features_from == 0
    session.add_features(SequenceFeatures(1, 0, travelling(states[: LENGTH - 1])))
    session.absorb([1])
    session.propose_growth()
    found = session.open(opening(3, [*tokens, 7], vocabulary_size=VOCABULARY)).features_from
    assert 0 < found < LENGTH
    session.add_features(SequenceFeatures(3, found, travelling(states[found:LENGTH])))
    (growth,) = [one for one in session.propose_growth() if one.sequence_id == 3]
    same_tree(tree_of(growth, 7), draft(make_drafter(), [*tokens, 7], states))


def test_what_was_sent_before_is_ignored() -> None:
    states = states_of(make_head(), LENGTH)
    session, once = session_of(), session_of()
    once.add_features(SequenceFeatures(1, 0, travelling(states[: LENGTH - 1])))
    session.add_features(SequenceFeatures(1, 0, travelling(states[:6])))
    session.add_features(SequenceFeatures(1, 2, travelling(states[2 : LENGTH - 1])))
    assert session.propose_growth() == once.propose_growth()


@pytest.mark.parametrize(
    "features",
    [
        SequenceFeatures(1, 0, travelling(torch.zeros(LENGTH, WIDTH))),
        SequenceFeatures(1, LENGTH - 1, travelling(torch.zeros(1, WIDTH))),
        SequenceFeatures(1, 1 << 31, travelling(torch.zeros(1, WIDTH))),
        SequenceFeatures(1, 0, travelling(torch.zeros(2, WIDTH - 1))),
        SequenceFeatures(1, 0, travelling(torch.full((1, WIDTH), float("nan")))),
        SequenceFeatures(1, 0, travelling(torch.full((1, WIDTH), float("inf")))),
    ],
    ids=["past the root", "the root's own", "far away", "another width", "no numbers", "infinite"],
)
def test_features_that_do_not_fit_are_refused(features: SequenceFeatures) -> None:
    with pytest.raises(InvalidField):
        session_of().add_features(features)


def test_an_advance_brings_no_more_than_there_are_tokens() -> None:
    session = session_of()
    with pytest.raises(InvalidField):
        session.advance(SequenceAdvance(1, 1, (5,), travelling(torch.zeros(LENGTH + 1, WIDTH))))


def test_features_that_nobody_wants_are_refused() -> None:
    session = ProposeSession(ScriptedDrafter(), SequenceAdmission(10), "default")
    session.open(opening())
    with pytest.raises(InvalidField, match="not asked for"):
        session.add_features(SequenceFeatures(1, 0, travelling(torch.zeros(1, WIDTH))))
    with pytest.raises(UnknownSequence):
        session.add_features(SequenceFeatures(2, 0, travelling(torch.zeros(1, WIDTH))))


def test_features_in_bytes_are_read_as_they_were() -> None:
    values = torch.randn(5, 8)
    half = Vectors("bfloat16", 8, values.bfloat16().view(torch.uint8).numpy().tobytes())
    assert torch.equal(read_vectors(half), values.bfloat16())
    scales = values.abs().amax(1) / 448
    small = (values / scales[:, None]).to(torch.float8_e4m3fn)
    eighth = Vectors("float8_e4m3", 8, small.view(torch.uint8).numpy().tobytes(), tuple(scales.tolist()))
    assert torch.allclose(read_vectors(eighth), values, rtol=0.07, atol=float(scales.max()))
    with pytest.raises(InvalidField):
        read_vectors(Vectors("float8_e4m3", 1, b"\x7f"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_element_that_is_no_number_is_refused(dtype: torch.dtype, value: float) -> None:
    name = str(dtype).removeprefix("torch.")
    for rows, width, place in ((1, 1, 0), (3, 1000, 0), (3, 1000, 1717), (2, 4096, 8191)):
        values = torch.linspace(-1e38, 1e38, rows * width).to(dtype)
        sound = Vectors(name, width, values.view(torch.uint8).numpy().tobytes())
        assert torch.equal(read_vectors(sound), values.view(rows, width))
        values[place] = value
        with pytest.raises(InvalidField, match="finite"):
            read_vectors(Vectors(name, width, values.view(torch.uint8).numpy().tobytes()))
    with pytest.raises(InvalidField, match="finite"):
        read_vectors(Vectors("float8_e4m3", 1, b"\x7e", (3e38,)))


def _shift(pb: draft_pb2.SequenceFeatures) -> None:
    pb.position = 3


def _spoil(pb: draft_pb2.SequenceFeatures) -> None:
    pb.features.data = b"\xff" * len(pb.features.data)


MALFORMED: dict[str, Callable[[draft_pb2.SequenceFeatures], object]] = {
    "no numbers": _spoil,
    "cut short": lambda pb: setattr(pb.features, "data", pb.features.data[:-1]),
    "another type": lambda pb: setattr(pb.features, "dtype", 2),
    "too many": _shift,
    "unknown sequence": lambda pb: setattr(pb, "sequence_id", 77),
}


@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_features_harm_their_sequence_only(
    spoil: Callable[[draft_pb2.SequenceFeatures], object],
) -> None:
    tokens, states = text(LENGTH), states_of(make_head(), LENGTH)
    good = features_to_pb(SequenceFeatures(1, 0, travelling(states[: LENGTH - 1])))
    bad = features_to_pb(SequenceFeatures(2, 0, travelling(states[: LENGTH - 1])))
    spoil(bad)
    drafter = make_drafter()
    async with draft_over(drafter, vocabulary_size=VOCABULARY) as served, served.stream() as stream:
        info = info_from_pb(await served.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()))
        assert info.features is not None and info.features == features_of(drafter)
        for number in (1, 2):
            await stream.open(opening(number, tokens, vocabulary_size=VOCABULARY))
            await stream.opened()
            assert not (await stream.growth()).sequences[0].token_ids
        await stream.send(features=draft_pb2.SendFeatures(sequences=[bad, good]))
        failed, error = await stream.failure()
        assert failed == bad.sequence_id and isinstance(error, OutriderError)
        (growth,) = (await stream.growth()).sequences
        assert growth.sequence_id == 1 and growth.token_ids
        advance = advance_to_pb(SequenceAdvance(1, 1, (5,), travelling(states[-1:])))
        await stream.send(advance=draft_pb2.AdvanceSequences(sequences=[advance]))
        assert (await stream.growth()).sequences[0].token_ids


def test_a_link_without_a_network_brings_them_too() -> None:
    tokens, states, heard = text(LENGTH), states_of(make_head(), LENGTH), Listener()
    link = InprocessLink(make_drafter(), heard)
    assert heard.infos[0].features is not None and heard.infos[0].features.width == WIDTH
    for number in (1, 2):
        link.open(opening(number, tokens, vocabulary_size=VOCABULARY))
    spoilt = travelling(torch.full((1, WIDTH), float("nan")))
    link.send_features([SequenceFeatures(2, 0, spoilt), SequenceFeatures(1, 0, travelling(states[: LENGTH - 1]))])
    assert [(failure.sequence_id, failure.reason) for failure in heard.failures] == [(2, "INVALID_FIELD")]
    same_tree(tree_of(heard.growths[-1], tokens[-1]), draft(make_drafter(), tokens, states))
    link.stop()
