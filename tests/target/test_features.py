"""What a drafter gets are the hidden states of the model's own forward pass, of every committed token, once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from eagle_heads import make_head
from engine_harness import Propose, engine_config, knowing_tree, make_runner, plain_each, random_tree, request, run
from feature_link import FeatureLink
from hidden_states import states_of
from torch import Tensor
from transformers import PreTrainedModel

from draft_service.drafters.hidden_states import read_vectors
from draft_service.eagle.checkpoint import EagleCheckpoint, save_head
from outrider.drafting.events import DraftEvents
from outrider.errors import NotSupported
from outrider.heads import ShippedHead
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.wire.frames import DraftLink, FeatureRequest
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.launching import StepLauncher
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution.host_executor import HostSteps
from target_service.model.head_projection import DraftHead, read_draft_head
from target_service.model.runner import ModelRunner
from target_service.speculation.hidden_states.encoding import encode
from target_service.speculation.hidden_states.kept import KeptVectors
from target_service.speculation.hidden_states.sending import Features
from target_service.speculation.policy.step_cost import StepCost

VOCABULARY, HIDDEN, LAYERS = 211, 48, 2
# The outputs of both layers, and the state after the last norm.
EVERY = FeatureRequest((0, 1, 2), 3 * HIDDEN, "float32")
GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)


def requests(sampling: SamplingParams = GREEDY, max_tokens: int = 24) -> list[SequenceRequest]:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 5, 16, 17, 40)]
    return [request(prompt, max_tokens, sampling=sampling) for prompt in prompts]


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    model = make_tiny()
    model.set_attn_implementation("eager")
    return model


def knowing(teacher: PreTrainedModel, wanted: Sequence[SequenceRequest]) -> tuple[Propose, list[tuple[int, ...]]]:
    said = plain_each(teacher, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, said, strict=True)]
    return knowing_tree(whole, VOCABULARY, 40, right=0.8), said


def same_as_the_models(link: FeatureLink, teacher: PreTrainedModel) -> None:
    for sequence_id, got in link.got.items():
        tokens = link.tokens[sequence_id]
        if len(tokens) < 2:
            continue
        assert max(got) == len(tokens) - 2
        first, last, normed = link.stacked(sequence_id).chunk(3, dim=-1)
        expected = states_of(teacher, tokens[:-1], (0, LAYERS))[list(got)]
        torch.testing.assert_close(torch.cat([first, normed], dim=-1), expected, rtol=1e-4, atol=1e-4)
        # transformers tells of the last layer only after the norm.
        with torch.no_grad():
            torch.testing.assert_close(teacher.model.norm(last), normed, rtol=1e-4, atol=1e-4)


# With it, drafts have to pay, and while it is found out whether they do, steps are launched ahead.
COST = StepCost([(1, 1.0), (64, 1.1)])
# Tokens in the cache, of sequences that need more together.
SCARCE = 9 * 16
RUNS: dict[str, dict[str, Any]] = {
    "together": {},
    "staggered": {"stagger": 3},
    "seeded": {"sampling": SEEDED},
    "small chunks": {"config": engine_config(prefill_chunk=7)},
    "chunks of one": {"config": engine_config(prefill_chunk=1)},
    "small steps": {"config": engine_config(prefill_chunk=16, max_step_rows=20)},
    "preempted": {"kv_tokens": SCARCE, "page_size": 1},
    "steps ahead": {"can_launch_before_results": True, "plain": True, "step_cost": COST},
    "steps ahead, preempted": {
        "can_launch_before_results": True,
        "plain": True,
        "step_cost": COST,
        "kv_tokens": SCARCE,
        "stagger": 2,
    },
    "steps ahead, on the device": {"on_device": True, "plain": True, "step_cost": COST, "stagger": 2},
    "verified on the device": {"on_device": True, "stagger": 2},
    "kept too": {"keep": 8, "kv_tokens": SCARCE, "page_size": 1},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_every_committed_token_has_its_state(
    settings: dict[str, Any], tiny_model: PreTrainedModel, teacher: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, launched = dict(settings), [0, 0]
    begin = StepLauncher._launch

    def counted(*arguments: Any, behind: Step | None = None, **options: Any) -> Any:
        launched[behind is not None] += 1
        return begin(*arguments, behind=behind, **options)

    monkeypatch.setattr(StepLauncher, "_launch", counted)
    wanted = requests(settings.pop("sampling", GREEDY))
    propose, said = knowing(teacher, wanted)
    links: list[FeatureLink] = []
    alone = settings.pop("plain", False)
    config = settings.pop("config", engine_config())
    config = replace(config, feature_window=settings.pop("keep", 0))
    kv_tokens = settings.pop("kv_tokens", 2048)
    runner = make_runner(tiny_model, kv_tokens=kv_tokens, page_size=settings.pop("page_size", 16))

    def connect(events: DraftEvents) -> DraftLink:
        links.append(FeatureLink(events, root_only if alone else propose, wanted=EVERY))
        return links[-1]

    outcomes = run(runner, wanted, connect=connect, config=config, **settings)
    assert [outcome.token_ids for outcome in outcomes] == said
    accepted = sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)
    assert launched[True] > 5 if alone else accepted > 20
    if kv_tokens == SCARCE:
        assert sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0
    (link,) = links
    assert len(link.got) == len(wanted) and link.steps_without == 0
    assert {link.begins(sequence_id) for sequence_id in link.got} == {0}
    same_as_the_models(link, teacher)


def root_only(tokens: Sequence[int], _: random.Random) -> TokenTree:
    return TokenTree.root_only(tokens[-1])


@dataclass
class Drive:
    """An engine's loop that is stepped by hand, with a link that reads features."""

    runner: ModelRunner
    propose: Propose
    wanted: FeatureRequest = EVERY
    config: TargetConfig = field(default_factory=engine_config)
    connects: bool = True
    keep: int = 0
    said: dict[int, list[int]] = field(default_factory=dict)
    going: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        config = replace(self.config, feature_window=self.keep)
        self.loop = EngineLoop(self.runner, config, steps=HostSteps(self.runner))
        self.link = FeatureLink(self.loop.drafting, self.propose, wanted=self.wanted, connects=self.connects)
        self.loop.drafting.attach(self.link)

    def add(self, requests: Sequence[SequenceRequest]) -> None:
        for wanted in requests:
            number = len(self.said) + 1
            self.said[number] = []
            self.going.add(number)
            self.loop.add(self.loop.make(number, wanted))

    def steps(self, count: int = 1000) -> None:
        while self.going and count:
            count -= 1
            for event in self.loop.step() or ():
                if isinstance(event, StepVerdict):
                    self.said[event.sequence_id] += event.token_ids
                else:
                    assert isinstance(event, SequenceFinished)
                    self.going.discard(event.sequence_id)

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        return [tuple(said) for said in self.said.values()]


