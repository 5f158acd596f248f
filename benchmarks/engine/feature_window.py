"""Bytes of hidden states on the wire, and the tokens that a draft loses by restarting, by how many states the target
keeps.

Engine and EAGLE head run in one process, so that no draft is late. With `--restart-every N` the draft loses its state
every N steps and gets every sequence again, as after a crash, with the newest hidden states that the target kept.

    python -m benchmarks.engine.feature_window --head FOLDER [--model NAME] [--windows 0,16,64,512] [--json FILE]
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace

from benchmarks.shared.report import comma_separated, parser_of, show, write_json
from benchmarks.shared.workload import short_prompts
from draft_service.drafters.base import Drafter
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.in_process import InprocessLink
from outrider.drafting.events import Disconnected, DraftEvents
from outrider.sampling import SamplingParams
from outrider.wire.drafts import advance_to_pb
from outrider.wire.frames import OpenSequence, SequenceAdvance, SequenceFeatures
from outrider.wire.hidden_states import features_to_pb
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.host_executor import HostSteps
from target_service.model.loading.loader import load_runner
from target_service.model.loading.store import resolve
from target_service.model.runner import ModelRunner

# Longer prompts take more time and change nothing.
LONGEST_PROMPT = 400


class MeteredLink:
    """An in-process link that counts the bytes of its frames on the wire, and can restart its draft."""

    def __init__(self, drafter: Drafter, events: DraftEvents) -> None:
        self._drafter, self._events = drafter, events
        self._link = InprocessLink(drafter, events)
        self._opened: set[int] = set()
        self.committed = self.bytes = self.token_bytes = 0

    def restart(self) -> None:
        """Drop all sequences, and connect again."""
        self._events.receive(Disconnected("restarted"))
        self._link.close(sorted(self._opened))
        self._opened.clear()
        self._link = InprocessLink(self._drafter, self._events)

    def open(self, sequence: OpenSequence) -> None:
        self._opened.add(sequence.sequence_id)
        self._link.open(sequence)

    def advance(self, advances: SequenceOf[SequenceAdvance]) -> None:
        for advance in advances:
            self.committed += len(advance.token_ids)
            self.bytes += advance_to_pb(advance).ByteSize()
            self.token_bytes += advance_to_pb(advance._replace(features=None)).ByteSize()
        self._link.advance(advances)

    def send_features(self, features: SequenceOf[SequenceFeatures]) -> None:
        self.bytes += sum(features_to_pb(one).ByteSize() for one in features)
        self._link.send_features(features)

    def close(self, sequence_ids: SequenceOf[int]) -> None:
        self._opened.difference_update(sequence_ids)
        self._link.close(sequence_ids)

    def cut_off(self, reason: str) -> None:
        self._link.cut_off(reason)


@dataclass(frozen=True)
class WindowFigure:
    """One run: tokens per step of a sequence, and bytes of all advances and feature frames."""

    window: int
    restart_every: int
    sequences: int
    steps: int
    tokens: int
    tokens_per_step: float
    prompt_tokens: int
    vectors: int
    bytes_per_vector: float
    frame_bytes: int
    frame_bytes_without_features: int


def run(
    runner: ModelRunner, config: TargetConfig, drafter: EagleDrafter, requests: SequenceOf[SequenceRequest], every: int
) -> WindowFigure:
    """Decode all requests, restarting the draft every `every` steps; never for 0."""
    loop = EngineLoop(runner, config, steps=HostSteps(runner))
    link = MeteredLink(drafter, loop.drafting)
    loop.drafting.attach(link)
    for number, request in enumerate(requests, start=1):
        loop.add(loop.make(number, request))
    steps = tokens = count = 0
    while loop.live:
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                steps, tokens = steps + 1, tokens + len(event.token_ids)
        count += 1
        if every and count % every == 0:
            link.restart()
    features = loop.features
    return WindowFigure(
        window=config.feature_window,
        restart_every=every,
        sequences=len(requests),
        steps=steps,
        tokens=tokens,
        tokens_per_step=tokens / steps,
        prompt_tokens=sum(len(one.token_ids) for one in requests),
        vectors=features.sent_vectors,
        bytes_per_vector=features.sent_bytes / max(1, features.sent_vectors),
        frame_bytes=link.bytes,
        frame_bytes_without_features=link.token_bytes,
    )


def requests_of(runner: ModelRunner, per_task: int, tokens: int) -> list[SequenceRequest]:
    """The first short prompts of each task, greedy."""
    sampling = SamplingParams(ignore_eos=True)
    prompts = short_prompts(runner.tokenizer, per_task, LONGEST_PROMPT)
    return [SequenceRequest(ids, sampling, sampling.mode(), 1, tokens) for _, ids in prompts]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--head", required=True, help="folder of an EAGLE head")
    parser.add_argument("--model", default=TargetConfig.model)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--feature-dtype", default="bfloat16")
    parser.add_argument(
        "--windows", default="0,16,64,512", type=comma_separated(int), help="vectors kept per sequence, one run each"
    )
    parser.add_argument("--restart-every", type=int, default=16, help="steps between restarts")
    parser.add_argument("--per-task", type=int, default=1, help="prompts of each of seven tasks")
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    config = TargetConfig(
        model=options.model,
        dtype=options.dtype,
        kv_tokens=16384,
        draft="inprocess:eagle",
        draft_head=options.head,
        max_draft_nodes=16,
        speculative_disable_queue_size=64,
        row_budget="all",
    )
    runner = load_runner(config)
    drafter = EagleDrafter(
        EagleConfig(
            head=options.head,
            embeddings=str(resolve(options.model)),
            feature_dtype=options.feature_dtype,
            num_draft_tokens=16,
        )
    )
    drafter.start()
    requests = requests_of(runner, options.per_task, options.tokens)
    runs = [(0, 0), *((window, options.restart_every) for window in options.windows)]
    figures = []
    for window, every in runs:
        figures.append(run(runner, replace(config, feature_window=window), drafter, requests, every))
        show(json.dumps(asdict(figures[-1])))
    write_json(options.json, [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
