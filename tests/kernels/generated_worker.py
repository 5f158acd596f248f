"""Shapes logits and gathers log-probabilities by kernel and by the loop over sequences, and writes where they differ,
as JSON to standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from random_generated import MAX_ROWS, MAX_SEQUENCES, GeneratedStep, random_generated
from torch import Tensor

from tree_kernels.logit_shaping import DeviceShaper, SequenceTexts, pack_shaping
from tree_kernels.logprobs import DeviceLogprobs, read_logprobs
from tree_kernels.verification import Verdicts

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CASES = [
    (23, 4, torch.float32, 60),
    (2050, 16, torch.bfloat16, 60),
    (4100, 1, torch.float16, 3000),
    (40, 16, torch.float32, 9),
]
if not INTERPRETED:
    CASES += [(49152, 16, torch.bfloat16, 4000), (128256, 16, torch.bfloat16, 4000)]


def shaped(step: GeneratedStep, vocabulary: int, backend: Any) -> Tensor:
    """[rows of trees, V] of the step's rows that belong to a sequence."""
    shaper = DeviceShaper(DEVICE, vocabulary, MAX_SEQUENCES, MAX_ROWS, backend)
    for b, shaping in enumerate(step.shapings):
        shaper.place(b, pack_shaping(shaping))
    words, mask_rows = step.masks
    shaper.mask_room[: len(words)] = words
    shaper.mask(len(words), mask_rows)
    tensors = (each.to(DEVICE) for each in (step.logits, step.token_ids, step.parents, step.parameters))
    tokens, page_size, *tables = step.in_pages
    out = shaper.shape(*tensors, SequenceTexts(tokens.to(DEVICE), page_size, *(each.to(DEVICE) for each in tables)))
    rows = [one.first_row + row for one in step.asked for row in range(one.rows)]
    return out[rows, :vocabulary].cpu()


def gathered(step: GeneratedStep, vocabulary: int, backend: Any) -> list[Any]:
    """Of each sequence, what was found of its tokens."""
    logprobs = DeviceLogprobs(DEVICE, vocabulary, MAX_SEQUENCES, MAX_ROWS, backend)
    verdicts = Verdicts.over(step.verdicts.tensor.to(DEVICE), MAX_SEQUENCES)
    tokens, parameters = step.token_ids.to(DEVICE), step.parameters.to(DEVICE)
    logprobs.gather(step.logits.to(DEVICE), tokens, parameters, verdicts)
    found = logprobs.found.cpu().numpy()
    return [
        read_logprobs(found[one.first_row : one.first_row + 1 + count], one.logprobs - 1)
        for one, count in zip(step.asked, step.verdicts.accepted_counts.tolist(), strict=False)
        if one.rows and one.logprobs
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two rows list the same tokens, with the same log-probabilities within rounding."""
    close = abs(one[0] - other[0]) < 1e-4 and [each[0] for each in one[1]] == [each[0] for each in other[1]]
    return close and all(abs(a[1] - b[1]) < 1e-4 for a, b in zip(one[1], other[1], strict=True))


def main() -> None:
    wrong, changed, listed = [], 0, 0
    for vocabulary, page_size, dtype, longest in CASES:
        for seed in range(4 if INTERPRETED else 20):
            step = random_generated(seed, vocabulary, page_size, dtype, longest)
            expected, found = (shaped(step, vocabulary, name) for name in ("torch", "triton"))
            rows = [one.first_row + row for one in step.asked for row in range(one.rows)]
            changed += int((expected != step.logits[rows, :vocabulary].float()).sum())
            if not torch.equal(expected, found):
                wrong.append(f"shaped {vocabulary} {seed}: {(expected - found).abs().max()}")
            for one, other in zip(*(gathered(step, vocabulary, name) for name in ("torch", "triton")), strict=True):
                listed += sum(len(entries) for _, entries in one)
                if not all(map(same, one, other)):
                    wrong.append(f"log-probabilities {vocabulary} {seed}: {one} {other}")
    json.dump({"wrong": wrong, "changed": changed, "listed": listed}, sys.stdout)


if __name__ == "__main__":
    main()
