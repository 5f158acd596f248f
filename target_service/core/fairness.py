"""Weighted fair queuing over tenants. Pure: no clock; it counts what each was served while others waited."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.limits import TenantLimits

# Steps for which a tenant keeps its part of the time after its last one. Chosen: callers who send one short request
# after the other return within a step or two, and would have to wait for a long step that began without them.
_KEPT_STEPS = 4
# The least that a step may take, in steps of a tenant's own. A pass of 64 rows takes 1.20 of one of a single row on a
# GPU (docs/performance.md), so there all sequences fit into every step.
_LEAST = 1.25


class FairShare:
    """Divides one resource in each step: places, or rows.

    Each tenant has a *pass*: what it was served while it was scarce, divided by its weight. The tenant with the lowest
    pass is served next. Passes are relative to the lowest of the tenants that went short, and none is lower: a tenant
    that uses less than its share does not accumulate credit, and a new one starts level with the others.
    """

    def __init__(self) -> None:
        self._passes: dict[str, float] = {}

    def rest(self) -> None:
        """There was enough for all: reset the passes."""
        self._passes.clear()

    def divide(
        self, wanted: Mapping[str, Sequence[int]], shares: Mapping[str, TenantLimits], room: int
    ) -> list[tuple[str, int]]:
        """Divide `room` units. `wanted` holds the sizes of each tenant's items in their order, none empty. Returns
        (tenant, units of its next item) in order of service; only the last item may be served in part."""
        heap = [(self._passes.get(tenant, 0.0), rank, tenant) for rank, tenant in enumerate(wanted)]
        heapq.heapify(heap)
        served: list[tuple[str, int]] = []
        places, passes = dict.fromkeys(wanted, 0), dict[str, float]()
        while heap and room > 0:
            paid, rank, tenant = heapq.heappop(heap)
            items, place = wanted[tenant], places[tenant]
            amount = min(items[place], room)
            served.append((tenant, amount))
            room -= amount
            places[tenant] = place + 1
            paid += amount / shares[tenant].weight
            if place + 1 < len(items) or amount < items[place]:
                heapq.heappush(heap, (paid, rank, tenant))
            else:
                passes[tenant] = paid
        if not heap:
            self.rest()
            return served
        floor = heap[0][0]
        passes |= {tenant: paid for paid, _, tenant in heap}
        self._passes = {tenant: paid - floor for tenant, paid in passes.items() if paid > floor}
        return served


def in_parts(count: int, size: int) -> list[int]:
    """`count` as a list of parts of `size`, the last one smaller."""
    whole, rest = divmod(count, size)
    return [size] * whole + [rest] * bool(rest)


@dataclass(slots=True)
class _Present:
    """A tenant's part of the time."""

    # Seconds of a step of its own.
    alone: float
    weight: float
    # Steps for which this still counts.
    steps: int
    # Seconds that it waited for steps of others, and that its own steps have yet to make up for.
    deficit: float = 0.0
    # The part of these by which its next step is shorter.
    paid: float = 0.0


class TimeShares:
    """Bounds the time of steps: for no tenant longer than its own step, divided by its part of the weights.

    A request that arrives during a step waits for its end. So steps without a recent tenant are shorter, and its next
    steps are shorter by the last one: a request of several steps takes no longer than its steps may, whenever it
    arrives.
    """

    def __init__(self) -> None:
        self._present: dict[str, _Present] = {}
        # The same once the next step begins. It may not: its schedule can be dropped.
        self._next: dict[str, _Present] = {}
        # The tenants of the last step, and its expected seconds.
        self._last_tenants: Container[str] = ()
        self._last_step = 0.0
        # The tenant that bounded the last step, and shortened steps since a tenant last had one alone, counted outside.
        self._strictest, self.shortened = "", 0

    @property
    def shared(self) -> bool:
        """Whether several tenants had recent steps."""
        return len(self._present) > 1

    def longest_step(self, alone: Mapping[str, float], shares: Mapping[str, TenantLimits]) -> float:
        """Seconds that the next step may take, given those of each tenant's own step; infinite for one tenant. What
        that step makes up for is owed until it begins."""
        kept = {
            tenant: replace(present, steps=present.steps - 1)
            for tenant, present in self._present.items()
            if tenant not in alone and present.steps > 1
        }
        here = {tenant: self._with_step(tenant, seconds, shares[tenant].weight) for tenant, seconds in alone.items()}
        self._next = kept | here
        if len(self._next) <= 1:
            return math.inf
        weights = sum(present.weight for present in self._next.values())
        longest = {}
        for tenant, present in self._next.items():
            # Share of the others' time that their sequences may take in steps. The rest goes to their calls and
            # replies, which take processors from a tenant between its steps: with all of it, waits beside 330 long
            # requests were 1.8 to 2.3 times as long, with this 1.6 to 2.0 (p99,
            # `benchmarks/results/2026-11-25-cpu-attack-long-requests.md`).
            others = 0.75 * (weights / present.weight - 1.0)
            whole, least = present.alone * (1.0 + others), present.alone * min(_LEAST, 1.0 + others)
            if tenant in kept:
                # What steps without a tenant are shorter by, in steps of its own, for a request that arrives in the
                # middle of one. Chosen: beside one other tenant of the same weight such a step is then the least one.
                longest[tenant] = max(least, whole - 0.5 * present.alone)
                continue
            present.deficit = min(present.deficit, whole)
            present.paid = min(present.deficit, whole - least)
            longest[tenant] = whole - present.paid
        self._strictest = min(longest, key=longest.__getitem__)
        return longest[self._strictest]

    def unbounded(self) -> None:
        """The next step is not bounded: one tenant is there, and had the recent steps."""
        self._next = self._present

    def _with_step(self, tenant: str, seconds: float, weight: float) -> _Present:
        """A tenant that wants a part in the next step. Without one in the last step, it waited for that."""
        before = self._present.get(tenant)
        # A request that has just arrived is owed nothing of what those before it were.
        deficit = before.deficit if before is not None and before.steps == _KEPT_STEPS else 0.0
        if tenant not in self._last_tenants:
            deficit += self._last_step
        return _Present(seconds, weight, _KEPT_STEPS, deficit)

    def count_step(self, tenants: Container[str], seconds: float) -> None:
        """The next step begins, with sequences of these tenants; `seconds` is its expected time."""
        for tenant, present in self._next.items():
            if tenant in tenants:
                present.deficit -= present.paid
            present.paid = 0.0
        self._present, self._last_tenants, self._last_step = self._next, tenants, seconds

    def alone_next(self, ready: Container[str]) -> str | None:
        """The tenant of `ready` that gets the next step alone; mostly None."""
        # Shortened steps after which one tenant gets a step alone, to measure its time while contexts grow; the others
        # lose a sixteenth of the little that they have in such steps. Chosen.
        if self.shortened < 16 or self._strictest not in ready:
            return None
        self.shortened = 0
        return self._strictest
