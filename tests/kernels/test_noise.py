"""The PyTorch noise is the contract's noise, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider import noise as contract
from tree_kernels.philox import (
    _philox_on_device,
    exponentials,
    gumbel_words,
    gumbel_words_of,
    philox,
    uniforms,
)

SEEDS = [0, 1, 2**32 - 1, 2**32, 0x9E3779B97F4A7C15, 2**64 - 1]
POSITIONS = [0, 1, 4095, 2**32 - 1, 2**32, 2**63, 2**64 - 1]


@pytest.mark.parametrize("philox", [philox, _philox_on_device], ids=["here", "on a device"])
def test_the_published_vectors_of_philox(philox: Any) -> None:
    """Random123's known answers for philox4x32-10."""
    low, middle, high = philox(torch.tensor([0]), 0, 0, 0), (1 << 64) - 1, 0xFFFFFFFF
    assert low[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(torch.tensor([0xFFFFFFFF]), middle, high, middle)
    assert ones[:, 0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = philox(torch.tensor([0x243F6A88]), 0x13198A2E85A308D3, 0x03707344, 0x299F31D0A4093822)
    assert digits[:, 0].tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_race_words_equal_the_contracts(seed: int, position: int) -> None:
    for vocabulary in (1, 3, 4, 211):
        expected = contract.noise_words(seed, position, np.arange(vocabulary))
        assert np.array_equal(gumbel_words(seed, position, vocabulary).numpy(), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_device_draws_what_the_host_draws(seed: int, position: int) -> None:
    blocks = torch.tensor([0, 1, 77, 2**31, 2**32 - 1])
    assert torch.equal(_philox_on_device(blocks, position, 1, seed), philox(blocks, position, 1, seed))


def test_words_of_single_tokens_equal_those_of_the_whole_vocabulary() -> None:
    ids = torch.tensor([0, 5, 6, 7, 100_003, 151_935])
    every = gumbel_words(77, 12, 151_936)
    assert torch.equal(gumbel_words_of(77, 12, ids), every[ids])


def test_exponentials_equal_the_contracts_to_rounding() -> None:
    words = contract.noise_words(3, 4, np.arange(50_000))
    ours = exponentials(gumbel_words(3, 4, 50_000))
    np.testing.assert_allclose(ours.numpy(), contract.exponentials(words), rtol=1e-14)
    assert ours.dtype == torch.float64


def test_exponentials_are_positive_and_finite_at_both_ends() -> None:
    ends = exponentials(torch.tensor([0, 2**32 - 1]))
    assert bool((ends > 0).all()) and bool(ends.isfinite().all())


def test_uniforms_are_uniform_and_differ_by_seed_stream_and_from_the_race() -> None:
    coins = uniforms(1, 2, 100_001)
    assert coins.shape == (100_001,) and coins.dtype == torch.float64
    assert float(coins.min()) >= 0.0 and float(coins.max()) < 1.0
    assert abs(float(coins.mean()) - 0.5) < 4 / (12 * 100_001) ** 0.5
    histogram = torch.histc(coins, bins=16, min=0, max=1)
    assert float(((histogram - 100_001 / 16) ** 2 / (100_001 / 16)).sum()) < 45
    assert torch.equal(uniforms(1, 2, 5), coins[:5])
    for other in (uniforms(2, 2, 5), uniforms(1, 3, 5), uniforms(1, 2 + 2**32, 5)):
        assert not torch.equal(other, coins[:5])
    race = (gumbel_words(1, 2, 4).double() * 2.0**-32).tolist()
    assert all(abs(float(coin) - word) > 1e-6 for coin in coins[:4] for word in race)


def test_no_coins_is_no_error() -> None:
    assert uniforms(1, 2, 0).shape == (0,)
