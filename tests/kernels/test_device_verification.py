"""The loop over sequences behind `DeviceVerifier`: distributions as the target's own, packing, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tree_kernels.philox import uniforms
from tree_kernels.verification import (
    Chance,
    DeviceVerifier,
    Mode,
    RowsToVerify,
    Verdicts,
    coupled_token,
    records,
    rejection_walk,
)
from tree_kernels.verification.records import (
    MAX_SUPPORT,
    pack_distributions,
    pack_parameters,
    unpack_distributions,
    unpack_parameters,
)
from tree_kernels.verification.torch_backend import row_distribution

V = 60


def random_logits(rows: int, seed: int, ties: bool = False) -> Tensor:
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.round() if ties else logits


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_step_of_every_mode_says_what_each_sequence_says_alone() -> None:
    logits = random_logits(12, 3)
    best = logits.argmax(-1).tolist()
    tokens = [0, best[0], 5, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    parents = [0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    distributions = {4: ([1, 2, 9], [3, 4, 5])}
    asked = [
        RowsToVerify(0, 3),
        RowsToVerify(3, 0, Mode.COUPLED),
        RowsToVerify(3, 1, Mode.COUPLED, seed=11, position=2**40, top_p=0.9),
        RowsToVerify(4, 4, Mode.REJECTION, seed=5, position=9, top_k=30),
    ]
    verifier = DeviceVerifier("cpu", V, max_sequences=6, max_rows=12)
    parameters = torch.from_numpy(verifier.pack(asked))
    packed_distributions = torch.from_numpy(verifier.pack_distributions(distributions))
    verdicts = verifier.sampled(logits, integers(tokens), integers(parents), parameters, packed_distributions)
    coins = iter(uniforms(5, 9, 8).tolist())
    rejection = rejection_walk(
        parents[4:8],
        tokens[4:8],
        {0: distributions[4]},
        lambda row, _: row_distribution(asked[3], logits[4 + row]),
        Chance(lambda: next(coins)),
    )
    accepted = len(rejection.accepted_rows)
    count = verdicts.accepted_counts.tolist()
    assert count == [2 if best[1] == 5 else 1, 0, 0, accepted, 0, 0]
    coupled = coupled_token(row_distribution(asked[2], logits[3]), 11, 2**40)
    assert verdicts.next_tokens.tolist() == [best[count[0]], -1, coupled, rejection.next_token, -1, -1]
    assert verdicts.accepted_rows[:1].tolist() == [1]
    assert verdicts.accepted_rows[4 : 4 + accepted].tolist() == list(rejection.accepted_rows)
    copy = Verdicts.over(verdicts.tensor.clone(), 6)
    assert torch.equal(copy.accepted_rows, verdicts.accepted_rows)


def test_a_chain_needs_no_parents() -> None:
    logits = random_logits(4, 1)
    best = logits.argmax(-1).tolist()
    verifier = DeviceVerifier("cpu", V, 1, 4)
    parameters = torch.from_numpy(verifier.pack([RowsToVerify(0, 4, is_chain=True)]))
    verdicts = verifier.greedy(logits, integers([0, *best[:3]]), integers([0] * 4), parameters)
    assert verdicts.accepted_counts.tolist() == [3] and verdicts.accepted_rows[:3].tolist() == [1, 2, 3]
    assert verdicts.next_tokens.tolist() == [best[3]]


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION], ids=lambda mode: mode.name)
def test_at_temperature_0_every_mode_is_greedy(mode: Mode) -> None:
    packed = pack_parameters([RowsToVerify(0, 2, mode, temperature=0.0, top_p=0.5)], 1, 2, V)
    assert unpack_parameters(packed, 1)[0].mode is Mode.GREEDY


def test_what_is_packed_is_what_is_unpacked() -> None:
    asked = [
        RowsToVerify(3, 4, Mode.COUPLED, 2**64 - 1, 2**33 + 7, 0.3, 40, 0.95, 0.01, True),
        RowsToVerify(8, 256, Mode.REJECTION, 2**63, 2**64 - 2, 1e-3, 0, 0.1, 0.5, False),
        RowsToVerify(0, 2, position=5),
    ]
    packed = pack_parameters(asked, 5, 300, V)
    assert unpack_parameters(packed, 5)[:3] == asked
    rows = packed[-300:].tolist()
    assert rows[:9] == [2, 2, -1, 0, 0, 0, 0, -1, 1] and rows[263:] == [1, *[-1] * 36]
    distributions = {2: ([5, 1], [3, 9]), 0: ([7], [1])}
    assert unpack_distributions(pack_distributions(distributions, 4), 4) == distributions


def test_every_field_stands_where_kernels_look_for_it() -> None:
    asked = RowsToVerify(3, 4, Mode.REJECTION, 2**63 + 5, 2**33 + 7, 0.3, 40, 0.95, 0.01, True)
    packed = pack_parameters([RowsToVerify(0, 1), asked], 2, 300, V)
    record = packed[records.RECORD : 2 * records.RECORD]

    def at(name: str, kind: str) -> Any:
        place = records.PLACES[name]
        return record[place:].view(kind)[0] if kind == "i4" else record[place : place + 2].view(kind)[0]

    integers = ("first_row", "rows", "mode", "is_chain", "top_k", "filtered")
    assert [at(name, "i4") for name in integers] == [3, 4, Mode.REJECTION, 1, 40, 1]
    assert [at(name, "u8") for name in ("seed", "position")] == [2**63 + 5, 2**33 + 7]
    assert [at(name, "f8") for name in ("temperature", "top_p", "min_p")] == [0.3, 0.95, 0.01]


WRONG_ROWS = {
    "a tree above the limit": RowsToVerify(0, 257),
    "rows behind the last": RowsToVerify(299, 2),
    "a negative row": RowsToVerify(-1, 2),
}


@pytest.mark.parametrize("asked", WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_rows_that_are_not_there_are_refused(asked: RowsToVerify) -> None:
    with pytest.raises(ValueError, match="sequence 0 has rows"):
        pack_parameters([asked], 1, 300, V)


def test_more_sequences_than_room_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1 sequences, got 2"):
        DeviceVerifier("cpu", V, 1, 4).pack([RowsToVerify(0, 1), RowsToVerify(1, 1)])


WRONG_DISTRIBUTIONS = {
    "too many ids": {0: (list(range(MAX_SUPPORT + 1)), [1] * (MAX_SUPPORT + 1))},
    "a weight too few": {0: ([1, 2], [1])},
    "no such row": {4: ([1], [1])},
}


@pytest.mark.parametrize("distributions", WRONG_DISTRIBUTIONS.values(), ids=WRONG_DISTRIBUTIONS)
def test_distributions_that_the_kernels_cannot_hold_are_refused(
    distributions: dict[int, tuple[list[int], list[int]]],
) -> None:
    with pytest.raises(ValueError, match="expected"):
        DeviceVerifier("cpu", V, 1, 4).pack_distributions(distributions)


def test_tensors_that_do_not_fit_are_refused() -> None:
    verifier = DeviceVerifier("cpu", V, 2, 4)
    logits, rows = random_logits(4, 0), integers([0] * 4)
    parameters = torch.from_numpy(verifier.pack([RowsToVerify(0, 4)]))
    with pytest.raises(ValueError, match="expected logits"):
        verifier.greedy(logits[:, 1:], rows, rows, parameters)
    with pytest.raises(ValueError, match="at most 4 rows"):
        verifier.greedy(random_logits(5, 0), rows, rows, parameters)
    with pytest.raises(ValueError, match=f"expected {verifier.integers} parameters"):
        verifier.greedy(logits, rows, rows, parameters[1:])
    with pytest.raises(ValueError, match="expected int32"):
        verifier.greedy(logits, rows.long(), rows, parameters)


def test_filters_are_noticed_where_they_leave_something_out() -> None:
    plain = RowsToVerify(0, 1, Mode.COUPLED)
    assert not plain.filtered
    assert all(plain._replace(**one).filtered for one in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}))
    assert not RowsToVerify(0, 1, Mode.GREEDY, top_k=3).filtered
