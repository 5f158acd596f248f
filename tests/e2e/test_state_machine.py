"""The engine under any interleaving of requests, cancellations, steps and draft faults, against a simple model.

The model of the service is one line: every sequence says a prefix of what plain decoding says, and all of it when it
is let run; what a draft does or fails to do appears nowhere in it.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from conftest import make_tiny
from early_steps import host_steps
from engine_harness import engine_config, grow, plain, request, run
from examples import examples
from hidden_states import states_of
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from recurrent_models import RECURRENT
from structured_forms import SCHEMAS, VOCABULARY, trained_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from draft_service.drafters.hidden_states import read_vectors
from outrider.drafting.events import Connected, Disconnected, Grown, SequenceFailure
from outrider.sampling import SamplingParams
from outrider.structured_output import StructuredOutput
from outrider.wire.frames import (
    DraftInfo,
    FeatureRequest,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
    TreeLimits,
    Vectors,
)
from target_service.core.sequence import SequenceFinished, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import Steps
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.launch_mode import LaunchMode

END = 2
INFO = DraftInfo("fuzzed", 0, "", TreeLimits(), 1 << 20, "0")
FEATURES = FeatureRequest((0, 2), 96, "float32")
FORM = StructuredOutput(json_schema=json.dumps(SCHEMAS["nested"]))
REQUESTS = (
    request([5, 6, 7], 14),
    request([9] * 33, 9),
    request([40, 41], 12, sampling=SamplingParams(temperature=0.9, seed=3, ignore_eos=True)),
    request([8, 9, 10, 11], 10, sampling=SamplingParams(repetition_penalty=1.4, ignore_eos=True)),
    request([3], 1),
    # A grammar follows it, so that it sits out passes of the others.
    request([5, 9, 14], 24, sampling=SamplingParams(structured_output=FORM)),
    request([5], 20, sampling=SamplingParams(temperature=1.0, seed=3, structured_output=FORM, logprobs=1)),
    # Its first step samples a token already.
    request([3], 9, sampling=SamplingParams(repetition_penalty=1.4, ignore_eos=True)),
    request(
        [12, 12, 12],
        13,
        sampling=SamplingParams(frequency_penalty=-0.5, logit_bias={12: 1.0}, min_tokens=6, logprobs=2),
    ),
)


@functools.cache
def model(kind: str) -> PreTrainedModel:
    """With the vocabulary of a tokenizer, which forms of output need; "windowed" in its second layer, or "recurrent" in
    all but that."""
    if kind == "full":
        return make_tiny(vocab_size=VOCABULARY, eos_token_id=END)
    if kind == "recurrent":
        model_type, settings = RECURRENT["qwen3_next, dense"]
        return make_tiny(model_type, vocab_size=VOCABULARY, eos_token_id=END, **settings)
    window = {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return make_tiny("qwen3", vocab_size=VOCABULARY, eos_token_id=END, **window)


@functools.cache
def truth(index: int, kind: str) -> tuple[int, ...]:
    wanted = REQUESTS[index]
    if wanted.sampling.structured_output is None:
        return plain(model(kind), wanted)
    # One row a step, verified by the host.
    (outcome,) = run(runner_of(16, 512, kind), [replace(wanted, speculate=False)])
    return outcome.token_ids


def runner_of(page_size: int, kv_tokens: int, kind: str, chunk: int = 64) -> ModelRunner:
    pages = {"num_pages": kv_tokens // page_size, "page_size": page_size}
    # Windows have hardly more than one sequence needs, and prompts may have more rows than what is kept of nodes.
    room = {"window_share": 0.2, "window_rows": 2 * chunk, "state_slots": 3, "kept_states": 3, "largest_tree": 30}
    return runner_for(model(kind), trained_tokenizer(), **pages, **room)


@functools.cache
def states(index: int, kind: str) -> Tensor:
    """[tokens, width] of the whole sequence, by transformers' own forward pass."""
    return states_of(model(kind), [*REQUESTS[index].token_ids, *truth(index, kind)], FEATURES.layers)


