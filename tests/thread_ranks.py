"""Ranks that are threads of this process: what one rank hands in, the others read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from waits import HUNG_SECONDS

from tree_kernels.linear import Norm, ScaledRows, SumForm
from tree_kernels.rank_sums import added_parts
from tree_models.rank_group import RowSums

Result = TypeVar("Result")


@dataclass
class Exchange:
    """Where the parts of all ranks meet."""

    size: int

    def __post_init__(self) -> None:
        self.parts: list[Tensor | None] = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=HUNG_SECONDS)


@dataclass
class ThreadRank:
    """A `RankGroup`."""

    rank: int
    exchange: Exchange
    calls: list[tuple[int, ...]] = field(default_factory=list)
    most_rows: int = 4
    is_alone: bool = False

    @property
    def size(self) -> int:
        return self.exchange.size

    def sums_of(self, residual: Tensor) -> RowSums | None:
        """For rows of which there are few."""
        return self if len(residual) <= self.most_rows else None

    def place(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width)

    def add(self, part: Tensor, residual: Tensor, norm: Norm | None, form: SumForm) -> tuple[Tensor, ScaledRows | None]:
        return added_parts(self._parts(part), residual, norm, form)

    def summed(self, part: Tensor) -> Tensor:
        parts = self._parts(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def joined(self, part: Tensor) -> Tensor:
        return torch.cat(self._parts(part), dim=-1)

    def least(self, number: int) -> int:
        return int(torch.stack(self._parts(torch.tensor(number))).min())

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def _parts(self, part: Tensor) -> list[Tensor]:
        if self.is_alone:
            return [part] * self.size
        self.calls.append(tuple(part.shape))
        self.exchange.parts[self.rank] = part
        self.exchange.barrier.wait()
        parts = [one for one in self.exchange.parts if one is not None]
        # Nobody hands in the next part while another still reads these.
        self.exchange.barrier.wait()
        return parts


def on_ranks(size: int, work: Callable[[ThreadRank], Result], kind: type[ThreadRank] = ThreadRank) -> list[Result]:
    """The results of `work` on each of so many ranks of a `kind`. Raises the first error of any."""
    exchange = Exchange(size)

    def run(rank: int) -> Result:
        try:
            return work(kind(rank, exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(run, rank) for rank in range(size)]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [one.result() for one in running]