@pytest.mark.parametrize("keep", [0, 4, 100])
def test_a_draft_that_connects_late_gets_what_is_kept(
    keep: int, tiny_model: PreTrainedModel, teacher: PreTrainedModel
) -> None:
    wanted = requests()
    propose, said = knowing(teacher, wanted)
    drive = Drive(make_runner(tiny_model), propose, keep=keep)
    drive.add(wanted)
    drive.steps(4)
    drive.link.disconnect()
    drive.steps(3)
    # A piece is cut once what is not kept any more is half of what is.
    assert drive.loop.features.kept_bytes <= 1.5 * keep * EVERY.width * 4 * len(drive.going)
    drive.link.connect()
    going = set(drive.going)
    drive.steps()
    assert drive.outputs == said and going
    for sequence_id in going:
        # All of a short sequence, the newest of a long one, and without any kept what the next step reads.
        assert drive.link.begins(sequence_id) == max(0, drive.link.opened_at[sequence_id] - 1 - keep)
    assert drive.link.steps_without == 0
    same_as_the_models(drive.link, teacher)
    assert drive.loop.features.kept_bytes == 0


def test_without_a_head_at_start_nothing_is_kept_before_the_first_draft(
    tiny_model: PreTrainedModel, teacher: PreTrainedModel
) -> None:
    """The layers are not known. A sequence that began before has features from the next step on."""
    wanted = requests()
    propose, said = knowing(teacher, wanted)
    drive = Drive(make_runner(tiny_model), propose, keep=100, connects=False)
    drive.add(wanted)
    drive.steps(5)
    assert drive.runner.hooks is None and drive.loop.features.kept_bytes == 0
    drive.link.connect()
    drive.steps()
    assert drive.outputs == said
    assert {drive.link.begins(number) - drive.link.opened_at[number] for number in drive.link.got} == {-1}
    same_as_the_models(drive.link, teacher)


