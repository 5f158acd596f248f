"""The scripted engine in a process of its own: `python scripted_engine_process.py FD`, for tests of the link.

A prompt that begins with `FATAL` fails the engine's next step, one that begins with `HANGS` is never stepped and holds
whoever stops the engine; one that begins with `GARBLED` sends bytes that are no message. A model named "refused" is
refused, and one named "broken" is a bug while loading.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from scripted_engine import SERVED, ScriptedEngine

from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo, TreeLimits
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, SequenceTotals
from target_service.core.weights import UpdateDone, WeightUpdate
from target_service.engine_process.server import Reporter, serve_engine
from target_service.preflight import EngineRefused

GARBLED, FATAL, HANGS = 297, 298, 299
# Before a path: the model is found, and then loaded once something is there.
FOUND = "found:"
# Of one that is loaded, and waits for what is prepared meanwhile.
LOADED = "loaded:"


class ScriptedHost(ScriptedEngine):
    """The scripted engine with the rest of the engine's interface."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(max_sequences=8)
        self._reporter = reporter
        self._by_id: dict[int, SequenceRequest] = {}
        self._hangs = False
        self.draft_info = DraftInfo("scripted", 0, "", TreeLimits(), 0, "1")
        self.engine = self

    @property
    def served(self) -> ServedModel:
        return SERVED

    def submit(self, request: SequenceRequest, sequence_id: int | None = None) -> int:
        if request.token_ids[0] == FATAL:
            self.die(RuntimeError("a kernel failed on swordfish"))
        if request.token_ids[0] == GARBLED:
            self._reporter._outbox.send(b"\0\0\0\4nope")
        self._hangs = self._hangs or request.token_ids[0] == HANGS
        if self._hangs:
            self.paused.set()
        assert super().submit(request) == sequence_id
        self._by_id[sequence_id] = request
        return sequence_id

    def verify(self, sequence_id: int, tree: TokenTree) -> None:
        super().verify(sequence_id, tree)

    def cancel(self, sequence_id: int) -> None:
        known = self.open_sequences
        super().cancel(sequence_id)
        if self.open_sequences < known:
            totals = SequenceTotals(prompt_tokens=3)
            self._reporter.on_finished(sequence_id, self._by_id[sequence_id], totals, "cancelled")

    def update_weights(self, update: WeightUpdate, done: UpdateDone, update_id: int | None = None) -> int:
        assert super().update_weights(update, done) == update_id
        return update_id

    def stop(self, grace: float = 0.0) -> None:
        if self._hangs:
            threading.Event().wait()
        super().stop(grace)


def build(config: TargetConfig, reporter: Reporter) -> ScriptedHost:
    if config.model == "refused":
        raise EngineRefused(2, "error: --draft: no such thing")
    if config.model == "broken":
        raise RuntimeError("a bug while loading")
    if config.model.startswith(FOUND):
        reporter.found_model()
        while not Path(config.model.removeprefix(FOUND)).exists():
            time.sleep(0.01)
    if config.model.startswith(LOADED):
        reporter.found_model()
        reporter.loaded_model(SERVED.vocabulary_size, SERVED.end_token_ids)
        while not Path(config.model.removeprefix(LOADED)).exists():
            time.sleep(0.01)
    host = ScriptedHost(reporter)
    assert replace(host.served, tokenizer=None) == SERVED
    return host


if __name__ == "__main__":
    sys.exit(serve_engine(int(sys.argv[1]), build))
