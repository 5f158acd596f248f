"""Philox4x32-10 in PyTorch and NumPy: the noise of COUPLED verification and the private coins of REJECTION.

Token y at absolute position t of a request with 64-bit seed s has E(s, t, y) = -log1p(-u), u = (x + 0.5) * 2**-32,
where x is word y % 4 of Philox with key (s mod 2**32, s >> 32) and counter (y // 4, t mod 2**32, t >> 32, 0). Every
service of Outrider computes the same x, bit for bit. Private coins set the last counter word to 1, so that they never
meet the shared noise.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_LOW = 0xFFFFFFFF
_HOST_MULTIPLIERS = np.array(_MULTIPLIERS, np.uint64)[:, None]
_HALF, _LOW_WORD = np.uint64(32), np.uint64(_LOW)
_Word = TypeVar("_Word", int, Tensor)


def philox(blocks: Tensor, middle: int, domain: int, seed: int) -> Tensor:
    """Philox4x32-10 of the counters (block, middle mod 2**32, middle >> 32, domain) under key `seed`.

    Blocks are [n] int64, below 2**32; `middle` and `seed` have 64 bits. Returns [4, n] int64, random words below 2**32.
    """
    if blocks.device.type == "cpu":
        return torch.from_numpy(_philox_on_host(blocks.numpy(), middle, domain, seed))
    return _philox_on_device(blocks, middle, domain, seed)


def _philox_on_device(blocks: Tensor, middle: int, domain: int, seed: int) -> Tensor:
    even = torch.stack([blocks, torch.full_like(blocks, middle >> 32)])
    odd = blocks.new_tensor([[middle & _LOW], [domain]])
    return _rounds(even, odd, blocks.new_tensor(_round_keys(seed & _LOW, seed >> 32))[..., None])


def _rounds(even: Tensor, odd: Tensor, keys: Iterable[Tensor]) -> Tensor:
    """[4, ..., n] from the words of the counters, even ones [2, ..., n] and odd ones, and the keys of the rounds, both
    [2, ..., 1]. Waits for no device and copies nothing to one."""
    # Both halves side by side make each round a handful of operations. The products wrap around int64, which keeps
    # their bits; the arithmetic shift's copies of the sign are masked away.
    multipliers = torch.stack([torch.full_like(odd[0], multiplier) for multiplier in _MULTIPLIERS])
    for key in keys:
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_and_(_LOW).bitwise_xor_(odd).bitwise_xor_(key)
        odd = product.bitwise_and_(_LOW)
    return torch.stack([even[0], odd[0], even[1], odd[1]])


def _philox_on_host(blocks: npt.NDArray[np.int64], middle: int, domain: int, seed: int) -> npt.NDArray[np.int64]:
    # For the few blocks of a row's coins PyTorch takes longer to launch a hundred operations than to compute them.
    even = np.empty((2, len(blocks)), np.uint64)
    even[0], even[1] = blocks, middle >> 32
    odd = np.array([[middle & _LOW], [domain]], np.uint64)
    for key in np.array(_round_keys(seed & _LOW, seed >> 32), np.uint64)[..., None]:
        product = (even * _HOST_MULTIPLIERS)[::-1]
        even, odd = product >> _HALF ^ odd ^ key, product & _LOW_WORD
    return np.stack([even[0], odd[0], even[1], odd[1]]).view(np.int64)


def _round_keys(low: _Word, high: _Word) -> list[tuple[_Word, _Word]]:
    """Both words of each round's key, from those of the seed."""
    return [((low + i * 0x9E3779B9) & _LOW, (high + i * 0xBB67AE85) & _LOW) for i in range(10)]


def gumbel_words(seed: int, position: int, vocabulary_size: int, device: torch.device | str = "cpu") -> Tensor:
    """[V] int64: the word x of every token at one position. Costs V / 4 Philox blocks."""
    blocks = torch.arange((vocabulary_size + 3) // 4, device=device)
    return philox(blocks, position, 0, seed).t().reshape(-1)[:vocabulary_size]


def gumbel_words_of(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """[n] int64: the word x of the given tokens at one position. token_ids: [n] int64."""
    words = philox(token_ids >> 2, position, 0, seed)
    return words.gather(0, (token_ids & 3)[None])[0]


def gumbel_words_by_sequence(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """[B, n] int64: `gumbel_words_of` for every sequence with its own seed [B] int64 (of the same 64 bits) and position
    [B] int64, good in a captured graph. token_ids: [B, n] int64."""
    even = torch.stack([token_ids >> 2, (positions >> 32 & _LOW)[:, None].expand_as(token_ids)])
    odd = torch.stack([positions & _LOW, torch.zeros_like(positions)])[..., None]
    keys = _round_keys(seeds & _LOW, seeds >> 32 & _LOW)
    words = _rounds(even, odd, [torch.stack(key)[..., None] for key in keys])
    return words.gather(0, (token_ids & 3)[None])[0]


def exponentials(words: Tensor) -> Tensor:
    """E of each word: strictly positive, since u lies strictly between 0 and 1. [n] int64 -> [n] float64."""
    return words.double().add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()


def uniforms(seed: int, stream: int, count: int) -> Tensor:
    """[count] float64 in [0, 1), multiples of 2**-53: coins of one request that no draft ever sees. `stream` is a
    64-bit number that differs for every use, such as the absolute position of the root."""
    words = philox(torch.arange((count + 1) // 2), stream, 1, seed)
    # 53 bits from each pair of words, as in numpy's Generator.random.
    high, low = words[0::2], words[1::2]
    return ((high >> 5 << 26) + (low >> 6)).t().reshape(-1)[:count].double() * 2.0**-53
