"""The engine's interface over a model that counts: the token after t is t + 1.

For tests of what stands in front of the engine; with the byte tokenizer, "a" is continued with "bcd".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.errors import (
    Draining,
    EngineDead,
    InvalidField,
    OutriderError,
    QuotaExceeded,
    UnknownSequence,
    WrongRoot,
)
from outrider.sampling import FinishReason, TokenLogprobs
from outrider.tree import TokenTree
from outrider.weight_updates import WeightsUpdated
from target_service.api.admission import ServedModel
from target_service.core.events import EngineSnapshot
from target_service.core.sequence import (
    Finish,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    SequenceTotals,
    StepVerdict,
)
from target_service.core.weights import FIRST_VERSION, UpdateDone, WeightUpdate

VOCABULARY = 300
END_TOKEN = 2
SERVED = ServedModel(
    name="counter",
    vocabulary_size=VOCABULARY,
    max_context=256,
    max_rows=16,
    dtype="float32",
    page_size=16,
    kv_tokens=4096,
    end_token_ids=(END_TOKEN,),
    tokenizer_fingerprint="f" * 64,
    speculation=True,
    kv_token_bytes=46_080,
    torch_version="2.9",
    triton_version="3.5",
    device="cuda:0",
    device_name="A GPU",
    captured_step_sizes=25,
    capturable_step_sizes=26,
)


def successor(token: int) -> int:
    return (token + 1) % VOCABULARY


@dataclass
class _Live:
    request: SequenceRequest
    token_ids: list[int]
    totals: SequenceTotals = field(default_factory=SequenceTotals)
    step: int = 0
    tree: TokenTree | None = None


class ScriptedEngine:
    """Steps all sequences every `tick` seconds in its own thread. `paused` holds it between steps, also in the middle
    of answers (`pause_after`)."""

    def __init__(self, tick: float = 0.001, max_sequences: int = 64) -> None:
        self.tick = tick
        self.max_sequences = max_sequences
        self.paused = threading.Event()
        self._steps_to_pause = 0
        self.requests: list[SequenceRequest] = []
        self.cancelled: list[int] = []
        self.updates: list[WeightUpdate] = []
        self.cancelled_updates: list[int] = []
        self.model_version = FIRST_VERSION
        self.failure: BaseException | None = None
        # Why its draft gives every sequence up.
        self.draft_refused = ""
        self.last_beat_ns = time.monotonic_ns()
        self._live: dict[int, _Live] = {}
        self._lock = threading.Lock()
        self._draining = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)

    def start(self, deliver: Callable[[list[SequenceEvent]], None]) -> None:
        self._deliver = deliver
        self._thread.start()

    def submit(self, request: SequenceRequest) -> int:
        if self.failure is not None:
            raise EngineDead("the engine has failed")
        if self._draining:
            raise Draining("the target is draining")
        with self._lock:
            if len(self._live) >= self.max_sequences:
                raise QuotaExceeded("too many requests wait", waiting=len(self._live))
            self.requests.append(request)
            sequence_id = len(self.requests)
            self._live[sequence_id] = _Live(request, list(request.token_ids))
            self._live[sequence_id].totals.prompt_tokens = len(request.token_ids)
            self._live[sequence_id].totals.draft_refused = self.draft_refused
        return sequence_id

    def verify(self, sequence_id: int, tree: TokenTree) -> None:
        with self._lock:
            live = self._live.get(sequence_id)
            if live is None:
                raise UnknownSequence("the sequence is not open")
            if tree.token_ids[0] != live.token_ids[-1]:
                raise WrongRoot("the tree's root is not the last committed token")
            live.tree = tree

    def cancel(self, sequence_id: int) -> None:
        with self._lock:
            if self._live.pop(sequence_id, None) is not None:
                self.cancelled.append(sequence_id)

    def update_weights(self, update: WeightUpdate, done: UpdateDone) -> int:
        """Done at once; a folder that is named "refused" is."""
        self.updates.append(update)
        if update.folder.endswith("held"):
            return len(self.updates)
        if update.folder.endswith("refused"):
            done(InvalidField("tensors", "the model has no such"))
        else:
            self.model_version += 1
            done(WeightsUpdated(self.model_version, 3, 1200, 0.007, 0.002, 1, 2))
        return len(self.updates)

    def cancel_update(self, update_id: int) -> None:
        self.cancelled_updates.append(update_id)

    def snapshot(self) -> EngineSnapshot:
        held = self.open_sequences
        return EngineSnapshot(
            held, 0, held, held, 16, speculating=False, draft_connected=True, model_version=self.model_version
        )

    def drain(self) -> None:
        self._draining = True

    def stop(self, grace: float) -> None:
        self.drain()
        deadline = time.monotonic() + grace
        while self._live and time.monotonic() < deadline:
            time.sleep(0.001)
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join()

    def pause_after(self, steps: int) -> None:
        """Pause once so many further steps have delivered something."""
        with self._lock:
            self.paused.clear()
            self._steps_to_pause = steps

    def go_on(self) -> None:
        """End the pause, also one that is still to come."""
        with self._lock:
            self._steps_to_pause = 0
            self.paused.clear()

    def die(self, error: BaseException) -> None:
        """Fail as the engine does when a step raises."""
        self.failure = error

    @property
    def open_sequences(self) -> int:
        return len(self._live)

    @property
    def owes_a_verdict(self) -> bool:
        """Whether a client's tree was not answered yet."""
        with self._lock:
            return any(live.tree is not None for live in self._live.values())

    def _run(self) -> None:
        while not self._stopping and self.failure is None:
            if not self.paused.is_set():
                self.last_beat_ns = time.monotonic_ns()
                with self._lock:
                    events = [event for sequence_id in list(self._live) for event in self._step(sequence_id)]
                    if events:
                        self._deliver(events)
                        self._steps_to_pause -= 1
                        if not self._steps_to_pause:
                            self.paused.set()
            time.sleep(self.tick)
        error: OutriderError = EngineDead("the engine has failed") if self.failure else Draining("stopped")
        with self._lock:
            left = [SequenceFailed(sequence_id, error, self.draft_refused) for sequence_id in self._live]
            self._live.clear()
        self._deliver(list(left))

    def _step(self, sequence_id: int) -> list[SequenceEvent]:
        live = self._live[sequence_id]
        if live.request.external and live.tree is None:
            return []
        tree, live.tree = live.tree or TokenTree.root_only(live.token_ids[-1]), None
        accepted: list[int] = []
        children = tree.children[0]
        while match := [child for child in children if tree.token_ids[child] == self._next(live, accepted)]:
            accepted += match
            children = tree.children[match[0]]
        tokens = [self._next(live, accepted[:count]) for count in range(len(accepted) + 1)]
        finish = self._cut(live, tokens)
        live.token_ids += tokens
        totals = live.totals
        now = time.monotonic_ns()
        totals.started_ns = totals.started_ns or now
        totals.first_token_ns = totals.first_token_ns or now
        totals.completion_tokens += len(tokens)
        totals.steps += 1
        asked = live.request.sampling.logprobs
        top = tuple((token, -1.0 - token) for token in range(asked or 0))
        logprobs = tuple(TokenLogprobs(-0.5, top) for _ in tokens) if asked is not None else ()
        rows = tuple(accepted[: len(tokens)])
        verdict = StepVerdict(
            sequence_id, live.step, rows, tuple(tokens), len(rows), logprobs, finish, queue_ns=5, compute_ns=7
        )
        live.step += 1
        if finish is None:
            return [verdict]
        totals.finished_ns = now
        del self._live[sequence_id]
        return [verdict, SequenceFinished(sequence_id, finish, totals)]

    def _next(self, live: _Live, accepted: list[int]) -> int:
        """The token behind a sequence and the rows that a step accepted."""
        return (live.token_ids[-1] + 1 + len(accepted)) % VOCABULARY

    @staticmethod
    def _cut(live: _Live, tokens: list[int]) -> Finish | None:
        """Cut `tokens` in place where the output ends."""
        sampling = live.request.sampling
        for i, token in enumerate(tokens):
            produced = live.totals.completion_tokens + i + 1
            if token == END_TOKEN and not sampling.ignore_eos:
                del tokens[i + 1 :]
                return Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=token)
            if token in sampling.stop_token_ids:
                del tokens[i + 1 :]
                return Finish(FinishReason.STOP, stop_token_id=token)
            if produced == live.request.max_tokens:
                del tokens[i + 1 :]
                return Finish(FinishReason.LENGTH)
        return None


class WritingEngine(ScriptedEngine):
    """Answers every request with the same tokens, and then ends."""

    def __init__(self, answer: Sequence[int], tick: float = 0.001) -> None:
        super().__init__(tick)
        self._answer = (*answer, END_TOKEN)

    def _next(self, live: _Live, accepted: list[int]) -> int:
        return self._answer[min(live.totals.completion_tokens + len(accepted), len(self._answer) - 1)]
