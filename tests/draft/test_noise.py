"""The drafter's compiled noise is the contract's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from draft_service.noise import exponential, noise_word
from outrider import noise


@examples(200)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
    token=st.integers(0, 2**32 - 1),
)
def test_words_equal_the_contract(seed: int, position: int, token: int) -> None:
    expected = noise.noise_words(seed, position, np.array([token]))[0]
    assert int(noise_word(np.uint64(seed), np.uint64(position), np.uint64(token))) == int(expected)


@pytest.mark.parametrize("lane", range(4))
def test_exponentials_follow_the_contract(lane: int) -> None:
    tokens = np.arange(lane, 400, 4)
    expected = noise.exponentials(noise.noise_words(7, 11, tokens))
    actual = [exponential(np.uint64(7), np.uint64(11), np.uint64(token)) for token in tokens]
    # The words are equal; the logarithms of two libraries may differ in their last bit.
    assert actual == pytest.approx(expected.tolist(), rel=1e-14)
