"""What a host does for a conversation's next turn, by the number of tokens before it, without a device.

    python -m benchmarks.host.next_turn [--before 0,6000] [--turn 100] [--tokenizer FILE] [--repeats 41] [--json FILE]

A prompt of `--before` tokens, whose pages are kept, and `--turn` new ones goes through the code of gateway, target and
engine, part by part in one process: no network, no other process to wake, and caches that are warm. The engine's pass
is not run, and takes `--pass-ms`. Microseconds, medians. With the file of a tokenizer (tokenizer.json) also what as
many tokens take that are sent as text, and as a conversation, of `benchmarks/prompts.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from tokenizers import AddedToken, Tokenizer

from benchmarks.engine.simulated_device import PAGE_SIZE, empty_runner
from benchmarks.host.host_time import COSTS, VOCABULARY, HostOnly, HostRunner, Times
from benchmarks.shared.report import (
    comma_separated,
    parser_of,
    provenance,
    record_table,
    settings_of,
    show,
    write_json,
)
from benchmarks.shared.workload import read_conversations
from outrider.runtime import settled
from outrider.sampling import SamplingParams, VerificationMode
from outrider.v1 import target_pb2
from outrider_client.arguments import sampling_message, set_input
from outrider_client.generation import Speculation
from outrider_client.messages import ChatOptions
from outrider_gateway.http import json_object
from outrider_gateway.translation import completion_request
from target_service.api.admission import Admission, ServedModel
from target_service.config import TargetConfig
from target_service.core.quotas import TenantQuotas
from target_service.core.sequence import SequenceFinished, SequenceRequest
from target_service.engine import launching, loop
from target_service.engine_process import messages
from target_service.speculation.policy.step_cost import StepCost
from target_service.telemetry.metrics import PrometheusObserver
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

Value = TypeVar("Value")
_SEQUENCES, _ANSWER = 8, 16
# Of Llama 3, so that ids have as many digits as there.
_IDS = 128_256
_MARKS = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_SERVED = ServedModel("m", _IDS, 1 << 15, 64, "bfloat16", PAGE_SIZE, 1 << 17, ())


class PartTimes:
    """Microseconds of each part, of every repeat."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, part: str, work: Callable[[], Value]) -> Value:
        """What `work` returns, whose time counts as that of `part`."""
        begun = time.perf_counter_ns()
        found = work()
        self.taken[part].append((time.perf_counter_ns() - begun) / 1000)
        return found

    def medians(self) -> dict[str, float]:
        """Of each part."""
        return {part: round(statistics.median(taken), 1) for part, taken in self.taken.items()}


