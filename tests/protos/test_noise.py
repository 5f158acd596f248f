"""The shared noise: Random123's known answers, an independent implementation, and vectors pinned for other languages.

`noise_vectors.json` is read by the tests of every SDK. Integers above 2**53 are strings there, for JavaScript's sake.
It was written by `python tests/protos/write_noise_vectors.py` and must never change: seeded outputs depend on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chi_squared import chi_squared
from hypothesis import given
from hypothesis import strategies as st

from outrider.noise import exponentials, noise_words, philox

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("noise_vectors.json").read_text())


def philox_in_plain_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, sharing no code with what it checks."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for round_number in range(10):
        if round_number:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], id="zeros"),
        pytest.param([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD], id="ones"),
        pytest.param(
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            id="digits of pi",
        ),
    ],
)
def test_random123_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox(np.array([counter], dtype=np.uint64), (key[0], key[1])).tolist() == [expected]
    assert philox_in_plain_integers(counter, key) == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_words_are_philox_of_the_documented_counter(seed: int, position: int, token: int) -> None:
    block = philox_in_plain_integers([token // 4, position % 2**32, position >> 32, 0], [seed % 2**32, seed >> 32])
    assert noise_words(seed, position, np.array([token], dtype=np.uint64)).tolist() == [block[token % 4]]


@pytest.mark.parametrize("vector", VECTORS["words"], ids=lambda v: f"seed {v['seed']} at {v['position']}")
def test_pinned_words(vector: dict[str, Any]) -> None:
    words = noise_words(int(vector["seed"]), int(vector["position"]), np.array(vector["token_ids"]))
    assert words.tolist() == vector["words"]
    np.testing.assert_allclose(exponentials(words), vector["exponentials"], rtol=1e-14)


@pytest.mark.parametrize("race", VECTORS["races"], ids=lambda race: f"seed {race['seed']} at {race['position']}")
def test_pinned_races(race: dict[str, Any]) -> None:
    weights = np.array(race["weights"], dtype=np.float64)
    times = exponentials(noise_words(int(race["seed"]), int(race["position"]), np.arange(len(weights))))
    with np.errstate(divide="ignore"):
        assert int(np.argmin(times / weights)) == race["winner"]


def test_exponentials_are_positive_and_finite_at_both_ends() -> None:
    ends = exponentials(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert ends[0] > 0 and np.isfinite(ends[1])


def test_the_winner_follows_the_distribution() -> None:
    """5,000 races over five tokens: the chi-square distance from the distribution is that of honest sampling."""
    distribution = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    races = 5_000
    ids = np.arange(5)
    winners = [int(np.argmin(exponentials(noise_words(7, position, ids)) / distribution)) for position in range(races)]
    counts = np.bincount(winners, minlength=5)
    assert chi_squared(counts, distribution * races) > 1e-4
