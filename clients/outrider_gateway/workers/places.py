"""What a gateway's processes share in memory: counts of places, times of refusals, and connections handed over."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.admission.shares import HolderCounts, OwnCounts
from outrider_gateway.config import GatewayConfig
from outrider_gateway.shared_state import SharedPlaces
from outrider_gateway.workers.shared_counts import SharedCounts, region_words
from outrider_gateway.workers.shared_memory import WORD_BYTES, SharedMemory, SharedPart
from outrider_gateway.workers.shared_refusals import TABLE_WORDS, SharedRefusalTimes


@dataclass(frozen=True)
class PlacesInMemory:
    """The parts of shared memory, laid out the same in every process. `counts` are those of `places`, `adopted` has for
    each worker how many connections it was handed and has taken over."""

    places: SharedPlaces
    counts: tuple[SharedCounts, ...]
    connected: SharedCounts
    idle: SharedCounts
    refusals: SharedRefusalTimes
    adopted: SharedPart

    @classmethod
    def of(
        cls, config: GatewayConfig, workers: int, own: int | None, memory: SharedMemory, secret: bytes
    ) -> PlacesInMemory:
        """`own` is the place of this process among `workers`; None for the parent."""
        counts: list[SharedCounts] = []

        def shared(most_holders: int) -> SharedCounts:
            counts.append(SharedCounts(memory, workers, own, most_holders, secret))
            return counts[-1]

        places = SharedPlaces.of(config, shared)
        _, _, connected, idle = counts
        return cls(places, tuple(counts), connected, idle, SharedRefusalTimes(memory, secret), memory.part(workers))

    def clear(self, worker: int) -> None:
        """Give back all that a worker held, once it has ended."""
        for counts in self.counts:
            counts.clear(worker)
        self.adopted.integers[worker] = 0


def memory_bytes(config: GatewayConfig, workers: int) -> int:
    """Bytes of memory for `PlacesInMemory`."""
    words = 0

    def counted(most_holders: int) -> HolderCounts:
        nonlocal words
        words += workers * region_words(most_holders)
        return OwnCounts()

    SharedPlaces.of(config, counted)
    return WORD_BYTES * (words + TABLE_WORDS + workers)
