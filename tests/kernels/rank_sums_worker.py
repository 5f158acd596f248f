"""Sums over ranks that are processes with memory in common, in Triton's interpreter, beside the definition: as JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels.linear import Norm, SumForm
from tree_kernels.rank_sums import PLACES, SharedParts, added_parts
from tree_kernels.rank_sums.triton_backend import TritonRankSums

NUMBERS, PROGRAMS, SUMS = 2048, 4, 3


@dataclass(frozen=True)
class Case:
    """A sum, several times one behind another."""

    rows: int = 3
    width: int = 48
    adds: bool = True
    norms: bool = True
    alone: bool = False
    post: bool = False
    multiplier: float = 1.0
    centered: bool = False


CASES = {
    "one row": Case(rows=1),
    "more rows than programs": Case(rows=9, width=40),
    "no residual": Case(adds=False),
    "no norm": Case(norms=False),
    "alone": Case(rows=5, adds=False, norms=False, alone=True),
    "a norm of the sum": Case(post=True, multiplier=0.22),
    "layer norms": Case(centered=True, post=True),
}


def norm_of(width: int, dtype: torch.dtype, *, centered: bool) -> Norm:
    bias = torch.randn(width).to(dtype) if centered else None
    return Norm((torch.randn(width) + 1).to(dtype), 1e-5, bias, centered)


def inputs(case: Case, ranks: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Norm | None, SumForm]:
    parts = [torch.randn(case.rows, case.width).to(dtype) for _ in range(ranks)]
    residual = torch.randn(case.rows, case.width).to(dtype) if case.adds else None
    norm = norm_of(case.width, dtype, centered=case.centered) if case.norms else None
    return parts, residual, norm, SumForm(norm_of(case.width, dtype, centered=case.centered) if case.post else None,
                                          case.multiplier)  # fmt: skip


def run_rank(memory: SharedParts, outputs: Tensor) -> None:
    """All cases as one rank; what comes out goes to `outputs` [sums, 2, numbers]."""
    sums, ranks, dtype = TritonRankSums(memory), len(memory.parts), memory.own.dtype
    torch.manual_seed(0)
    for at, case in enumerate(case for case in CASES.values() for _ in range(SUMS)):
        parts, residual, norm, form = inputs(case, ranks, dtype)
        if case.alone:
            found = [sums.summed(parts[memory.rank])]
        else:
            place = sums.place(case.rows, case.width)
            place.copy_(parts[memory.rank])
            total, scaled = sums.add(place, residual, norm, form)
            found = [total] if scaled is None else [total, scaled.rows]
        for row, one in zip(outputs[at], found, strict=False):
            row[: one.numel()] = one.flatten()


def errors(ranks: int, dtype: torch.dtype) -> dict[str, float]:
    """By case, how far any rank is from the definition, relative to its largest number."""
    parts = tuple(torch.zeros(PLACES, NUMBERS, dtype=dtype).share_memory_() for _ in range(ranks))
    signals = tuple(torch.zeros(PROGRAMS, ranks, dtype=torch.int32).share_memory_() for _ in range(ranks))
    outputs = torch.zeros(ranks, len(CASES) * SUMS, 2, NUMBERS, dtype=dtype).share_memory_()
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if not child:
            try:
                run_rank(SharedParts(rank, parts, signals), outputs[rank])
            finally:
                os._exit(0)
        children.append(child)
    run_rank(SharedParts(0, parts, signals), outputs[0])
    for child in children:
        os.waitpid(child, 0)
    assert not any(bool(one.any()) for one in signals), "signals are zeros between sums"
    assert all(torch.equal(one, outputs[0]) for one in outputs), "all ranks have the same"
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for at, (name, case) in enumerate((name, case) for name, case in CASES.items() for _ in range(SUMS)):
        total, scaled = added_parts(*inputs(case, ranks, dtype))
        for own, expected in zip(outputs[0, at], [total] if scaled is None else [total, scaled.rows], strict=False):
            wide = expected.float()
            error = (own[: wide.numel()].view_as(wide).float() - wide).abs().max() / wide.abs().max()
            found[name] = max(found.get(name, 0.0), float(error))
    return found


def main() -> None:
    torch.set_num_threads(1)
    found = {f"{ranks} ranks in {dtype}": errors(ranks, dtype) for ranks, dtype in
             ((2, torch.float32), (3, torch.float32), (2, torch.bfloat16))}  # fmt: skip
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