async def door(parts: PartTimes, prompt: Sequence[int]) -> None:
    """A prompt of token ids from the body of a request to the engine's process."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": _ANSWER, "ignore_eos": True}).encode()
    fields = parts.timed("gateway: JSON", lambda: json_object(body))
    asked = parts.timed("gateway: check", lambda: completion_request(fields, 8))

    def message() -> bytes:
        made = target_pb2.GenerateRequest(
            model=asked.model, sampling=sampling_message(asked.sampling), speculation=Speculation().to_pb()
        )
        set_input(made, "", (), ChatOptions(), asked.prompts[0].token_ids)
        return made.SerializeToString()

    sent = parts.timed("gateway: message", message)
    received = parts.timed("target: message", lambda: target_pb2.GenerateRequest.FromString(sent))
    admission, begun = Admission(_SERVED, TenantQuotas(None)), time.perf_counter_ns()
    admitted = await admission.generation(received, "default", "")
    parts.taken["target: admission"].append((time.perf_counter_ns() - begun) / 1000)
    frame = parts.timed("target: to the engine", lambda: messages.pack(messages.Submit(1, admitted.sequence)))
    parts.timed("engine: command", lambda: messages.unpack(memoryview(frame)[4:]))


class NextTurns:
    """An engine on a simulated device, which keeps pages, and the parts of what it does for a next turn."""

    def __init__(self, pass_ms: float) -> None:
        self._times, self._ids, self._words = Times(), count(1), random.Random(0)
        config = TargetConfig(model="none", draft="inprocess:none", max_running=_SEQUENCES)
        runner: Any = empty_runner(VOCABULARY, 1 << 17)
        runner.__class__ = HostRunner
        runner.prepare(self._times, _SEQUENCES, config.step_rows, longest=1 << 13)
        runner.enable_device_row_selection(_SEQUENCES, backend="torch")
        steps = HostOnly(runner, self._times, lambda _: pass_ms * 1e-3, _SEQUENCES, config.step_rows)
        cost = StepCost([(rows, share * pass_ms * 1e-3) for rows, share in COSTS])
        observer = PrometheusObserver("none", "none", "0")
        self._loop = loop.EngineLoop(runner, config, steps=steps, step_cost=cost, observer=observer)
        own = self._loop
        for part, of, name in (
            ("engine: sequence", own, "make"),
            ("engine: whom to wait for", own.scheduler._prefix_waits, "hold"),
            ("engine: pages found", own.scheduler.pages, "resume"),
            ("engine: schedule, both included", own.scheduler, "schedule"),
            ("engine: lay out", launching, "lay_out"),
            ("engine: copied to the device", runner, "run_pass"),
            ("engine: until launched, all", own.launcher, "launch_next"),
            ("engine: outcome", own, "_counted"),
            ("engine: commit", own, "_commit"),
            ("engine: pages published", loop, "publish_pages"),
            ("engine: figures", own, "_observe"),
        ):
            setattr(of, name, self._times.timed(part, getattr(of, name)))

    def text(self, tokens: int) -> list[int]:
        """Random tokens, which nobody else begins with."""
        return [self._words.randrange(VOCABULARY) for _ in range(tokens)]

    def ask(self, prompt: Sequence[int], parts: PartTimes | None = None) -> None:
        """Answer a prompt. What happens until its first token counts."""
        sampling = SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=_ANSWER)
        request = SequenceRequest(tuple(prompt), sampling, VerificationMode.GREEDY, 0, _ANSWER)
        self._times.ns.clear()
        self._loop.add(self._loop.make(next(self._ids), request))
        ended = False
        while not ended:
            events = self._loop.step() or ()
            if parts is not None:
                for part, taken in self._times.ns.items():
                    if part.startswith("engine"):
                        parts.taken[part].append(taken[0] / 1000)
                parts = None
            ended = any(isinstance(event, SequenceFinished) for event in events)
        # The pass that was launched behind the last one.
        while self._loop.step() is not None:
            pass


class EncodedTexts:
    """What a target's text process does with as many tokens that are sent as text, or as a conversation."""

    def __init__(self, file: str) -> None:
        self._tokenizer = Tokenizer.from_file(file)
        self._tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
        self._pieces = [one.turns[0] for one in read_conversations()]

    def encode(self, parts: PartTimes, before: int, turn: int, seed: int) -> None:
        """A prompt of at least so many tokens, and a turn behind a conversation of as many."""
        dice = random.Random(seed)
        old, new = (self._said(dice, tokens) for tokens in (before, turn))
        text = "".join([*old, *new])
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": _ANSWER}).encode()
        parts.timed("text, gateway: JSON and check", lambda: completion_request(json_object(body), 8))
        parts.timed("text, target: tokens", lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)
        encoder = PromptEncoder(ModelTokenizer(self._tokenizer, chat_template=_TEMPLATE))
        # Compiles the template, too.
        encoder.chat(_turns(old) or [{"role": "user", "content": ""}])
        parts.timed("conversation, target: tokens", lambda: encoder.chat(_turns([*old, *new])))

    def _said(self, dice: random.Random, tokens: int) -> list[str]:
        pieces, length = list[str](), 0
        while length < tokens:
            pieces.append(dice.choice(self._pieces))
            length += len(self._tokenizer.encode(pieces[-1], add_special_tokens=False).ids)
        # The last is the user's.
        return pieces[len(pieces) % 2 == 0 and len(pieces) > 1 :]


def _turns(said: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def measure(before: int, options: argparse.Namespace, turns: NextTurns) -> dict[str, float]:
    """Microseconds of each part."""
    dice, parts = random.Random(before), PartTimes()
    texts = EncodedTexts(options.tokenizer) if options.tokenizer else None
    for repeat in range(options.repeats + 2):
        # The first ones warm up.
        own = parts if repeat >= 2 else PartTimes()
        asyncio.run(door(own, [dice.randrange(_IDS) for _ in range(before + options.turn)]))
        first = turns.text(before)
        if before:
            turns.ask(first)
        turns.ask(first + turns.text(options.turn), own)
        if texts is not None:
            texts.encode(own, before, options.turn, repeat)
    return parts.medians()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", default="0,6000", type=comma_separated(int))
    parser.add_argument("--turn", type=int, default=100)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--pass-ms", type=float, default=7.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = NextTurns(options.pass_ms)
    with settled():
        found = {before: measure(before, options, turns) for before in options.before}
    names = dict.fromkeys(part for parts in found.values() for part in parts)
    rows = [{"part": part} | {f"behind {before}": found[before].get(part) for before in found} for part in names]
    show(record_table(rows))
    settings = settings_of(options, but=("tokenizer",))
    write_json(options.json, {**provenance("host.next_turn"), "settings": settings, "microseconds": found})


if __name__ == "__main__":
    main()
