"""Weighted fair queuing over tenants. Pure: no clock; what counts is who was served how much while others waited."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant may take of the engine. 0 is no bound of its own."""

    # Against the weights of others, while there is not enough for all.
    weight: float = 1.0
    # Sequences in one step.
    running: int = 0
    # Tokens whose keys and values are held, in whole pages.
    kv_tokens: int = 0


# Steps for which a tenant's part of the time is kept after its last one. Chosen: callers who send one short request
# after the other are back within a step or two, and would meet a step that had just begun without them.
_KEPT_STEPS = 4
# Steps that were shorter than asked for, after which one tenant runs alone for once: what that takes stays known while
# contexts grow, and the others lose a sixteenth of the little that they have in such steps. Chosen.
_ALONE_EVERY = 16
# Part of a step that a request waits for on average, which comes in the middle of it. Steps without its tenant are
# shorter by that part of one of the tenant's own, and the first one with it by that part of the last. Steps whose
# sequences are cheap, as a GPU's are, take less than what is left, and stay as they are.
_WAITED = 0.5


class FairShare:
    """Divides what there is of one thing in each step: places, or rows.

    Each tenant has a *pass*: what it was served while somebody went short, divided by its weight. The tenant with the
    lowest is served next. Passes are counted from the lowest of those who went short, and nobody's is lower: who asks
    for less than its share saves nothing up, and who comes new begins level with the others.
    """

    def __init__(self) -> None:
        self._passes: dict[str, float] = {}

    def rest(self) -> None:
        """There was enough for all: nobody owes anybody anything."""
        self._passes.clear()

    def divide(
        self, wanted: Mapping[str, Sequence[int]], shares: Mapping[str, Share], room: int
    ) -> list[tuple[str, int]]:
        """Serve `room` units. `wanted` are each tenant's items in their order, by size, none empty.

        Returns whose next item is served, in order, and how much of it: all, but for the last.
        """
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


@dataclass(slots=True)
class _Present:
    """A tenant's part of the time: seconds of a step of its own, and for how many steps more they count."""

    alone: float
    weight: float
    steps: int


class TimeShares:
    """How long steps may take: no tenant waits for one longer than its own, divided by its part of the weights.

    A request that comes in the middle of a step waits for its end. So steps between two requests of a tenant's are
    shorter, and its first step back is shorter by what it waited on average, so that whole requests keep to the bound.
    """

    def __init__(self) -> None:
        self._present: dict[str, _Present] = {}
        # Seconds that the last step was to take.
        self._last_step = 0.0
        # Whose own step was the measure of the last one, and steps that were held to it since his own was run.
        self._strictest, self._held = "", 0

    @property
    def shared(self) -> bool:
        """Whether several tenants had steps lately."""
        return len(self._present) > 1

    def longest_step(self, alone: Mapping[str, float], shares: Mapping[str, Share]) -> float:
        """Seconds that the next step may take, of tenants whose own would take `alone`; infinite for a lone one."""
        for present in self._present.values():
            present.steps -= 1
        # Of those with a part in the last step, one call ago.
        back = {tenant for tenant in alone if not self._has_steps(tenant, _KEPT_STEPS - 1)}
        for tenant, seconds in alone.items():
            self._present[tenant] = _Present(seconds, shares[tenant].weight, _KEPT_STEPS)
        self._present = {tenant: present for tenant, present in self._present.items() if self._has_steps(tenant, 1)}
        if not self.shared:
            return math.inf
        weights = sum(present.weight for present in self._present.values())
        longest = {tenant: present.alone * weights / present.weight for tenant, present in self._present.items()}
        for tenant, present in self._present.items():
            if tenant not in alone:
                longest[tenant] -= _WAITED * present.alone
            elif tenant in back:
                longest[tenant] = max(present.alone, longest[tenant] - _WAITED * self._last_step)
        self._strictest = min(longest, key=longest.__getitem__)
        return longest[self._strictest]

    def _has_steps(self, tenant: str, at_least: int) -> bool:
        return tenant in self._present and self._present[tenant].steps >= at_least

    def begin(self, seconds: float) -> None:
        """A step begins that is to take so long."""
        self._last_step = seconds

    def hold(self) -> None:
        """A step is shorter than was asked for, since it may take no longer."""
        self._held += 1

    def alone_next(self, ready: Container[str]) -> str | None:
        """The tenant, of those with steps, that is to have the next one alone; mostly none."""
        if self._held < _ALONE_EVERY or self._strictest not in ready:
            return None
        self._held = 0
        return self._strictest