def test_with_a_head_at_start_even_the_first_draft_gets_what_is_kept(
    tiny_model: PreTrainedModel, teacher: PreTrainedModel
) -> None:
    runner, wanted = make_runner(tiny_model), requests()
    runner.draft_head = DraftHead((0, 1, 2), None)
    propose, said = knowing(teacher, wanted)
    drive = Drive(runner, propose, replace(EVERY, dtype="bfloat16"), keep=100, connects=False)
    drive.add(wanted)
    drive.steps(5)
    assert drive.loop.features.kept_bytes > 0
    drive.link.connect()
    drive.steps()
    assert drive.outputs == said
    assert {drive.link.begins(number) for number in drive.link.got} == {0}


def test_a_window_bounds_what_prompts_and_steps_send(tiny_model: PreTrainedModel, teacher: PreTrainedModel) -> None:
    wanted = requests()
    propose, said = knowing(teacher, wanted)
    drive = Drive(make_runner(tiny_model), propose, replace(EVERY, window=6), engine_config(prefill_chunk=5))
    # A step that commits more than the window leaves out what is older.
    drive.link.gaps = True
    drive.add(wanted)
    drive.steps()
    assert drive.outputs == said
    for number, one in enumerate(wanted, start=1):
        assert drive.link.begins(number) == max(0, len(one.token_ids) - 1 - 6)
        # The window before the last root is whole.
        newest = sorted(drive.link.got[number])[-6:]
        assert newest == list(range(newest[-1] - 5, newest[-1] + 1))
    same_as_the_models(drive.link, teacher)


def test_under_load_nothing_is_taken_and_drafting_comes_back(
    tiny_model: PreTrainedModel, teacher: PreTrainedModel
) -> None:
    wanted = [request([7 + number] * 5, 12 if number else 60) for number in range(4)]
    propose, said = knowing(teacher, wanted)
    # Features of the tokens that were said under load never come: their link is told of a gap, not of anything wrong.
    drive = Drive(make_runner(tiny_model), propose, config=engine_config(disable_above=2), keep=100)
    drive.add(wanted[:1])
    drive.steps(3)
    sent = drive.loop.features.sent_vectors
    drive.add(wanted[1:])
    drive.steps(2)
    assert not drive.loop.drafting.active and drive.loop.features.sent_vectors == sent > 0
    kept = drive.loop.features.kept_bytes
    drive.steps(2)
    assert drive.loop.features.kept_bytes == kept
    drive.link.gaps = True
    drive.steps()
    assert drive.outputs == said and drive.loop.features.sent_vectors > sent
    states = states_of(teacher, drive.link.tokens[1][:-1], (0, LAYERS))
    for position, vector in drive.link.got[1].items():
        first, _, normed = vector.chunk(3)
        torch.testing.assert_close(torch.cat([first, normed]), states[position], rtol=1e-4, atol=1e-4)


def test_no_more_is_kept_than_the_drafter_looks_back_at(tiny_model: PreTrainedModel) -> None:
    drive = Drive(make_runner(tiny_model), root_only, replace(EVERY, window=6), keep=100)
    drive.add(requests())
    drive.steps(12)
    assert drive.loop.features.kept_bytes == len(drive.going) * 6 * EVERY.width * 4


def test_large_pieces_are_cut(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """`FeatureLink` holds pieces to the limit, and to their order."""
    for module in ("target_service.speculation.hidden_states.sending", "feature_link"):
        monkeypatch.setattr(f"{module}.MAX_FEATURE_BYTES", 5 * EVERY.width * 4)
    drive = Drive(make_runner(tiny_model), root_only, keep=100)
    drive.add(requests())
    drive.steps(3)
    drive.link.disconnect()
    drive.link.connect()
    drive.steps()
    assert {drive.link.begins(number) for number in drive.link.got} == {0}
    assert drive.link.steps_without == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.01), ("float8_e4m3", 0.07)])
def test_a_vector_takes_the_bytes_of_its_type(dtype: str, tolerance: float, tiny_model: PreTrainedModel) -> None:
    drive = Drive(make_runner(tiny_model), root_only, replace(EVERY, dtype=dtype))
    drive.add(requests(max_tokens=6))
    drive.steps()
    features = drive.loop.features
    # The last token has none, and the one before it is sent only with a commit that goes on.
    assert features.sent_vectors == sum(len(one.token_ids) + 6 - 2 for one in requests())
    each = EVERY.width * 2 if dtype == "bfloat16" else EVERY.width + 4
    assert features.sent_bytes == each * features.sent_vectors
    plain_form = Drive(make_runner(tiny_model), root_only)
    plain_form.add(requests(max_tokens=6))
    plain_form.steps()
    for number, got in drive.link.got.items():
        exact = plain_form.link.stacked(number)
        # Relative to the vector's largest element, which the scale goes by.
        error = (drive.link.stacked(number).float() - exact).abs().amax(1) / exact.abs().amax(1)
        assert len(got) and float(error.max()) < tolerance


