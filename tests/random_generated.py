"""Random steps whose logits are shaped, or whose log-probabilities are gathered: for tests and their workers."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tree_kernels.logit_shaping import SequenceTexts, Shaping
from tree_kernels.verification import RowsToVerify, Verdicts
from tree_kernels.verification.records import pack_parameters

MAX_SEQUENCES, MAX_ROWS = 6, 48


class GeneratedStep(NamedTuple):
    """A step of trees behind texts in pages, each behind other rows of its sequence."""

    logits: Tensor  # [R, V + 3]
    token_ids: Tensor  # [R]
    parents: Tensor  # [R]
    parameters: Tensor
    in_pages: SequenceTexts
    asked: list[RowsToVerify]
    shapings: list[Shaping]
    texts: list[list[int]]  # of each sequence, its tree's root included
    verdicts: Verdicts
    masks: tuple[NDArray[np.int32], NDArray[np.int32]]  # as `DeviceShaper.mask` takes them


def random_shaping(rng: random.Random, vocabulary: int, prompt_length: int) -> Shaping:
    """Some of all that shapes logits."""
    tokens = [rng.randrange(vocabulary) for _ in range(rng.choice((0, 3, 40)))]
    return Shaping(
        prompt_length,
        rng.choice((0.0, 0.4, -1.3)),
        rng.choice((0.0, 0.3)),
        rng.choice((1.0, 1.3, 0.7, 1e300)),
        {token: rng.uniform(-9, 9) for token in tokens},
        rng.choice((0, 0, prompt_length, 90)),
        tuple({rng.randrange(vocabulary) for _ in range(rng.choice((0, 2)))}),
    )


def random_generated(
    seed: int, vocabulary: int, page_size: int, dtype: torch.dtype = torch.float32, longest: int = 60
) -> GeneratedStep:
    """Up to `MAX_SEQUENCES`, one of which has no rows; the last rows belong to none."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = rng.randrange(2, MAX_SEQUENCES + 1)
    asked, shapings, texts = list[RowsToVerify](), list[Shaping](), list[list[int]]()
    starts, prefixes, page_starts, pages = [0], list[int](), list[int](), list[int]()
    token_ids, parents = list[int](), list[int]()
    # Room for the longest text and tree of every sequence.
    free = torch.randperm(MAX_SEQUENCES * -(-(longest + 6) // page_size), generator=generator).tolist()
    tokens = torch.full((len(free) * page_size,), -1, dtype=torch.int32)
    for b in range(count):
        before, rows = rng.randrange(3), 0 if b == 1 else rng.randrange(1, 7)
        text = [rng.randrange(vocabulary) for _ in range(rng.randrange(before + 1, longest))]
        own = [free.pop() for _ in range(-(-(len(text) + rows) // page_size))]
        for key, token in enumerate(text):
            tokens[own[key // page_size] * page_size + key % page_size] = token
        is_chain = rng.random() < 0.3
        shaping = rng.randrange(2) * (b + 1)
        logprobs = rng.choice((0, 1, 4, 21)) if vocabulary > 20 else rng.choice((0, 1, 3))
        first = len(token_ids) + before
        asked.append(RowsToVerify(first, rows, is_chain=is_chain, shaping=shaping, logprobs=logprobs))
        shapings.append(random_shaping(rng, vocabulary, rng.randrange(1, len(text) + 1)))
        texts.append(text)
        if rows:
            token_ids += text[-1 - before :]
            # Repeated tokens of the text and of the path count.
            token_ids += [rng.choice((text[-1], rng.randrange(vocabulary))) for _ in range(rows - 1)]
            parents += [0] * before + [0 if is_chain or not row else rng.randrange(row) for row in range(rows)]
        prefixes.append(len(text) - 1 - before)
        starts.append(len(token_ids))
        page_starts.append(len(pages))
        pages += own
    for one in (token_ids, parents):
        one += [0, 0]
    logits = torch.randn(len(token_ids), vocabulary + 3, generator=generator).mul_(4).round(decimals=1).to(dtype)
    ints = [
        torch.tensor(each, dtype=torch.int32) for each in (token_ids, parents, starts, prefixes, page_starts, pages)
    ]
    packed = torch.from_numpy(pack_parameters(asked, MAX_SEQUENCES, MAX_ROWS, vocabulary))
    in_pages = SequenceTexts(tokens, page_size, *ints[2:])
    verdicts = Verdicts.over(torch.zeros(2 * MAX_SEQUENCES + MAX_ROWS, dtype=torch.int32), MAX_SEQUENCES)
    for b, one in enumerate(asked):
        path = sorted(rng.sample(range(1, one.rows), rng.randrange(one.rows))) if one.rows else []
        verdicts.accepted_counts[b] = len(path)
        verdicts.accepted_rows[one.first_row : one.first_row + len(path)] = torch.tensor(path, dtype=torch.int32)
        verdicts.next_tokens[b] = rng.randrange(vocabulary) if one.rows else -1
    words = np.array([[rng.getrandbits(32) for _ in range(-(-vocabulary // 32))] for _ in range(5)], np.uint32)
    mask_rows = np.array([rng.choice((0, 0, rng.randrange(1, 6), -rng.randrange(1, 6))) for _ in token_ids], np.int32)
    masks = words.view(np.int32), mask_rows
    return GeneratedStep(logits, *ints[:2], packed, in_pages, asked, shapings, texts, verdicts, masks)