class FuzzedDraft:
    """A draft link that keeps what it was told and says nothing by itself: the machine decides what arrives."""

    def __init__(self, wanted: Mapping[int, int], kind: str) -> None:
        """`wanted` stays the machine's own table: which request a sequence is."""
        self._wanted, self._kind = wanted, kind
        # The first token of each sequence whose vector did not come yet.
        self.next_vectors: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.steps: dict[int, int] = {}
        self.next_ids: dict[int, int] = {}
        # Sequences that it gave up, of which it is told until the engine has read that.
        self.given_up: set[int] = set()

    def open(self, sequence: OpenSequence) -> None:
        self.tokens[sequence.sequence_id] = list(sequence.token_ids)
        self.steps[sequence.sequence_id] = sequence.step
        self.next_ids[sequence.sequence_id] = 1
        self.next_vectors[sequence.sequence_id] = 0
        self.given_up.discard(sequence.sequence_id)

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        for advance in advances:
            assert advance.step == self.steps[advance.sequence_id] + 1
            self.steps[advance.sequence_id] = advance.step
            tokens = self.tokens[advance.sequence_id]
            tokens.extend(advance.token_ids)
            if advance.features is not None:
                self._take(advance.sequence_id, len(tokens) - 1 - advance.features.rows, advance.features)

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        for one in features:
            self._take(one.sequence_id, one.position, one.vectors)

    def _take(self, sequence_id: int, position: int, vectors: Vectors) -> None:
        """Whatever happened before: no vector comes twice, none too early, and each is its token's."""
        end = position + vectors.rows
        assert self.next_vectors[sequence_id] <= position < end <= len(self.tokens[sequence_id]) - 1
        self.next_vectors[sequence_id] = end
        expected = states(self._wanted[sequence_id], self._kind)[position:end]
        torch.testing.assert_close(read_vectors(vectors), expected, rtol=1e-3, atol=1e-3)

    def forget_given_up(self) -> None:
        """The engine has read it: from now on it is an error to tell of them."""
        while self.given_up:
            self.tokens.pop(self.given_up.pop(), None)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self.tokens.pop(sequence_id, None)


