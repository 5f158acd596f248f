"""Which running sequences lose their pages first, where there are too few."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from target_service.core.sequence import Sequence


def order_of_preemption(
    running: SequenceOf[Sequence], is_idle: Callable[[Sequence], bool]
) -> Iterator[tuple[Sequence, float]]:
    """Running sequences with pages in the order in which they give way, and the pages that their tenant holds for its
    weight without them.

    Idle ones go first, which wait for their client's tree; then always the youngest of the tenant that holds most for
    its weight. The oldest of all that are not idle is not among them, so that it ends some day.
    """
    for idle in (True, False):
        held = Counter[str]()
        lines: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in running:
            held[sequence.request.tenant] += len(sequence.pages)
            if is_idle(sequence) is idle:
                lines[sequence.request.tenant].append(sequence)
        if not idle and lines:
            # Ids rise in order of arrival.
            oldest = min((line[0] for line in lines.values()), key=lambda one: one.sequence_id)
            lines[oldest.request.tenant].remove(oldest)
        weights = {tenant: line[0].request.limits.weight for tenant, line in lines.items() if line}
        while weights:
            tenant = max(weights, key=lambda name: held[name] / weights[name])
            victim = lines[tenant].pop()
            held[tenant] -= len(victim.pages)
            if victim.pages:
                yield victim, held[tenant] / weights[tenant]
            if not lines[tenant]:
                del weights[tenant]
