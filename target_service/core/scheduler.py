"""Which sequences run in the next step, and how many known tokens each feeds. Pure: no GPU, no gRPC, no clock."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain, islice

from outrider.limits import TenantLimits
from outrider.tree import TokenTree
from target_service.config import TargetConfig
from target_service.core.fairness import FairShare, TimeShares, in_parts
from target_service.core.kv_cache import KVCache
from target_service.core.prefix_waits import PrefixWaits
from target_service.core.schedule import LEAST_READ, PromptRows, Schedule, SequenceChunk, place_in_step
from target_service.core.sequence import Sequence, SequenceState
from target_service.core.sequence_pages import SequencePages, order_of_preemption
from target_service.core.step_times import StepTimes
from tree_kernels.pages import OutOfPages

_RUNS = (SequenceState.PREFILL, SequenceState.RUNNING)
# Parts in which a step's rows of prompts are divided among tenants. Chosen: one part is little of a step.
_PARTS = 64


@dataclass(slots=True)
class _Demand:
    """What a tenant could use of the next step: sequences, those of them that decode, and rows of prompts."""

    limits: TenantLimits
    sequences: int = 0
    decoding: int = 0
    rows: int = 0


def _turn(sequence: Sequence) -> int:
    """The key that brings prompts of a tenant in the order in which they are read: what had been read when it came, and
    what is left of itself. So a short one goes before a long one that came before, and no prompt waits for others that
    come once as many rows have been read as it has."""
    return sequence.read_before + sequence.length - sequence.kv_length


class Scheduler:
    """Continuous batching: running sequences continue, waiting ones join as places, rows and KV pages allow.

    Where these do not suffice, tenants share them by weight in every step; within a tenant, sequences go in order of
    arrival, and prompts that have begun in that of `_turn`. Step time is shared as well: while several tenants have
    work, no step is longer than a tenant's own would be, divided by its part of the weights, as estimated from earlier
    steps. A sequence without a place in a step keeps its pages.

    When pages run out, a sequence is preempted: it gives its pages back, waits, and is read again. Idle ones, whose
    client has sent no tree, are first; they wait again once there is a tree. Then comes the youngest of the tenant that
    holds most for its weight. The oldest of all is last, so that it ends at some time.
    """

    def __init__(
        self,
        config: TargetConfig,
        cache: KVCache,
        pass_sizes: Callable[[int], SequenceOf[int]] = lambda _: (),
        cost: Callable[[int], float] | None = None,
    ) -> None:
        """`pass_sizes` are those of the runner, see `ModelRunner.pass_sizes`; `cost` as in `StepTimes`."""
        self._max_running, self._prefill_chunk = config.max_running, config.chunk_rows
        self._cache = cache
        self.pages = SequencePages(cache, shares=config.prefix_cache, records=config.kv_events > 0)
        self._prefix_waits = PrefixWaits(self.pages, cache.page_size)
        self.times = StepTimes(cost)  # observed by the engine; without any, time is not shared
        self.prompt_rows = PromptRows(config.prompt_waits, self._prefill_chunk, pass_sizes, self.times)
        self._waiting: dict[str, deque[Sequence]] = {}
        self._evicted: dict[int, Sequence] = {}
        self._held_back: list[Sequence] | None = None  # new ones, until `release`; None unless `hold_back` was called
        self._places, self._rows, self._time = FairShare(), FairShare(), TimeShares()
        self.running: list[Sequence] = []
        self._read = 0  # rows of prompts in the steps so far
        # Most rows of a step: as configured, or fewer where those did not fit the device's memory.
        self.max_step_rows = config.step_rows

    def shrink(self) -> bool:
        """Halve the rows of a step for good, which did not fit the device's memory. False if none can be taken away."""
        smallest = self.max_step_rows <= max(1, len(self.running))
        self.restart_states()
        self.max_step_rows = max(1, self.max_step_rows // 2)
        return not smallest

    def restart_states(self) -> None:
        """Behind a pass that ended in its middle: some layers have taken its tokens into their states, and others have
        not, so that sequences are read again where layers keep states."""
        if self._cache.recurrent is not None:
            self.preempt_all()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._held_back or ())

    @property
    def evicted(self) -> int:
        """Sequences that hold no pages and wait for their client's tree."""
        return len(self._evicted)

    @property
    def load(self) -> int:
        """Sequences that have a place in the next step, or will once prompts are read."""
        return min(self._max_running, len(self.running) + self.waiting)

    @property
    def admits(self) -> bool:
        """Whether a sequence waits and a place is free."""
        return bool(self._waiting) and self._busy() < self._max_running

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence, running ones first."""
        return chain(self.running, *self._waiting.values(), self._held_back or (), self._evicted.values())

    def hold_back(self) -> None:
        """Let no sequence begin until `release`. Those that have begun continue, also those that were preempted."""
        self._held_back = self._held_back or []
        self._held_back += [one for one in chain(*self._waiting.values()) if not one.begun]
        begun = {tenant: deque(one for one in queue if one.begun) for tenant, queue in self._waiting.items()}
        self._waiting = {tenant: queue for tenant, queue in begun.items() if queue}

    def release(self) -> None:
        """Let sequences begin again, in order of arrival."""
        held, self._held_back = self._held_back or [], None
        for sequence in held:
            self.add(sequence)

    def begun(self) -> list[Sequence]:
        """Sequences that have begun, whether they hold pages now or not."""
        return [sequence for sequence in self.sequences() if sequence.begun]

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence, if it is running: its pages are read again from its tokens."""
        if sequence.state in _RUNS:
            self._preempt(sequence)

    def preempt_all(self) -> None:
        """Preempt every running sequence, and keep no state; the oldest is read first: ids rise in order of arrival."""
        for sequence in sorted(self.running, key=lambda one: one.sequence_id, reverse=True):
            self._preempt(sequence, keeps_state=False)

    def add(self, sequence: Sequence) -> None:
        sequence.read_before = self._read
        if self._held_back is not None:
            self._held_back.append(sequence)
            return
        self._waiting.setdefault(sequence.request.tenant, deque()).append(sequence)

    def verify(self, sequence: Sequence, tree: TokenTree) -> None:
        """Set the client's tree to verify next."""
        sequence.external_tree = tree
        if self._evicted.pop(sequence.sequence_id, None) is not None:
            sequence.state = SequenceState.WAITING
            self._requeue(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self._held_back is not None and sequence in self._held_back:
            self._held_back.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            queue = self._waiting[sequence.request.tenant]
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.request.tenant]
        elif sequence.state is SequenceState.EVICTED:
            del self._evicted[sequence.sequence_id]
        else:
            self._stop(sequence)
        self.pages.release(sequence)

    def schedule(self) -> Schedule:
        """The next step, for `count_launched` once it is launched. Empty when nothing can run."""
        rows = self.max_step_rows
        chunks: list[SequenceChunk] = []
        for sequence in self._prefix_waits.take_ready():
            self.pages.resume(sequence)
        decoding, prefilling, free_places, seconds = self._share_places()
        own = seconds == math.inf
        # Decoding first, so that long prompts cannot starve it.
        for sequence in decoding:
            if rows and self._holds_chunk(sequence, 1):
                chunks.append(SequenceChunk(sequence, 1))
                rows -= 1
        if rows and self._waiting:
            prefilling += self._admit(free_places)
        if not own:
            within = self.times.prefill_within(len(chunks), seconds, rows)
            rows = self._shortened(sum(map(self._due, prefilling)), rows, LEAST_READ, within)
        unread = self._unread(prefilling) if prefilling else 0
        rows = self.prompt_rows.choose([self._due(one) for one in prefilling], len(chunks), rows)
        for sequence, count in self._share_rows(prefilling, rows):
            if self._holds_chunk(sequence, count):
                chunks.append(SequenceChunk(sequence, count))
                unread -= count
        # A sequence scheduled early may have been preempted for a later one.
        run = [chunk for chunk in chunks if chunk.sequence.state in _RUNS]
        return Schedule(tuple(sorted(run, key=place_in_step)), own, unread)

    def count_launched(self, schedule: Schedule) -> None:
        """Count a scheduled step as its tenants' share: it is launched."""
        self.pages.keep_states(schedule)
        self._read += schedule.prefill_rows
        seconds = self.times.seconds(len(schedule.chunks) - schedule.prefilling, schedule.prefill_rows)
        self._time.count_step({chunk.sequence.request.tenant for chunk in schedule.chunks}, seconds)

    def _unread(self, prefilling: SequenceOf[Sequence]) -> int:
        """Known tokens that these sequences have not fed, nor those that wait, as many as may run. Of the latter some
        may be shared."""
        waiting = islice(chain.from_iterable(self._waiting.values()), self._max_running)
        return sum([one.length - one.kv_length for one in prefilling]) + sum([one.length for one in waiting])

    def _shortened(self, wanted: int, most: int, least: int, within: int) -> int:
        """How many places or rows a step gets, of at most `most`: those `within` its time, and at least `least`."""
        count = max(min(most, least), within)
        if count < min(most, wanted):
            self._time.shortened += 1
        return count

    def _due(self, sequence: Sequence) -> int:
        """Known tokens to feed next. The root of a client that drafts is fed with its tree only."""
        if sequence.sits_out or sequence.awaits_mask or sequence in self._prefix_waits:
            return 0
        known = len(sequence.token_ids) + sequence.pending_tokens - sequence.kv_length
        if sequence.request.external:
            if known == 1:
                return 1 if sequence.external_tree is not None else 0
            known -= 1
        elif sequence.pending is not None:
            if sequence.remaining <= 0:
                # The step under way samples its last token.
                return 0
            if known > 1:
                # The last pending token is fed alone, after the others. Those of the passes before it are not known
                # yet.
                known -= sequence.pending_tokens
        return self.pages.rows_until_state(sequence, min(known, self._prefill_chunk))

    def _share_places(self) -> tuple[list[Sequence], list[Sequence], dict[str, int], float]:
        """The running sequences that decode in the next step and those that read, how many waiting ones may join by
        tenant, and the seconds that the step may take: infinite where it is one tenant's own."""
        ready, demands = self._ready()
        self._note_kept_out(self._add_waiting(demands) if self._waiting else None)
        shares = {tenant: demand.limits for tenant, demand in demands.items()}
        allowed = {
            tenant: min(demand.sequences, demand.limits.running or demand.sequences)
            for tenant, demand in demands.items()
        }
        # Every place takes a row.
        places, seconds = min(self._max_running, self.max_step_rows), math.inf
        if len(allowed) > 1 or self._time.shared:
            alone = {
                tenant: self.times.own_seconds(min(demand.decoding, allowed[tenant]), demand.rows)
                for tenant, demand in demands.items()
            }
            seconds = self._time.longest_step(alone, shares)
            # One for each tenant at least.
            within = self.times.decoding_within(seconds, places)
            places = self._shortened(sum(allowed.values()), places, len(allowed), within)
            chosen = self._time.alone_next({tenant for tenant, demand in demands.items() if demand.decoding})
            if chosen is not None:
                decoding = [one for one, decodes in ready if decodes and one.request.tenant == chosen]
                return decoding, [], {}, math.inf
        else:
            self._time.unbounded()
        if sum(allowed.values()) > places:
            items = {tenant: [1] * min(count, places) for tenant, count in allowed.items()}
            allowed = Counter(tenant for tenant, _ in self._places.divide(items, shares, places))
        else:
            self._places.rest()
        stages: tuple[list[Sequence], list[Sequence]] = [], []
        for sequence, decodes in ready:
            tenant = sequence.request.tenant
            if allowed.get(tenant):
                allowed[tenant] -= 1
                stages[not decodes].append(sequence)
        return *stages, allowed, seconds

    def _ready(self) -> tuple[list[tuple[Sequence, bool]], dict[str, _Demand]]:
        """Running sequences that can continue, each with whether it decodes, and the demand of every tenant."""
        ready: list[tuple[Sequence, bool]] = []
        demands: dict[str, _Demand] = {}
        for sequence in self.running:
            due = self._due(sequence)
            if not due:
                continue
            # It feeds its root alone.
            decodes = due == 1 and sequence.kv_length + 1 >= sequence.length
            ready.append((sequence, decodes))
            request = sequence.request
            demand = demands.get(request.tenant)
            if demand is None:
                demand = demands[request.tenant] = _Demand(request.limits)
            demand.sequences += 1
            if decodes:
                demand.decoding += 1
            else:
                demand.rows += due
        return ready, demands

    def _add_waiting(self, demands: dict[str, _Demand]) -> Sequence | None:
        """Add the demand of sequences that wait for a place. Returns the first that has to wait for pages too."""
        order, kept_out = self._once_ordered(), None
        for tenant, queue in self._waiting.items():
            if self._yielding(queue[0], order) is not None:
                demand = demands.setdefault(tenant, _Demand(queue[0].request.limits))
                demand.sequences += len(queue)
                if demand.rows < self.max_step_rows:
                    # Only of the next in line: the others may have to wait anyway.
                    demand.rows += self._due(queue[0])
            elif kept_out is None:
                kept_out = queue[0]
        return kept_out

    def _share_rows(self, prefilling: list[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """Known tokens that each of these feeds, at most `rows` together."""
        due = [(sequence, self._due(sequence)) for sequence in prefilling]
        if sum(count for _, count in due) <= rows:
            self._rows.rest()
            return [(sequence, count) for sequence, count in due if count]
        lines: dict[str, list[tuple[Sequence, int]]] = defaultdict(list)
        for sequence, count in sorted(due, key=lambda one: _turn(one[0])):
            if count:
                lines[sequence.request.tenant].append((sequence, count))
        # In small parts, so that a short prompt does not wait for another tenant's long one.
        part = max(1, rows // _PARTS)
        wanted = {tenant: in_parts(sum(count for _, count in line), part) for tenant, line in lines.items()}
        shares = {tenant: line[0][0].request.limits for tenant, line in lines.items()}
        served = Counter[str]()
        for tenant, count in self._rows.divide(wanted, shares, rows):
            served[tenant] += count
        reads: list[tuple[Sequence, int]] = []
        for tenant, left in served.items():
            for sequence, count in lines[tenant]:
                if left:
                    reads.append((sequence, min(count, left)))
                    left -= reads[-1][1]
        return reads

    def _admit(self, places: dict[str, int]) -> list[Sequence]:
        """Let as many of each tenant's waiting sequences join as it has places and pages for."""
        admitted: list[Sequence] = []
        turns = deque(tenant for tenant in self._waiting if places.get(tenant))
        reserved = 0
        order = self._once_ordered()
        while turns:
            tenant = turns.popleft()
            queue = self._waiting[tenant]
            victims = self._yielding(queue[0], order, reserved)
            if victims is None:
                continue
            for victim in victims:
                self._preempt(victim)
            if victims:
                order = self._once_ordered()
            # Preemption may have put another one first.
            queue = self._waiting.pop(tenant)
            sequence = queue.popleft()
            places[tenant] -= 1
            if queue:
                # Last in the round.
                self._waiting[tenant] = queue
                if places[tenant]:
                    turns.append(tenant)
            sequence.state = SequenceState.PREFILL
            if not self._prefix_waits.hold(sequence, self.running):
                self.pages.resume(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
            reserved += self._pages_wanted(sequence) - len(sequence.pages)
        return [sequence for sequence in admitted if sequence.state is SequenceState.PREFILL]

    def _pages_wanted(self, sequence: Sequence) -> int:
        """Pages for the known tokens and one more, so that an arrival does not preempt others at once."""
        return min(self._cache.pages_for(len(sequence.token_ids)) + 1, self._cache.num_pages)

    def _yielding(
        self, arrival: Sequence, order: Callable[[], list[tuple[Sequence, float]]], reserved: int = 0
    ) -> list[Sequence] | None:
        """Running sequences to preempt for a waiting one to join, beside `reserved` pages of other arrivals: idle
        ones, then those of a tenant that would still hold as much for its weight. None where the arrival has to wait.

        `order` is from `_once_ordered`: the order takes long enough that many waiting tenants have to share it.
        """
        wanted, tenant, limits = self._pages_wanted(arrival), arrival.request.tenant, arrival.request.limits
        pages, frames = self.pages.lacking(wanted, reserved, self._prefill_chunk)
        fits = pages <= 0 and frames <= 0
        held = self._held(tenant) if limits.kv_tokens or not fits else 0
        if self._exceeds_share(arrival, held):
            return None
        if fits:
            return []
        victims: list[Sequence] = []
        for victim, left in order():
            if not self._idle(victim) and (victim.request.tenant == tenant or left * limits.weight < held + wanted):
                continue
            victims.append(victim)
            pages -= len(victim.pages)
            frames -= len(victim.pages) - victim.window_start
            if pages <= 0 and frames <= 0:
                return victims
        return None

    def _exceeds_share(self, arrival: Sequence, held: int) -> bool:
        """Whether its tenant, which holds `held` pages, may not hold the arrival's too."""
        most = arrival.request.limits.kv_tokens
        return bool(most and held and held + self._pages_wanted(arrival) > most // self._cache.page_size)

    def _note_kept_out(self, arrival: Sequence | None) -> None:
        """Let drafted rows give way to the first arrival that has to wait for pages, if they hold what it lacks."""
        self.pages.forget_arrival()
        if arrival is None or self._busy() >= self._max_running:
            return
        if not self._exceeds_share(arrival, self._held(arrival.request.tenant)):
            self.pages.note_arrival(self._pages_wanted(arrival), self.running)

    def _once_ordered(self) -> Callable[[], list[tuple[Sequence, float]]]:
        """`order_of_preemption`, worked out when it is first asked for: as long as nothing is preempted."""
        found: list[tuple[Sequence, float]] | None = None

        def order() -> list[tuple[Sequence, float]]:
            nonlocal found
            if found is None:
                found = list(order_of_preemption(self.running, self._idle))
            return found

        return order

    def _held(self, tenant: str) -> int:
        return sum(len(sequence.pages) for sequence in self.running if sequence.request.tenant == tenant)

    def _holds_chunk(self, sequence: Sequence, count: int) -> bool:
        """Reserve pages for `count` more tokens, preempting others if needed. False if `sequence` was preempted."""
        if self.pages.held(sequence, sequence.kv_length + count):
            return sequence.state in _RUNS
        while sequence.state in _RUNS:
            limited = self._at_limit(sequence, count)
            if not limited:
                try:
                    self.pages.reserve(sequence, sequence.kv_length + count)
                    return True
                except OutOfPages:
                    pass
            # Itself, if there is no other; at its tenant's limit only one of the same tenant.
            tenant = sequence.request.tenant if limited else None
            victims = (one for one, _ in order_of_preemption(self.running, self._idle))
            self._preempt(next((one for one in victims if tenant in (None, one.request.tenant)), sequence))
        return False

    def _at_limit(self, sequence: Sequence, count: int) -> bool:
        """Whether the sequence needs more pages than its tenant may hold. A tenant's only one may always continue."""
        limit = sequence.request.limits.kv_tokens // self._cache.page_size
        missing = self._cache.pages_for(sequence.kv_length + count) - len(sequence.pages)
        if not limit or missing <= 0:
            return False
        held = self._held(sequence.request.tenant)
        return held > len(sequence.pages) and held + missing > limit

    def _busy(self) -> int:
        """Running sequences that are not idle. Idle ones hold pages, but take no place."""
        return sum(not self._idle(sequence) for sequence in self.running)

    def _idle(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for its client's tree."""
        return (
            sequence.request.external
            and sequence.kv_length + 1 == len(sequence.token_ids)
            and sequence.external_tree is None
        )

    def _preempt(self, sequence: Sequence, *, keeps_state: bool = True) -> None:
        evicted = self._idle(sequence)
        self._stop(sequence)
        self.pages.release(sequence, keeps_state=keeps_state)
        sequence.totals.preemptions += 1
        if evicted:
            sequence.state = SequenceState.EVICTED
            self._evicted[sequence.sequence_id] = sequence
        else:
            sequence.state = SequenceState.WAITING
            self._requeue(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take it out of the running ones. Those that waited for its keys begin with what it has computed of them."""
        self.running.remove(sequence)
        for freed in self._prefix_waits.forget(sequence):
            self.pages.resume(freed)

    def _requeue(self, sequence: Sequence) -> None:
        """Put it first in its queue, and its tenant first: it was served before all that wait."""
        tenant = sequence.request.tenant
        queue = self._waiting.pop(tenant, deque())
        queue.appendleft(sequence)
        self._waiting = {tenant: queue, **self._waiting}