def add(kept: KeptVectors, position: int, encoded: Tensor, rows: Sequence[range] = ()) -> None:
    """Append these rows of an encoded pass; all of them by default."""
    vectors = encoded.numpy()
    kept.append(position, vectors.data.cast("B"), vectors.shape[1], rows or [range(len(vectors))])


def test_bytes_of_float8_have_a_scale_for_every_vector() -> None:
    vectors = torch.tensor([[1000.0, -3.0, 0.5], [0.0, 0.0, 0.0], [1e-20, 2e-20, -1e-20]])
    kept = KeptVectors()
    add(kept, 0, encode(vectors, "float8_e4m3"))
    travelled = kept.vectors(0, 3, FeatureRequest((0,), 3, "float8_e4m3"))
    torch.testing.assert_close(read_vectors(travelled), vectors, rtol=0.07, atol=0.0)


def test_kept_vectors_stay_at_their_positions() -> None:
    kept, form = KeptVectors(), FeatureRequest((0,), 2, "float32")
    rows = torch.arange(20.0).view(10, 2)
    add(kept, 0, encode(rows[:4], "float32"))
    add(kept, 4, encode(rows[4:9], "float32"))
    kept.trim(6)
    # The three first are no longer kept, and held with the fourth: not more than half of what is kept.
    assert (kept.begin, kept.end, kept.nbytes) == (3, 9, 72)
    kept.trim(5)
    assert (kept.begin, kept.end, kept.nbytes) == (4, 9, 40)
    assert torch.equal(read_vectors(kept.vectors(5, 8, form)), rows[5:8])
    add(kept, 20, encode(rows[9:], "float32"))
    assert (kept.begin, kept.end, kept.nbytes) == (20, 21, 8)


@pytest.mark.parametrize("keep", [0, 1, 5, 40])
def test_kept_vectors_are_those_of_one_long_array(keep: int) -> None:
    """Whatever sizes they come in, are asked for in, and are trimmed to."""
    dice, form = random.Random(keep), FeatureRequest((0,), 2, "float32")
    kept, known, first = KeptVectors(), torch.zeros(0, 2), 0
    for _ in range(300):
        begin = first + len(known)
        if dice.random() < 0.05:
            # Nothing joins what comes behind a gap.
            begin += 3
            known, first = torch.zeros(0, 2), begin
        rows = torch.randn(dice.choice([1, 1, 2, 3, 30]), 2)
        add(kept, begin, encode(rows, "float32"))
        known = torch.cat([known, rows])
        if dice.random() < 0.7:
            kept.trim(keep)
            drop = max(0, len(known) - keep)
            known, first = known[drop:], first + drop
        assert (kept.begin, kept.end) == (first, first + len(known))
        # A piece is cut once what is not kept any more is half of what is.
        assert len(known) * 8 <= kept.nbytes <= 1.5 * max(len(known), 30) * 8
        if len(known):
            start = dice.randrange(len(known))
            stop = dice.randrange(start, len(known)) + 1
            found = read_vectors(kept.vectors(first + start, first + stop, form))
            assert torch.equal(found, known[start:stop])


