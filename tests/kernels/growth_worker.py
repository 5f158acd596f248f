"""Grows trees with the Triton kernels, and with PyTorch on the CPU, and writes both as JSON to standard output."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tree_kernels.conditional_launch import launched_if_positive
from tree_kernels.growth import Children, Growth, GumbelMax, VocabularyRanks
from tree_kernels.growth import dispatch as growth
from tree_kernels.growth import triton_backend as _triton_growth
from tree_kernels.growth import triton_children as _triton_children

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Sequences, levels, width and breadth (the width, where not said), tokens that can be said, floor; whether they race,
# sharpness and entrants; and ranks that share the tokens, to which PyTorch's trees of one rank are compared.
CASES: list[dict[str, Any]] = [
    {"sequences": 1, "levels": 3, "width": 4, "vocabulary": 1500, "floor": 0.0},
    {"sequences": 3, "levels": 2, "width": 1, "vocabulary": 700, "floor": 0.0},
    {"sequences": 2, "levels": 3, "width": 5, "vocabulary": 3, "floor": 0.0},
    {"sequences": 2, "levels": 1, "width": 6, "vocabulary": 90, "floor": 0.05},
    {"sequences": 2, "levels": 4, "width": 10, "vocabulary": 2100, "floor": 0.001},
    {"sequences": 3, "levels": 4, "width": 11, "breadth": 3, "vocabulary": 1500, "floor": 0.0},
    {"sequences": 2, "levels": 4, "width": 70, "breadth": 2, "vocabulary": 1500, "floor": 0.0},
    {"sequences": 2, "levels": 3, "width": 2, "breadth": 7, "vocabulary": 1500, "floor": 0.001},
    {
        "sequences": 3,
        "levels": 3,
        "width": 6,
        "breadth": 4,
        "vocabulary": 1300,
        "floor": 0.0,
        "entrants": 50,
        "sharpness": 1.0,
    },
    {"sequences": 3, "levels": 3, "width": 4, "vocabulary": 1300, "floor": 0.0, "entrants": 50, "sharpness": 1.0},
    {"sequences": 3, "levels": 2, "width": 3, "vocabulary": 40, "floor": 0.01, "entrants": 128, "sharpness": 0.6},
    # The second tree may grow two levels; the third level is left out, or the fourth.
    {"sequences": 2, "levels": 5, "width": 4, "vocabulary": 1500, "floor": 0.0, "least_mass": 0.2},
    {"sequences": 1, "levels": 5, "width": 4, "vocabulary": 1500, "floor": 0.0, "least_mass": 0.02},
    {"sequences": 2, "levels": 4, "width": 70, "breadth": 2, "vocabulary": 1500, "floor": 0.0, "least_mass": 0.9},
    {
        "sequences": 3,
        "levels": 4,
        "width": 4,
        "vocabulary": 1300,
        "floor": 0.0,
        "entrants": 50,
        "sharpness": 1.0,
        "least_mass": 0.3,
    },
    {"sequences": 2, "levels": 2, "width": 9, "vocabulary": 5, "floor": 0.0, "entrants": 128, "sharpness": 2.0},
    {"sequences": 2, "levels": 3, "width": 4, "vocabulary": 3000, "floor": 0.0, "ranks": 2},
    {
        "sequences": 3,
        "levels": 3,
        "width": 4,
        "vocabulary": 1300,
        "floor": 0.0,
        "entrants": 50,
        "sharpness": 1.0,
        "ranks": 4,
    },
]


class Turns:
    """`VocabularyRanks` of one process, in which one rank comes after the other."""

    def __init__(self, rank: int, size: int, parts: list[Tensor], *, whole: bool) -> None:
        """Hands a part in, or has the parts of all if they are `whole`."""
        self.rank, self.size, self._parts, self._whole = rank, size, parts, whole

    def joined(self, part: Tensor) -> Tensor:
        if not self._whole:
            self._parts.append(part)
        return torch.cat(self._parts if self._whole else [part] * self.size, dim=-1)


def main() -> None:
    json.dump([{"found": grown(case, DEVICE), "expected": grown(case, None)} for case in CASES], sys.stdout)


def grown(case: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Everything that growing a tree writes; by the kernels on `device`, or by PyTorch."""
    generator = torch.Generator().manual_seed(3)
    sequences, levels, width = case["sequences"], case["levels"], case["width"]
    breadth = case.get("breadth", width)
    to = torch.device("cpu") if device is None else device
    trees = growth.make_growth(sequences, levels, width, breadth, to, least_mass=case.get("least_mass", 0.0))
    limits = torch.tensor([[2 + 3 * b for b in range(sequences)], [levels - b % 2 for b in range(sequences)]]).int()
    tail = torch.zeros(sequences, 1 + (levels - 1) * width, dtype=torch.int32, device=to)
    passes = []
    # Of trees whose levels may be left out twice, since the first leaves sums behind.
    for level in list(range(1, levels + 1)) * (2 if trees.least_mass else 1):
        rows = sequences * (1 if level == 1 else width)
        logits = torch.randn(rows, case["vocabulary"], generator=generator) * 3.0
        # A row of no numbers, a token that is forbidden, and a whole chunk of them.
        logits[:, 1] = float("-inf")
        logits[-1, 1024:2048] = float("-inf")
        if level == 2:
            logits[0] = float("nan")
        wanted = level == 1 or not trees.least_mass or int(trees.worth[level]) > 0
        condition = trees.worth[level : level + 1] if trees.least_mass and level > 1 else None
        with nullcontext() if condition is None else launched_if_positive(condition):
            children = children_of(case, logits.to(to), level, to, kernels=device is not None)
        if not wanted:
            # Whatever lies there.
            children.tokens.fill_(-7)
            children.scores.fill_(float("nan"))
        step = _triton_growth if device is not None else growth
        step.grow(trees, children, limits.to(to), level, case["floor"], tail)
        expanded = trees.frontier_path_probs[(level + 1) % 2] > 0
        next_tokens = torch.where(expanded, trees.next_tokens, -1)
        passes.append([next_tokens.tolist(), trees.sources.tolist(), *scores_of(children), wanted])
    kept = growth.make_kept(trees, 12)
    (_triton_growth if device is not None else growth).keep(trees, kept)
    return {"passes": passes, "tail": tail.tolist(), "kept": rows_of(kept), **written(trees)}


