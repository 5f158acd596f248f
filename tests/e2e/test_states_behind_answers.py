"""A conversation on a model whose layers keep states goes on behind its last answer, however passes are launched, and
says the same as without (fp32)."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from conftest import make_tiny
from early_steps import host_steps
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain, request
from lasting_engine import Engine
from recurrent_models import RECURRENT
from rerun_graphs import CPU, ROWS, SEQUENCES, ReadBack, ReadBackRecurrence, RerunRunner, without_gpu
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceFinished, SequenceRequest, SequenceTotals, StepStats, StepVerdict
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import Steps
from target_service.model.cuda_graphs.capturing import capture_steps
from target_service.model.cuda_graphs.runner import CaptureOptions
from target_service.model.runner import ModelRunner, runner_over
from target_service.model.support import description_of
from tree_models.building import build
from tree_models.fused.preparing import LayerOptions
from tree_models.layers.placing import Placement
from tree_models.reference import published_tensors

__all__ = ["without_gpu"]

PAGE_SIZE, LIMIT = 16, 7
PROMPT = [(11 * i) % 190 + 5 for i in range(40)]
# With two tokens between, page ends are at 48, 80 and 96, and those that passes behind an answer's end go past later.
ANSWERS = (20, 22, 24)
# Fewer rows than a chunk of a prompt has, which so becomes part of the states at once.
TREE = 20
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
}
NAMES = ["lfm2", "qwen3_next", "bamba", "jamba", "kimi_linear"]
# By the kernels of those.
ALIKE = [pytest.param(name, marks=pytest.mark.full) for name in ("minimax", "recurrent_gemma", "mamba")]
CONFIG = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS // 2)


class Way(NamedTuple):
    """How passes are launched: ahead of the results of the last one, on a device that chooses rows, as captured ones,
    and several at once."""

    ahead: bool = False
    device: bool = False
    captured: bool = False
    passes: int = 1


WAYS = {
    "one by one": Way(),
    "ahead": Way(ahead=True),
    "on a device": Way(True, True),
    "captured": Way(True, True, captured=True),
    "several at once": Way(True, True, passes=4),
    "several captured": Way(True, True, True, 4),
}


class Figures:
    """Counts rows of prompts, and drafted tokens that were accepted."""

    def __init__(self) -> None:
        self.read = self.accepted = 0

    def on_step(self, stats: StepStats) -> None:
        self.read += stats.prefill_rows
        self.accepted += stats.accepted_tokens

    def on_finished(self, sequence_id: int, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        pass

    def on_speculation(self, active: bool) -> None:
        pass


@cache
def made(name: str) -> PreTrainedModel:
    model_type, settings = RECURRENT[name]
    return make_tiny(model_type, **settings)


def captured(model: PreTrainedModel, page_size: int, kv_tokens: int) -> ModelRunner:
    """A runner whose steps are captured, by running them."""
    description = description_of(model.config)
    assert description is not None
    decoder = build(description, published_tensors(model), Placement(CPU, torch.float32))
    runner = runner_over(decoder, None, num_pages=kv_tokens // page_size, page_size=page_size, end_token_ids=())
    runner.attention = ReadBack()
    runner.enable_device_row_selection(SEQUENCES, LIMIT)
    found = RerunRunner(runner, CaptureOptions(ROWS, SEQUENCES, LayerOptions(compiled=False), few_outputs=6))
    found._recurrence = ReadBackRecurrence()
    capture_steps(found, seconds=60.0, memory_share=0.0)
    return found


class Conversation(Engine):
    """An engine, the rows of prompts that it reads, and the passes that it launches ahead."""

    def __init__(self, name: str, way: Way, page_size: int = PAGE_SIZE, kv_tokens: int = 1024) -> None:
        if way.captured:
            # Sizes are captured with trees that fill them.
            runner = captured(made(name), page_size, kv_tokens)
        else:
            runner = make_runner(made(name), page_size, kv_tokens, largest_tree=TREE)
            if way.device:
                runner.enable_device_row_selection(SEQUENCES, LIMIT)
        steps: Steps = host_steps(runner, early=way.ahead)
        if way.device:
            steps = DeviceSteps(runner, backend="torch", max_sequences=SEQUENCES, max_rows=ROWS)
        self.figures, self.ahead = Figures(), 0
        super().__init__(runner, CONFIG, steps, observer=self.figures)
        self.loop.speculation.updates.multi_step.passes = way.passes

    def check(self) -> None:
        super().check()
        self.ahead += self.loop._ahead is not None

    def draft(self, texts: list[tuple[int, ...]]) -> None:
        """Have trees proposed that go on as these, now and then."""
        self.loop.drafting.attach(ScriptedDraft(self.loop.drafting, knowing_tree(texts, 211, TREE - 1, right=0.8)))
        self.loop.drafting.listen()


@cache
def turns_of(name: str, kind: str) -> list[tuple[SequenceRequest, tuple[int, ...]]]:
    """What is asked, with all that was said before, and what the model answers."""
    text, turns = PROMPT, []
    for count in ANSWERS:
        wanted = request([*text, 4, 5], count, sampling=SAMPLINGS[kind], max_draft_nodes=TREE - 1)
        turns.append((wanted, plain(made(name), wanted)))
        text = [*wanted.token_ids, *turns[-1][1]]
    return turns


@pytest.mark.values
@pytest.mark.parametrize("name", [*NAMES, *ALIKE])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.usefixtures("without_gpu")
def test_a_conversation_goes_on_behind_its_last_answer(name: str, way: str, kind: str, drafts: bool) -> None:
    turns, talk, of_way = turns_of(name, kind), Conversation(name, WAYS[way]), WAYS[way]
    if drafts and not of_way.device:
        talk.draft([(*wanted.token_ids, *answer) for wanted, answer in turns])
    with torch.inference_mode():
        for (wanted, answer), expected in zip(turns, (0, 48, 80), strict=True):
            read, predicted = talk.figures.read, answer if drafts and of_way.device else ()
            said, (cached,) = talk.answer(replace(wanted, prediction=predicted, speculate=drafts))
            assert said == [answer]
            # Passes that were launched with the last one of an answer may have gone past another page end.
            assert cached == expected or (drafts and of_way.passes > 1 and cached in (0, 48))
            # The last row makes the first token.
            assert talk.figures.read - read == len(wanted.token_ids) - cached - 1
    assert bool(talk.figures.accepted) == drafts
    # Where there are drafts, when a pass waits for them hangs on times.
    assert drafts or bool(talk.ahead) == of_way.ahead


@pytest.mark.parametrize("passes", [1, 4])
def test_no_state_is_taken_that_is_behind_an_answer_s_end(passes: int) -> None:
    """Answers that end about a page end with a token that the device does not stop at."""
    talk, kind = Conversation("qwen3_next", Way(True, True, passes=passes)), SAMPLINGS["seeded"]
    whole = plain(made("qwen3_next"), request(PROMPT, 14, sampling=kind))
    ends = [place for place in range(5, 11) if whole.index(whole[place]) == place]
    assert len(ends) > 4
    found = []
    for number, end in enumerate(ends):
        sampling = replace(kind, stop_token_ids=(whole[end],))
        wanted = request(PROMPT, 14, sampling=sampling, tenant=str(number))
        assert talk.answer(wanted) == ([whole[: end + 1]], [0])
        following = replace(wanted, token_ids=(*PROMPT, *whole[: end + 1], 4, 5), max_tokens=4)
        said, (cached,) = talk.answer(following)
        assert said == [plain(made("qwen3_next"), replace(following, sampling=kind))]
        # A pass that was launched with the last one or behind it may have gone past the page end.
        assert cached in (0, (len(PROMPT) + end) // PAGE_SIZE * PAGE_SIZE)
        found.append(cached)
    assert any(found) or passes > 1


class Branching:
    """Requests for what comes behind any part of a few texts, which end, are cancelled and are preempted at any time,
    of an engine with few pages and states."""

    def __init__(self, name: str, way: Way, seed: int) -> None:
        self.random, kind = random.Random(seed), SAMPLINGS["seeded" if seed % 2 else "greedy"]
        prompts = [PROMPT[:24], [*PROMPT[:12], 7, 8, 9]]
        asked = [request(prompt, 40, sampling=kind, max_draft_nodes=TREE - 1) for prompt in prompts]
        self.texts = [(*one.token_ids, *plain(made(name), one)) for one in asked]
        # What is sampled depends on the place in the text, and not on where a request begins.
        self.asked, self.begins = asked, [len(prompt) for prompt in prompts]
        self.ends: list[list[int]] = [[] for _ in prompts]
        self.talk, self.device = Conversation(name, way, 4, 192), way.device
        self.expected, self.said = dict[int, tuple[int, ...]](), dict[int, list[int]]()
        self.cached = 0
        if not self.device:
            self.talk.draft(self.texts)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            match self.random.randrange(12):
                case 0 | 1 | 2:
                    self.submit()
                case 3 if self.expected:
                    ended = self.random.choice([*self.expected])
                    self.talk.loop.end(ended, "cancelled")
                    del self.expected[ended]
                case 4 if self.talk.loop.scheduler.running:
                    self.talk.loop._read_again(self.random.choice(self.talk.loop.scheduler.running))
                case _:
                    self.step()
            self.talk.check()
        while self.expected:
            self.step()

    def submit(self) -> None:
        number = self.random.randrange(len(self.texts))
        text, asked = self.texts[number], self.asked[number]
        start, count = self.random.randint(self.begins[number], len(text) - 1), self.random.randint(1, 25)
        if self.ends[number] and self.random.random() < 0.7:
            start = min(self.random.choice(self.ends[number]) + self.random.randrange(4), len(text) - 1)
        expected = text[start : start + count]
        self.ends[number].append(start + len(expected))
        predicted = expected if self.device and self.random.random() < 0.5 else ()
        wanted = replace(asked, token_ids=text[:start], max_tokens=len(expected), prediction=predicted)
        sequence_id = self.talk.add(wanted)
        self.expected[sequence_id], self.said[sequence_id] = expected, []

    def step(self) -> None:
        for event in self.talk.loop.step() or ():
            if isinstance(event, StepVerdict):
                said = self.said[event.sequence_id]
                said += event.token_ids
                assert tuple(said) == self.expected[event.sequence_id][: len(said)]
            elif isinstance(event, SequenceFinished):
                assert len(self.said[event.sequence_id]) == len(self.expected.pop(event.sequence_id))
                self.cached += event.totals.cached_tokens
        self.talk.check()


@pytest.mark.values
@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
@pytest.mark.parametrize("way", WAYS)
# One for each way, and in make test-full more.
@pytest.mark.parametrize("seed", [*range(len(WAYS)), *(pytest.param(seed, marks=pytest.mark.full) for seed in (6, 7))])
@pytest.mark.usefixtures("without_gpu")
def test_whatever_ends_and_when_answers_are_the_same(name: str, way: str, seed: int) -> None:
    branching = Branching(name, WAYS[way], seed)
    with torch.inference_mode():
        branching.run(120)
    assert branching.cached > 100 and branching.talk.figures.accepted
