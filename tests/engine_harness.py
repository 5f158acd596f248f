"""Runs the engine's loop to the end, and the plain decoding that it must equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from early_steps import host_steps
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from draft_service import in_process as inprocess
from draft_service.in_process import InprocessLink
from outrider.drafting.events import Connected, DraftEvents, Grown
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import (
    DraftInfo,
    DraftLink,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
    TreeLimits,
)
from target_service.assembly import connect_between_steps
from target_service.config import TargetConfig
from target_service.core.sequence import MAX_PASSES, SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import Steps
from target_service.model.runner import ModelRunner
from target_service.sampling.distribution import LogitShaper
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.verification import coupled_token
from tree_kernels.verification.distribution import distribution_of

Propose = Callable[[Sequence[int], random.Random], TokenTree]
Connect = Callable[[DraftEvents], DraftLink]
# Of a step that the device verifies.
DEVICE_SEQUENCES = 32


def request(token_ids: Sequence[int], max_tokens: int = 32, **options: object) -> SequenceRequest:
    """A request with the mode its temperature asks for, and a fixed seed."""
    sampling = options.pop("sampling", SamplingParams(ignore_eos=True))
    assert isinstance(sampling, SamplingParams)
    mode = options.pop("mode", None)
    assert mode is None or isinstance(mode, VerificationMode)
    return SequenceRequest(
        token_ids=tuple(token_ids),
        sampling=sampling,
        mode=sampling.mode(mode),
        seed=sampling.seed if sampling.seed is not None else 1234,
        max_tokens=max_tokens,
        **options,  # type: ignore[arg-type]
    )


def engine_config(
    *,
    prefill_chunk: int = 64,
    max_step_rows: int = 256,
    max_running: int = 16,
    disable_above: int = 64,
    wait_seconds: float = 0.05,
) -> TargetConfig:
    return TargetConfig(
        draft="the test's own",
        max_running=max_running,
        max_waiting=64,
        max_step_rows=max_step_rows,
        prefill_chunk=prefill_chunk,
        speculative_disable_queue_size=disable_above,
        draft_wait_ms=wait_seconds * 1e3,
        # Which rows of prompts a step has does not hang on how long steps take here.
        prompt_wait_ms=60_000,
        feature_window=0,
    )


@dataclass
class ScriptedDraft:
    """A draft link in the test's own thread. `propose` gets the tokens so far and returns any tree.

    `late` holds each growth back by so many advances, as a slow draft would.
    """

    events: DraftEvents
    propose: Propose
    late: int = 0
    replaces: bool = True
    seed: int = 0
    _tokens: dict[int, list[int]] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)
    _next_ids: dict[int, int] = field(default_factory=dict)
    _held: list[list[SequenceGrowth]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.connect()

    def connect(self) -> None:
        self.events.receive(Connected(DraftInfo("scripted", 0, "", TreeLimits(), 1 << 20, "0")))

    def open(self, sequence: OpenSequence) -> None:
        self._tokens[sequence.sequence_id] = list(sequence.token_ids)
        self._steps[sequence.sequence_id] = sequence.step
        self._next_ids[sequence.sequence_id] = 1
        self._send([self._growth(sequence.sequence_id)])

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        for advance in advances:
            assert advance.step == self._steps[advance.sequence_id] + 1
            self._steps[advance.sequence_id] = advance.step
            self._tokens[advance.sequence_id].extend(advance.token_ids)
        self._send([self._growth(advance.sequence_id) for advance in advances])

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        raise AssertionError(f"{len(features)} features that nobody asked for")

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            del self._tokens[sequence_id]

    def _send(self, growths: list[SequenceGrowth]) -> None:
        self._held.append(growths)
        if len(self._held) > self.late:
            self.events.receive(Grown(self._held.pop(0)))

    def _growth(self, sequence_id: int) -> SequenceGrowth:
        tree = self.propose(self._tokens[sequence_id], self._random)
        first = self._next_ids[sequence_id]
        self._next_ids[sequence_id] += tree.drafted
        return SequenceGrowth(
            sequence_id=sequence_id,
            base_step=self._steps[sequence_id],
            first_node_id=first,
            parent_ids=tuple(0 if parent == 0 else first + parent - 1 for parent in tree.parents[1:]),
            token_ids=tree.token_ids[1:],
            scores=tree.scores[1:],
            distributions={
                0 if row == 0 else first + row - 1: distribution for row, distribution in tree.distributions.items()
            },
            replaces=self.replaces,
        )


@dataclass(frozen=True)
class Outcome:
    """What one sequence said, and its last event."""

    token_ids: tuple[int, ...]
    verdicts: tuple[StepVerdict, ...]
    finished: SequenceFinished


def run(
    runner: ModelRunner,
    requests: Sequence[SequenceRequest],
    *,
    propose: Propose | None = None,
    connect: Connect | None = None,
    config: TargetConfig | None = None,
    step_cost: StepCost | None = None,
    stagger: int = 0,
    late: int = 0,
    can_launch_before_results: bool = False,
    on_device: bool = False,
    launch: Steps | None = None,
    passes: int = 1,
) -> list[Outcome]:
    """Run all requests together, each joining `stagger` steps after the one before. Checks the KV cache.

    `can_launch_before_results` prepares each step before the one under way has ended, as on a device that verifies by
    itself; `on_device` does so with what such a device runs, in its plain form. `launch` takes the place of either.
    `passes` is how many such steps begin with, which the engine may change.
    """
    if launch is None and on_device:
        launch = DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=512)
    launch = launch or host_steps(runner, early=can_launch_before_results)
    loop = EngineLoop(runner, config or engine_config(), steps=launch, step_cost=step_cost)
    loop.speculation.updates.multi_step.passes = passes
    if propose is not None:
        loop.drafting.attach(ScriptedDraft(loop.drafting, propose, late=late))
    if connect is None and runner.in_pass is not None and launch.tables is None:
        between_steps = connect_between_steps(runner, loop.keys_of)
        connect = lambda events: between_steps(events, runner.vocabulary_size, "")  # noqa: E731
    if connect is not None:
        loop.drafting.attach(connect(loop.drafting))
    loop.drafting.listen()
    waiting = list(enumerate(requests, start=1))
    verdicts: dict[int, list[StepVerdict]] = {i: [] for i, _ in waiting}
    finished: dict[int, SequenceFinished] = {}
    steps = 0
    while len(finished) < len(requests):
        while waiting and steps >= stagger * (len(requests) - len(waiting)):
            sequence_id, wanted = waiting.pop(0)
            live = loop.make(sequence_id, wanted)
            loop.constrain(live)
            loop.add(live)
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                verdicts[event.sequence_id].append(event)
            else:
                assert isinstance(event, SequenceFinished)
                finished[event.sequence_id] = event
        loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
        for live in loop.live.values():
            sequence = live.sequence
            assert 0 <= sequence.kv_length < len(sequence.token_ids) + MAX_PASSES
            assert len(sequence.token_ids) == sequence.prompt_length + sequence.totals.completion_tokens
        steps += 1
    assert runner.cache.used_pages == 0
    return [
        Outcome(tuple(t for v in verdicts[i] for t in v.token_ids), tuple(verdicts[i]), finished[i])
        for i in range(1, len(requests) + 1)
    ]


def probs_of(params: SamplingParams, shaped: Tensor) -> Tensor:
    """The distribution [V] of logits that are shaped already."""
    return distribution_of(shaped, params.temperature, params.top_k, params.top_p, params.min_p)


# With the model, so that no later one has its id.
_said: dict[tuple[int, str], tuple[PreTrainedModel, tuple[int, ...]]] = {}


def plain(model: PreTrainedModel, wanted: SequenceRequest) -> tuple[int, ...]:
    """The oracle of one request; see `plain_each`."""
    return plain_each(model, [wanted])[0]


def plain_each(model: PreTrainedModel, wanted: Sequence[SequenceRequest]) -> list[tuple[int, ...]]:
    """The oracle: whole forward passes of transformers' own model, one for each token, no cache and no tree. Computed
    once in a process for the same model, whose weights must stay, and the same request."""
    keys = [(id(model), repr(one)) for one in wanted]
    missing = {key: one for key, one in zip(keys, wanted, strict=True) if key not in _said}
    if missing:
        tokens = _say(model, list(missing.values()))
        _said.update({key: (model, each) for key, each in zip(missing, tokens, strict=True)})
    return [_said[key][1] for key in keys]


@torch.inference_mode()
def _say(model: PreTrainedModel, wanted: Sequence[SequenceRequest]) -> list[tuple[int, ...]]:
    """Texts side by side: a pass of a tiny model takes as long for one."""
    model.set_attn_implementation("eager")
    ends = tuple(e for e in [model.config.eos_token_id] if e is not None)
    texts = [list(one.token_ids) for one in wanted]
    shapers = [LogitShaper(one.sampling, one.token_ids, ends) for one in wanted]

    def goes_on(place: int) -> bool:
        one, said = wanted[place], texts[place][len(wanted[place].token_ids) :]
        return len(said) < one.max_tokens and (one.sampling.ignore_eos or not said or said[-1] not in ends)

    while going := [place for place in range(len(wanted)) if goes_on(place)]:
        longest = max(len(texts[place]) for place in going)
        # Filled up behind, where no row of the text looks.
        rows = [texts[place] + texts[place][-1:] * (longest - len(texts[place])) for place in going]
        for place, logits in zip(going, model(torch.tensor(rows), use_cache=False).logits, strict=True):
            one, text = wanted[place], texts[place]
            shaped = shapers[place].shaped(logits[len(text) - 1], text[len(one.token_ids) :])
            if one.mode is VerificationMode.GREEDY:
                text.append(int(torch.argmax(shaped)))
            else:
                text.append(coupled_token(probs_of(one.sampling, shaped), one.seed, len(text)))
    return [tuple(text[len(one.token_ids) :]) for one, text in zip(wanted, texts, strict=True)]


def make_runner(model: PreTrainedModel, page_size: int = 16, kv_tokens: int = 2048, **options: object) -> ModelRunner:
    return runner_for(model, None, num_pages=kv_tokens // page_size, page_size=page_size, **options)  # type: ignore[arg-type]


@contextmanager
def real_drafter(name: str, vocabulary_size: int) -> Iterator[Connect]:
    """A registered drafter, in process, with a memory of its own for every engine that connects."""
    links: list[InprocessLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(inprocess.connect(name)(events, vocabulary_size, ""))
        return links[-1]

    yield connect
    for link in links:
        link.stop()


def random_tree(vocabulary_size: int, nodes: int) -> Propose:
    """Trees of random shape and tokens: an adversary that knows nothing."""

    def propose(tokens: Sequence[int], rng: random.Random) -> TokenTree:
        return grow(tokens[-1], rng, nodes, lambda _: rng.randrange(vocabulary_size))

    return propose


def knowing_tree(outputs: Sequence[Sequence[int]], vocabulary_size: int, nodes: int, right: float) -> Propose:
    """Trees that hold the true continuation for a random while, among wrong siblings.

    `outputs` are whole sequences (prompt and output); the one that starts with the tokens so far is continued.
    """

    def propose(tokens: Sequence[int], rng: random.Random) -> TokenTree:
        truth = next((o for o in outputs if list(o[: len(tokens)]) == list(tokens)), tokens)
        ahead = list(truth[len(tokens) :])

        def pick(path: Sequence[int]) -> int:
            on_path = list(path) == ahead[: len(path)] and len(path) < len(ahead)
            return ahead[len(path)] if on_path and rng.random() < right else rng.randrange(vocabulary_size)

        return grow(tokens[-1], rng, nodes, pick)

    return propose


def grow(root: int, rng: random.Random, nodes: int, pick: Callable[[Sequence[int]], int]) -> TokenTree:
    token_ids, parents, paths = [root], [0], [()]
    seen: set[tuple[int, int]] = set()
    for _ in range(rng.randrange(nodes + 1)):
        # The last rows are favoured, so that deep paths appear.
        parent = rng.choice([len(token_ids) - 1, rng.randrange(len(token_ids))])
        token = pick(paths[parent])
        if (parent, token) not in seen:
            seen.add((parent, token))
            token_ids.append(token)
            parents.append(parent)
            paths.append((*paths[parent], token))  # type: ignore[arg-type]
    scores = (1.0, *(rng.random() for _ in token_ids[1:]))
    return TokenTree(tuple(token_ids), tuple(parents), scores)
