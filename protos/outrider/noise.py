"""The shared noise of COUPLED verification: a counter RNG that gives every service the same bits.

Token y at absolute position t of a request with 64-bit seed s wins the exponential race (the Gumbel-max trick)

    argmin over y of E(s, t, y) / p(y),   E = -log1p(-u),   u = (x + 0.5) * 2**-32,

where x is word y % 4 of Philox4x32-10 with key (s mod 2**32, s >> 32) and counter
(y // 4, t mod 2**32, t >> 32, 0). Position t is the index of the token being chosen: the first token after a prompt
of n tokens has t = n. All siblings of a tree share the noise of their position, so a drafter that ranks candidates by
the same draw over its own distribution tends to draft the token that the target will choose.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); Daliri, Musco, Suresh,
"Coupling without communication and drafter-invariant speculative decoding" (arXiv 2408.07978).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
PHILOX_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10: counters [n, 4] and two words of key, all below 2**32, to random words [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0 = c0 * np.uint64(PHILOX_M0)
        product1 = c2 * np.uint64(PHILOX_M1)
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + PHILOX_W0) & 0xFFFFFFFF
        k1 = (k1 + PHILOX_W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def noise_words(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """The word x of each token at one position. token_ids: [n]; returns [n]."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    counter = np.zeros((len(ids), 4), dtype=np.uint64)
    counter[:, 0] = ids >> np.uint64(2)
    counter[:, 1] = position & 0xFFFFFFFF
    counter[:, 2] = position >> 32
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return words[np.arange(len(ids)), (ids & np.uint64(3)).astype(np.intp)]


def exponentials(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """E of each word: strictly positive, since u lies strictly between 0 and 1. [n] -> [n]."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log1p(-uniform)