class ServiceMachine(RuleBasedStateMachine):
    """Rules are what clients and drafts may do; invariants are what the service owes."""

    sequences: Bundle[int] = Bundle("sequences")

    @initialize(
        page_size=st.sampled_from([1, 16]),
        chunk=st.sampled_from([1, 16, 64]),
        seed=st.integers(0, 99),
        device=st.sampled_from(["host", "host, ahead", "itself", "itself, looking up"]),
        passes=st.sampled_from([1, 2, 4]),
        kept=st.sampled_from([0, 3, 100]),
        shares=st.booleans(),
        kind=st.sampled_from(["full", "windowed", "recurrent"]),
        rests=st.booleans(),
    )
    def begin(
        self,
        page_size: int,
        chunk: int,
        seed: int,
        device: str,
        passes: int,
        kept: int,
        shares: bool,
        kind: str,
        rests: bool,
    ) -> None:
        """Steps are verified by the host, or by the device itself, which may draft too."""
        self.runner, self.kind = runner_of(page_size, 128, kind, chunk), kind
        config = engine_config(prefill_chunk=chunk, max_step_rows=96, max_running=3, disable_above=2)
        # Nothing arrives while the machine's own thread waits, so it does not.
        config = replace(config, draft_wait_ms=0.0, feature_window=kept, prefix_cache=shares, max_draft_nodes=29)
        steps: Steps = host_steps(self.runner, early=device == "host, ahead")
        if device == "itself, looking up":
            self.runner.enable_device_row_selection(3, 7)
        if device.startswith("itself"):
            steps = DeviceSteps(self.runner, max_sequences=3, max_rows=96)
        self.loop = EngineLoop(self.runner, config, steps=steps)
        self.loop.speculation.updates.multi_step.passes = passes
        self.wanted: dict[int, int] = {}
        self.draft = FuzzedDraft(self.wanted, kind)
        self.loop.drafting.attach(self.draft)
        self.random = random.Random(seed)
        if rests:
            # Any step may wait for drafts, or leave the draft alone.
            self.loop.speculation.controller.choose_wait = (  # type: ignore[method-assign]
                lambda *_load, **_how: self.random.choice([*LaunchMode])
            )
        self.said: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.next_id = 1

    @rule(target=sequences, index=st.integers(0, len(REQUESTS) - 1))
    def submit(self, index: int) -> int:
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        live = self.loop.make(sequence_id, REQUESTS[index])
        self.loop.constrain(live)
        self.loop.add(live)
        self.wanted[sequence_id], self.said[sequence_id] = index, []
        return sequence_id

    @rule(sequence_id=consumes(sequences))
    def cancel(self, sequence_id: int) -> None:
        self.loop.end(sequence_id, "cancelled")
        self.ended.add(sequence_id)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            for event in self.loop.step() or ():
                if isinstance(event, StepVerdict):
                    self.said[event.sequence_id].extend(event.token_ids)
                else:
                    assert isinstance(event, SequenceFinished)
                    self.ended.add(event.sequence_id)
                    assert tuple(self.said[event.sequence_id]) == self.truth(event.sequence_id)
            self.draft.forget_given_up()

    @rule(reads=st.booleans())
    def connect(self, reads: bool) -> None:
        self.draft.tokens.clear()
        self.loop.drafting.receive(Connected(replace(INFO, features=FEATURES if reads else None)))
        self.loop.drafting.listen()

    @rule()
    def disconnect(self) -> None:
        self.loop.drafting.receive(Disconnected("fuzzed"))
        self.loop.drafting.listen()

    @precondition(lambda self: self.draft.tokens)
    @rule(right=st.booleans(), replaces=st.booleans(), late=st.booleans(), data=st.data())
    def grow(self, right: bool, replaces: bool, late: bool, data: st.DataObject) -> None:
        """A well-formed growth, right or wrong, for a sequence the draft believes open; maybe after another step."""
        sequence_id = data.draw(st.sampled_from(sorted(self.draft.tokens)))
        tokens, step = self.draft.tokens[sequence_id], self.draft.steps[sequence_id]
        index = self.wanted[sequence_id]
        ahead = self.truth(sequence_id)[len(tokens) - len(REQUESTS[index].token_ids) :] if right else ()
        tree = grow(tokens[-1], self.random, 12, lambda path: self._token(path, ahead))
        first = self.draft.next_ids[sequence_id]
        self.draft.next_ids[sequence_id] += tree.drafted
        sent = SequenceGrowth(
            sequence_id,
            step,
            first,
            tuple(0 if p == 0 else first + p - 1 for p in tree.parents[1:]),
            tree.token_ids[1:],
            tree.scores[1:],
            replaces=replaces,
        )
        if late:
            self.step(1)
        self.loop.drafting.receive(Grown([sent]))

    def truth(self, sequence_id: int) -> tuple[int, ...]:
        return truth(self.wanted[sequence_id], self.kind)

    def _token(self, path: Sequence[int], ahead: Sequence[int]) -> int:
        if len(path) < len(ahead) and tuple(path) == tuple(ahead[: len(path)]):
            return ahead[len(path)]
        return self.random.randrange(VOCABULARY)

    @rule(
        sequence_id=st.integers(0, 12),
        step=st.integers(0, 40),
        first=st.integers(0, 9),
        parents=st.lists(st.integers(0, 12), max_size=4),
        replaces=st.booleans(),
    )
    def malformed_growth(self, sequence_id: int, step: int, first: int, parents: list[int], replaces: bool) -> None:
        """What a link lets pass: ids in range and lengths that agree, all else is up to the draft."""
        tokens = tuple(self.random.randrange(VOCABULARY) for _ in parents)
        scores = tuple(self.random.random() for _ in parents)
        sent = SequenceGrowth(sequence_id, step, first, tuple(parents), tokens, scores, replaces=replaces)
        self.draft.next_ids[sequence_id] = max(self.draft.next_ids.get(sequence_id, 1), first + len(parents))
        self.loop.drafting.receive(Grown([sent]))

    @rule(sequence_id=st.integers(0, 12))
    def draft_gives_up(self, sequence_id: int) -> None:
        self.loop.drafting.receive(SequenceFailure(sequence_id, "FUZZED", "no reason"))
        self.draft.given_up.add(sequence_id)

    @invariant()
    def what_is_said_is_plain_decoding(self) -> None:
        for sequence_id, said in getattr(self, "said", {}).items():
            assert tuple(said) == self.truth(sequence_id)[: len(said)]

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.pages.check_integrity(live.sequence for live in self.loop.live.values())

    def teardown(self) -> None:
        for _ in range(400):
            if not getattr(self, "said", None) or len(self.ended) == len(self.said):
                break
            self.step(1)
        assert self.ended == set(getattr(self, "said", {}))
        assert self.runner.cache.used_pages == 0


# It has found more than any other test.
ServiceMachine.TestCase.settings = examples(120, stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestServiceMachine = ServiceMachine.TestCase
