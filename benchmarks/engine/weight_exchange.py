"""How long an exchange of weights holds up an engine that generates.

    python -m benchmarks.engine.weight_exchange --model MODEL --weights FOLDER [--device cuda] [--running continue]
        [--sequences N] [--updates N] [--json FILE]

FOLDER has the safetensors files that replace the model's weights, again and again; the model's own folder serves as
well, since as much is read, checked and written. For each update the script prints the time of reading, checking and
(for a GPU) page-locking beside running requests, the pause that the engine reports, both in bytes of weights a second
too, and the longest time between two steps with tokens, from the request for the update until two seconds after it: in
that are the pause, reading the continued requests again, and delays by locking and freeing memory.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time

from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from outrider.errors import OutriderError
from outrider.sampling import SamplingParams
from outrider.weight_updates import RunningRequests, WeightsUpdated
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceEvent, SequenceRequest
from target_service.core.weights import WeightUpdate
from target_service.engine.engine import Engine

# Between two updates, so that requests run on either side of each.
_BETWEEN_SECONDS = 2.0
_PROMPT_TOKENS = 64


class Gaps:
    """Keeps `sequences` running, and the longest time between two deliveries since the last `longest_since`."""

    def __init__(self, engine: Engine, sequences: int, max_tokens: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._longest = 0.0
        self._last = time.monotonic()
        self._finished: queue.Queue[int] = queue.Queue()
        engine.start(self._deliver)
        for _ in range(sequences):
            self._submit()
        threading.Thread(target=self._keep_running, daemon=True).start()

    def longest_since(self) -> float:
        """Seconds of the longest gap since the last call."""
        longest, self._longest = self._longest, 0.0
        return longest

    def _submit(self) -> None:
        sampling = SamplingParams(ignore_eos=True)
        prompt = tuple(range(10, 10 + _PROMPT_TOKENS))
        self._engine.submit(
            SequenceRequest(prompt, sampling, sampling.mode(None), 0, self._max_tokens, speculate=False)
        )

    def _deliver(self, events: list[SequenceEvent]) -> None:
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        for event in events:
            if not hasattr(event, "token_ids"):
                self._finished.put(event.sequence_id)

    def _keep_running(self) -> None:
        while True:
            self._finished.get()
            try:
                self._submit()
            except OutriderError:
                # The engine has stopped.
                return


def _updated(engine: Engine, folder: str, running: RunningRequests) -> WeightsUpdated:
    results: queue.Queue[WeightsUpdated | OutriderError] = queue.Queue()
    engine.update_weights(WeightUpdate(folder, running), results.put)
    result = results.get()
    if isinstance(result, OutriderError):
        raise SystemExit(f"{result.message} ({result.reason})")
    return result


def _figures(done: WeightsUpdated) -> dict[str, float]:
    prepare, pause = done.prepare, done.pause
    return {
        "MB": done.bytes / 1e6,
        "prepare_s": prepare,
        "prepare_GB_s": done.bytes / 1e9 / prepare,
        "pause_s": pause,
        "pause_GB_s": done.bytes / 1e9 / pause,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", required=True, help="folder of safetensors files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", default="continue", choices=[one.value for one in RunningRequests])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    config = TargetConfig(model=options.model, device=options.device, dtype=options.dtype, speculation=False)
    engine = Engine(load_model(config), config)
    gaps = Gaps(engine, options.sequences, options.max_tokens)
    rows = []
    for _ in range(options.updates):
        time.sleep(_BETWEEN_SECONDS)
        gaps.longest_since()
        done = _updated(engine, options.weights, RunningRequests(options.running))
        # Continued requests are read again after it.
        time.sleep(_BETWEEN_SECONDS)
        rows.append(_figures(done) | {"longest_gap_s": gaps.longest_since()})
        show("  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()))
    engine.stop()
    median = statistics.median(row["pause_s"] for row in rows)
    show(f"pause: median {median:.3f} s of {len(rows)}")
    write_json(options.json, {"machine": describe(), "arguments": vars(options), "updates": rows})


if __name__ == "__main__":
    main()
