"""Weighted fair queuing over tenants. Pure: no clock; it counts what each was served while others waited."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant may take of the engine. A bound of 0 is none."""

    # Relative to the weights of others, while there is not enough for all.
    weight: float = 1.0
    # Sequences in one step.
    running: int = 0
    # Tokens in the KV cache, in whole pages.
    kv_tokens: int = 0


# Steps for which a tenant keeps its part of the time after its last one. Chosen: callers who send one short request
# after the other return within a step or two, and would have to wait for a long step that began without them.
_KEPT_STEPS = 4
# Shortened steps after which one tenant gets a step alone, to measure its time while contexts grow; the others lose a
# sixteenth of the little that they have in such steps. Chosen.
_ALONE_EVERY = 16
# Share of a step that a request waits for on average when it arrives during one. Steps without a recent tenant are
# shorter by this share of the tenant's own step, and its first step back by this share of the last one. Cheap steps,
# as on a GPU, are within the bound anyway.
_WAITED = 0.5


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
        self, wanted: Mapping[str, Sequence[int]], shares: Mapping[str, Share], room: int
    ) -> list[tuple[str, int]]:
        """Divide `room` units. `wanted` holds the sizes of each tenant's items in their order, none empty.

        Returns (tenant, units of its next item) in order of service; only the last item may be served in part.
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
    """A tenant's part of the time: seconds of its own step, its weight, and for how many more steps they count."""

    alone: float
    weight: float
    steps: int


class TimeShares:
    """Bounds the time of steps: none is longer than a tenant's own step, divided by its part of the weights.

    A request that arrives during a step waits for its end. So steps between two requests of a tenant are shorter, and
    its first step back is shorter by the mean of that wait: whole requests keep to the bound.
    """

    def __init__(self) -> None:
        self._present: dict[str, _Present] = {}
        # Expected seconds of the last step.
        self._last_step = 0.0
        # The tenant that bounded the last step, and shortened steps since a tenant last had one alone.
        self._strictest, self._held = "", 0

    @property
    def shared(self) -> bool:
        """Whether several tenants had recent steps."""
        return len(self._present) > 1

    def longest_step(self, alone: Mapping[str, float], shares: Mapping[str, Share]) -> float:
        """Seconds that the next step may take, given those of each tenant's own step; infinite for one tenant."""
        for present in self._present.values():
            present.steps -= 1
        # Tenants without a part in the last step.
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
        """Note the expected time of the step that begins."""
        self._last_step = seconds

    def hold(self) -> None:
        """Count a step that was shortened to the bound."""
        self._held += 1

    def alone_next(self, ready: Container[str]) -> str | None:
        """The tenant of `ready` that gets the next step alone; mostly None."""
        if self._held < _ALONE_EVERY or self._strictest not in ready:
            return None
        self._held = 0
        return self._strictest