def test_kept_vectors_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay when the memory that they came in is written to, and the pieces of a prompt are sent as they are."""
    monkeypatch.setattr("target_service.speculation.hidden_states.kept.MAX_FEATURE_BYTES", 5 * 8)
    kept, form, rows = KeptVectors(), FeatureRequest((0,), 2, "float32"), torch.randn(40, 2)
    written = encode(rows, "float32").clone()
    add(kept, 0, written, [range(2, 9), range(11, 12), range(20, 24)])
    add(kept, 12, written, [range(30, 31), range(33, 34)])
    written.zero_()
    wanted = torch.cat([rows[2:9], rows[11:12], rows[20:24], rows[30:31], rows[33:34]])
    assert torch.equal(read_vectors(kept.vectors(0, 14, form)), wanted)
    # Twelve rows in pieces of five, of which the first is the smallest.
    assert [kept.piece_end(start, start + 5) for start in (0, 2, 7)] == [2, 7, 12]
    for start, stop in ((0, 2), (2, 7), (7, 12), (12, 14)):
        data = kept.vectors(start, stop, form).data
        assert any(data is piece for piece in kept._pieces)
    # Nothing ends there: what is asked for is cut out.
    assert kept.piece_end(2, 6) == 6 and torch.equal(read_vectors(kept.vectors(2, 6, form)), wanted[2:6])


def head_in(folder: Path, **changes: Any) -> Path:
    shape = {"target_hidden_size": HIDDEN, "num_features": 2, "feature_layers": (0, 2), "vocab_size": VOCABULARY}
    return save_head(make_head(**(shape | {"draft_vocab_size": VOCABULARY} | changes)), folder, embedding=True)


def test_the_target_projects(tiny_model: PreTrainedModel, teacher: PreTrainedModel, tmp_path: Path) -> None:
    folder = head_in(tmp_path, fc_norm=True)
    own = EagleCheckpoint(folder).load()
    runner, wanted = make_runner(tiny_model), requests()
    runner.draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
    propose, said = knowing(teacher, wanted)
    form = FeatureRequest((0, 2), own.config.hidden_size, "float32", projected=True)
    drive = Drive(runner, propose, form)
    drive.add(wanted)
    drive.steps()
    assert drive.outputs == said
    for number in drive.link.got:
        states = states_of(teacher, drive.link.tokens[number][:-1], (0, LAYERS))
        torch.testing.assert_close(drive.link.stacked(number), own.project(states), rtol=1e-3, atol=1e-3)


UNFIT = {
    "no head": (None, FeatureRequest((0, 2), 16, projected=True), "--draft-head"),
    "another width": (None, FeatureRequest((0, 2), 97), "96"),
    "no such layer": (None, FeatureRequest((0, 3), 96), "layer 3"),
    "other layers": ("head", FeatureRequest((0, 1), 16, projected=True), "layers"),
    "other weights": (
        "head",
        FeatureRequest((0, 2), 16, projected=True, projection_fingerprint="ab" * 32),
        "other weights",
    ),
    "another projection": ("head", FeatureRequest((0, 2), 32, projected=True), "32 wide"),
}


@pytest.mark.parametrize(("head", "form", "reason"), UNFIT.values(), ids=UNFIT)
def test_what_the_target_cannot_give_is_refused_with_the_reason(
    head: str | None, form: FeatureRequest, reason: str, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    runner = make_runner(tiny_model)
    if head:
        runner.draft_head = read_draft_head(str(head_in(tmp_path)), LAYERS, HIDDEN)
    with pytest.raises(NotSupported, match=reason):
        Features(runner, 0).connect(form)


def test_a_head_that_comes_with_outrider_needs_no_flag(
    tiny_model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = head_in(tmp_path)
    shipped = ShippedHead("tiny", folder, "")
    monkeypatch.setattr("target_service.model.head_projection.shipped_heads", lambda: (shipped,))
    own = read_draft_head(str(folder), LAYERS, HIDDEN)
    runner = make_runner(tiny_model)
    features = Features(runner, 0)
    features.connect(FeatureRequest((0, 2), 16, projected=True, projection_fingerprint=own.fingerprint))
    assert runner.draft_head is not None and runner.draft_head.fingerprint == own.fingerprint
    # Another draft's head is not mistaken for it.
    with pytest.raises(NotSupported, match="--draft-head"):
        features.connect(FeatureRequest((0, 2), 16, projected=True, projection_fingerprint="ab" * 32))


@pytest.mark.parametrize("required", [True, False])
def test_a_drafter_is_asked_without_features_if_it_can_do_without(
    required: bool, tiny_model: PreTrainedModel, teacher: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = requests()
    propose, said = knowing(teacher, wanted)
    form = FeatureRequest((0, 2), 16, projected=True, required=required)
    drive = Drive(make_runner(tiny_model), propose, form)
    drive.add(wanted)
    drive.steps()
    assert drive.outputs == said and "--draft-head" in caplog.text
    assert drive.loop.drafting.connected is not required
    assert bool(drive.link.got) is not required and not any(drive.link.got.values())


def test_a_drafter_without_features_costs_nothing(tiny_model: PreTrainedModel) -> None:
    (outcome,) = run(make_runner(tiny_model), requests()[:1], propose=random_tree(VOCABULARY, 8))
    assert outcome.token_ids
    runner = make_runner(tiny_model)
    runner.draft_head = DraftHead((0, 2), None)
    features = Features(runner, 8)
    assert features.after_launch(3) is not None
    features.connect(None)
    assert features.after_launch(3) is None