def children_of(case: dict[str, Any], logits: Tensor, level: int, device: torch.device, *, kernels: bool) -> Children:
    sequences, breadth = case["sequences"], case.get("breadth", case["width"])
    temperatures = torch.tensor([1.0, 0.7, 1.6][:sequences], device=device)
    said = (torch.arange(case["vocabulary"], dtype=torch.int32) * 2 + 1).to(device) if sequences > 1 else None
    step = _triton_children if kernels else growth

    def of(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values[:sequences], dtype=dtype, device=device)

    gumbel_max = GumbelMax(
        coupled=of([1, 1, 0], torch.int32),
        top_k=of([0, 20, 4], torch.int32),
        top_p=of([0.9, 1.0, 0.3], torch.float64),
        min_p=of([0.0, 0.01, 0.5], torch.float64),
        seeds=of([-5, 2**62 + 11, 7], torch.int64),
        positions=of([2**33 - 1, 8, 9], torch.int64),
    )

    def found(logits: Tensor, ranks: VocabularyRanks | None) -> Children:
        if "entrants" not in case:
            return step.likeliest(logits, temperatures, breadth, said, ranks)
        race = gumbel_max, level, case["entrants"], case["sharpness"]
        return step.gumbel_max_winners(logits, temperatures, breadth, said, *race, ranks)

    size, parts = case.get("ranks", 1) if kernels else 1, list[Tensor]()
    if size == 1:
        return found(logits, None)
    own = logits.chunk(size, dim=1)
    for rank in range(size):
        found(own[rank], Turns(rank, size, parts, whole=False))
    every = [found(own[rank], Turns(rank, size, parts, whole=True)) for rank in range(size)]
    assert all(each[0].equal(every[0].tokens) and each[1].equal(every[0].scores) for each in every)
    return every[-1]


def scores_of(children: Children) -> tuple[list[list[float]], list[list[int]]]:
    """Scores, and the tokens of those that are children."""
    return children.scores.tolist(), torch.where(children.scores > 0, children.tokens, -1).tolist()


def written(trees: Growth) -> dict[str, Any]:
    there = trees.path_probs > 0
    return {
        "worths": trees.path_probs.tolist(),
        "tokens": torch.where(there, trees.tokens, -1).tolist(),
        "parents": torch.where(there, trees.parents, -1).tolist(),
    }


def rows_of(kept: Tensor) -> list[Any]:
    """The rows that there are, of each tree: tokens, parents and scores."""
    found: list[Any] = []
    for own in kept.cpu():
        tokens, parents, scores = own[1:].view(3, -1)[:, : int(own[0])]
        found.append([tokens.tolist(), parents.tolist(), scores.contiguous().view(torch.float32).tolist()])
    return found


if __name__ == "__main__":
    main()
