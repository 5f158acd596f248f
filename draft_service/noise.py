"""Random numbers in compiled loops: the shared noise of COUPLED verification, and the draft's own coins.

A test checks that the noise is bit-equal to `outrider.noise`.
"""

from __future__ import annotations

import math

import numpy as np

from draft_service.compiling import Numbers, compiled
from outrider import noise

# Typed constants, since numba turns uint64 mixed with a plain int into a float.
_M0, _M1 = np.uint64(noise.PHILOX_M0), np.uint64(noise.PHILOX_M1)
_W0, _W1 = np.uint64(noise.PHILOX_W0), np.uint64(noise.PHILOX_W1)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@compiled
def noise_word(seed: np.uint64, position: np.uint64, token: np.uint64) -> np.uint64:
    """The Philox4x32-10 word of one token at one position, below 2**32. All arguments are uint64."""
    c0, c1, c2, c3 = token >> np.uint64(2), position & _LOW, position >> _SHIFT, np.uint64(0)
    k0, k1 = seed & _LOW, seed >> _SHIFT
    for _ in range(noise.PHILOX_ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    lane = token & np.uint64(3)
    if lane == np.uint64(0):
        return c0
    if lane == np.uint64(1):
        return c1
    return c2 if lane == np.uint64(2) else c3


@compiled
def exponential(seed: np.uint64, position: np.uint64, token: np.uint64) -> float:
    """E of one token at one position: strictly positive."""
    uniform = (float(noise_word(seed, position, token)) + 0.5) * 2.0**-32
    return -math.log1p(-uniform)


def first_coin(seed: int, salt: int, length: int) -> int:
    """The state of the coins for a tree after `length` tokens; the salt makes them independent of other uses of the
    request's seed."""
    return (seed ^ salt) * (2 * length + 1) & 0xFFFFFFFFFFFFFFFF


@compiled
def coin_of(state: np.uint64) -> float:
    """Uniform in [0, 1) from one state of splitmix64 (Steele, Lea, Flood 2014); the caller adds `GOLDEN` per coin."""
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return float(mixed >> np.uint64(11)) * 2.0**-53


@compiled
def draw_place(left: Numbers, size: int, coin: float) -> int:
    """The index of a draw by the weights left, at least one of them positive. The caller zeroes its weight."""
    point = int(coin * left[:size].sum())
    for i in range(size):
        point -= left[i]
        if point < 0:
            return i
    return 0
