"""Masks of grammars that take longer than others: their sequences sit out until they are there, and delay no other."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from outrider.tree import TokenTree
from target_service.engine.step import Step
from target_service.speculation.policy.live_sequence import LiveSequence


class SlowMasks:
    """Computes the next masks of slow grammars in threads of their own. Used by the engine's thread alone."""

    def __init__(self, live: Mapping[int, LiveSequence]) -> None:
        """`live` are the sequences under way by id."""
        self._live = live
        # Threads for them, so that those which compute masks of a step under way keep their processors. Chosen.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="slow-masks")
        # By sequence id; as long as one runs, nothing else uses its grammar.
        self._jobs: dict[int, Future[None]] = {}

    def update(self, under_way: Step | None) -> None:
        """Begin what the sequences need for their next pass, and note which of them wait: behind every commit, and
        before every schedule. Those in the step that is `under_way` use their grammars themselves."""
        taken = set[int]() if under_way is None else {item.sequence.sequence_id for item in under_way.batch.items}
        self._jobs = {sequence_id: job for sequence_id, job in self._jobs.items() if sequence_id in self._live}
        for sequence_id, one in self._live.items():
            grammar, sequence = one.verifier.grammar, one.sequence
            if grammar is None or not grammar.slow or sequence_id in taken:
                continue
            job = self._jobs.get(sequence_id)
            if job is not None and job.done():
                del self._jobs[sequence_id]
                job.result()
                job = None
            tree = sequence.external_tree if sequence.request.external else TokenTree.root_only(sequence.root)
            if job is None and tree is not None and not grammar.has_masks(tree, sequence.output):
                job = self._jobs[sequence_id] = self._threads.submit(grammar.compute_ahead, tree, sequence.output)
            sequence.awaits_mask = job is not None

    def wait_for_any(self) -> bool:
        """Wait until a mask is there, for a while. False where none is computed."""
        if self._jobs:
            # The engine then looks at its commands again.
            wait(self._jobs.values(), 0.05, FIRST_COMPLETED)
        return bool(self._jobs)
