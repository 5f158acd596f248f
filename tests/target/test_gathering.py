"""Waiting for drafts: what the draft is told and when, what is launched behind what, and what is learned of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from early_steps import EarlySteps
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain, plain_each, request
from transformers import PreTrainedModel

from outrider.drafting import latency
from outrider.drafting.events import Lost
from outrider.tree import TokenTree
from outrider.wire.frames import OpenSequence, SequenceAdvance, SequenceGrowth
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.launching import StepLauncher
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import HostSteps
from target_service.sampling.verifier import Verified
from target_service.speculation.drafts import DraftTrees
from target_service.speculation.policy.controller import SpeculationController
from target_service.speculation.policy.estimates import ENOUGH, PassTimes
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.verification import Walk


@dataclass
class ListeningDraft(ScriptedDraft):
    """Keeps what it was told, frame by frame."""

    frames: list[list[SequenceAdvance]] = field(default_factory=list)

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        self.frames.append(list(advances))
        super().advance(advances)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every step, in the order of launches."""
    steps: list[Step] = []
    begin = StepLauncher._launch

    def noted(*arguments: object, **options: object) -> Step:
        steps.append(begin(*arguments, **options))  # type: ignore[arg-type]
        return steps[-1]

    monkeypatch.setattr(StepLauncher, "_launch", noted)
    return steps


def begin(loop: EngineLoop, draft: ScriptedDraft, wanted: SequenceRequest) -> LiveSequence:
    """The only sequence of a loop, and what drafts for it."""
    loop.drafting.attach(draft)
    loop.drafting.listen()
    live = loop.make(1, wanted)
    loop.add(live)
    return live


def test_a_draft_that_is_waited_for_hears_of_every_token_once(
    tiny_model: PreTrainedModel, launched: list[Step]
) -> None:
    wanted = request([5, 7, 9], 40)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(), steps=EarlySteps(runner))
    draft = ListeningDraft(loop.drafting, knowing_tree([truth], runner.vocabulary_size, 12, right=1.0))
    begin(loop, draft, wanted)
    said: list[int] = []
    while loop.live:
        said += [token for event in loop.step() or () if isinstance(event, StepVerdict) for token in event.token_ids]
    assert tuple(said) == truth[len(wanted.token_ids) :]
    drafted = [step for step in launched if step.batch.drafted]
    assert len(drafted) > 3 and all(
        step.gathered.use is LaunchMode.WAIT_FOR_DRAFT and not step.ahead for step in drafted
    )
    # No tree needs what the device has in its tables.
    assert all(step.batch.device_rows is None for step in launched)
    told = [token for frame in draft.frames for advance in frame for token in advance.token_ids]
    assert told == said[: len(told)] and len(told) > 20


def test_a_clients_own_trees_teach_nothing_of_the_draft(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(), steps=HostSteps(runner), step_cost=StepCost([(1, 1.0), (64, 1.1)]))
    tree = TokenTree((9, 5, 6), (0, 0, 1), (0.5, 0.9, 0.9))
    for external in (True, False):
        live = loop.make(1, request([5, 7, 9], 4, external=external))
        before = replace(live.record)
        loop.gathering.observe_tree(live, tree, Verified(Walk((1, 2), 0), ()))
        assert (live.record == before) is external


def test_a_step_whose_drafts_are_there_is_launched_before_anything_is_said(
    tiny_model: PreTrainedModel, launched: list[Step]
) -> None:
    """In a loop that waits for drafts: no step is launched behind one under way."""
    wanted = request([5, 7, 9], 30)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    for late in (0, 100):
        launched.clear()
        loop = EngineLoop(runner, engine_config(), steps=EarlySteps(runner))
        loop.gathering.choose = lambda *_sequences, **_how: LaunchMode.WAIT_FOR_DRAFT  # type: ignore[method-assign]
        draft = ScriptedDraft(loop.drafting, knowing_tree([truth], runner.vocabulary_size, 3, right=1.0), late=late)
        live = begin(loop, draft, wanted)
        loop.step()
        # The one that read the prompt, and the next where its draft has answered.
        assert len(launched) == (1 if late else 2)
        while loop.live:
            loop.step()
        assert tuple(live.sequence.token_ids) == truth
        assert not any(step.ahead for step in launched)


def test_a_draft_that_is_still_reading_is_neither_waited_for_nor_judged(
    tiny_model: PreTrainedModel, launched: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the steps take here.
    monkeypatch.setattr(latency, "_BEGINNING", 1e9)
    wanted = request([5, 7, 9], 60)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    cost = StepCost([(1, 1.0), (64, 1.1)])
    loop = EngineLoop(runner, engine_config(), steps=HostSteps(runner), step_cost=cost)
    knowing = knowing_tree([truth], runner.vocabulary_size, 4, right=1.0)
    nothing = TokenTree.root_only(0)
    # It answers at once that it has nothing yet, as one does that waits for hidden states.
    draft = ScriptedDraft(loop.drafting, lambda known, dice: knowing(known, dice) if len(known) > 30 else nothing)
    live = begin(loop, draft, wanted)
    while loop.live:
        loop.step()
        if len(live.sequence.token_ids) <= 30:
            assert not loop.speculation.controller._wait_yields
    assert tuple(live.sequence.token_ids) == truth
    # The first reads the prompt.
    assert all(step.gathered.use is LaunchMode.RUN_AHEAD for step in launched[1:25])
    assert sum(step.batch.drafted for step in launched) > 3


def test_steps_that_waited_in_vain_made_one_token_of_each_sequence(
    tiny_model: PreTrainedModel, launched: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that, waits that are in vain cost what they take."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(SpeculationController, "observe_cuts", lambda _, *of: made.append(of))
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(), steps=HostSteps(runner))
    # It holds back more answers than there are steps.
    draft = ScriptedDraft(loop.drafting, lambda _known, _dice: TokenTree.root_only(0), late=100)
    begin(loop, draft, request([5, 7, 9], 12))
    while loop.live:
        loop.step()
    assert [step.gathered.fallbacks for step in launched[1:]] == [1] * (len(launched) - 1)
    assert len(made) == sum(step.gathered.fallbacks for step in launched)
    # One sequence, which is drafted for, without a drafted row.
    assert set(made) == {(1, 1, 0, 0)}


def test_a_sequence_that_waited_for_its_turn_is_drafted_for_like_others(
    tiny_model: PreTrainedModel, launched: list[Step]
) -> None:
    """The device has as many tables as sequences run, and the draft hears of those that wait too."""
    wanted = [request([5 + place, 7, 9], 24) for place in range(5)]
    whole = [(*one.token_ids, *said) for one, said in zip(wanted, plain_each(tiny_model, wanted), strict=True)]
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(2, 0)
    steps = DeviceSteps(runner, max_sequences=2, max_rows=256)
    loop = EngineLoop(runner, engine_config(max_running=2), steps=steps)
    loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree(whole, runner.vocabulary_size, 12, right=1.0)))
    loop.drafting.listen()
    for number, one in enumerate(wanted):
        loop.add(loop.make(number, one))
    finished = {}
    while loop.live:
        for event in loop.step() or ():
            if isinstance(event, SequenceFinished):
                finished[event.sequence_id] = event.totals
    # But for the first steps, the device chooses.
    assert sum(step.batch.device_rows is not None for step in launched) > 0.5 * len(launched)
    accepted = [finished[number].accepted_tokens for number in range(len(wanted))]
    assert min(accepted) > 3, f"accepted {accepted}"


def test_what_a_draft_says_last_is_in_the_pass_that_waited(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch is prepared first, and takes drafts in when nothing else is left to do."""
    wanted = request([5, 7, 9], 24)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(2, 0)
    steps = DeviceSteps(runner, max_sequences=2, max_rows=64, backend="torch")
    loop = EngineLoop(runner, engine_config(max_running=2), steps=steps)
    loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree([truth], runner.vocabulary_size, 3, right=1.0)))
    loop.drafting.listen()
    live = loop.make(1, wanted)
    loop.add(live)
    assert steps.tables is not None
    begun: list[str] = []
    let_in, pack, publish = StepLauncher._hold, steps._verifier.pack, steps.tables.publish

    def noted(name: str, inner: Callable[..., object]) -> Callable[..., object]:
        def outer(*arguments: object) -> object:
            begun.append(name)
            return inner(*arguments)

        return outer

    monkeypatch.setattr(StepLauncher, "_hold", noted("drafts", let_in))
    monkeypatch.setattr(steps._verifier, "pack", noted("prepared", pack))
    monkeypatch.setattr(steps.tables, "publish", noted("published", publish))
    while loop.live:
        loop.step()
    assert tuple(live.sequence.token_ids) == truth
    assert live.sequence.totals.accepted_tokens > 3
    chosen = [begun[place : place + 3] for place, name in enumerate(begun) if name == "prepared"]
    assert ["prepared", "drafts", "published"] in chosen
    # Of steps without tables nothing is published, and what waits comes in the same place.
    assert all(order[1:2] == ["drafts"] for order in chosen)


def test_a_sequence_whose_draft_is_gone_is_opened_with_another(tiny_model: PreTrainedModel) -> None:
    """Of several drafts; see `Lost`."""
    wanted = request([5, 7, 9], 30)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(), steps=HostSteps(runner))
    opened: list[int] = []

    class Noted(ScriptedDraft):
        def open(self, sequence: OpenSequence) -> None:
            opened.append(len(sequence.token_ids))
            super().open(sequence)

    live = begin(loop, Noted(loop.drafting, knowing_tree([truth], runner.vocabulary_size, 2, right=1.0)), wanted)
    for _ in range(4):
        loop.step()
    before = len(live.sequence.token_ids)
    # Another that nobody knows is no matter.
    loop.drafting.receive(Lost([1, 99]))
    accepted = live.sequence.totals.accepted_tokens
    while loop.live:
        loop.step()
    assert opened[0] == 3 and len(opened) == 2 and opened[1] >= before > 3
    assert tuple(live.sequence.token_ids) == truth and live.sequence.totals.accepted_tokens > accepted > 0


def test_growth_of_an_earlier_opening_may_cross_a_new_one(tiny_model: PreTrainedModel) -> None:
    """A draft counts ids from 1 in every opening, and does not know yet that it was closed when it sends some."""
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(8, 0)
    steps = DeviceSteps(runner, max_sequences=8, max_rows=64, backend="torch")
    loop = EngineLoop(runner, engine_config(disable_above=4), steps=steps)
    drafting = loop.drafting

    def growth(first: int, token: int) -> SequenceGrowth:
        return SequenceGrowth(live.sequence.sequence_id, live.sequence.step, first, (0,), (token,), (0.5,))

    live = begin(loop, ScriptedDraft(drafting, lambda tokens, _: TokenTree.root_only(tokens[-1])), request([5, 7], 30))
    loop.step()
    drafting.update_load(9)
    drafting.update_load(1)
    drafting.open_added()
    for sent in (growth(8, 11), growth(9, 12), growth(1, 13), growth(2, 14)):
        drafting._handle(sent)
    assert drafting.is_open(live.sequence) and not live.sequence.totals.draft_refused
    tree = drafting._trees[live.sequence.sequence_id]
    tree.settle()
    assert list(tree.token_ids[1:]) == [13, 14]
    # Only once: the draft does not count from 1 again within an opening.
    drafting._handle(growth(1, 15))
    assert not drafting.is_open(live.sequence) and live.sequence.totals.draft_refused


def test_drafts_that_were_of_no_use_are_tried_again_at_the_same_load(tiny_model: PreTrainedModel) -> None:
    """And those that a load forbade only well below it."""
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(8, 0)
    steps = DeviceSteps(runner, max_sequences=8, max_rows=64, backend="torch")
    drafting = EngineLoop(runner, engine_config(disable_above=4), steps=steps).drafting
    drafting.update_load(4, useful=False)
    assert not drafting.active
    drafting.update_load(4, useful=True)
    assert drafting.active
    drafting.update_load(5, useful=True)
    drafting.update_load(4, useful=True)
    assert not drafting.active
    drafting.update_load(drafting.config.drafting_resumes_at, useful=True)
    assert drafting.active and drafting.config.drafting_resumes_at < 4


def test_a_head_is_not_followed_at_a_high_load(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(8, 0)
    steps = DeviceSteps(runner, max_sequences=8, max_rows=64, backend="torch")
    drafting = EngineLoop(runner, engine_config(disable_above=1000), steps=steps).drafting
    drafting.update_load(33)
    assert drafting.active, "a draft that reads no states"
    monkeypatch.setattr(DraftTrees, "reads_features", property(lambda _: True))
    drafting.update_load(32)
    assert drafting.active
    drafting.update_load(33)
    drafting.update_load(32)
    assert not drafting.active
    drafting.update_load(24)
    assert drafting.active


def head_loop(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineLoop, SpeculationController]:
    """A loop whose draft reads hidden states, as far as following it goes, and is known to pay: a pass of one sequence
    that waits takes 1.1, and makes 1.8 tokens."""
    monkeypatch.setattr(DraftTrees, "reads_features", property(lambda _: True))
    cost = StepCost([(1, 1.0), (64, 1.0)])
    loop = EngineLoop(runner := make_runner(model), engine_config(), steps=HostSteps(runner), step_cost=cost)
    controller = loop.speculation.controller
    times = controller.times
    assert times is not None
    for _ in range(ENOUGH):
        times.observe_gap(1, 0.0, None)
        times.observe_gap(1, 0.1, LaunchMode.WAIT_FOR_DRAFT)
    _teach(controller, 0.8)
    # Times of a machine would decide otherwise.
    monkeypatch.setattr(PassTimes, "observe_gap", lambda *_times: None)
    monkeypatch.setattr(StepCost, "observe_step", lambda *_times: None)
    return loop, controller


def _teach(controller: SpeculationController, accepted: float) -> None:
    """Have a step that waits accept so many rows."""
    for _ in range(200):
        controller.observe_cuts(1, 1, 1, accepted)


def test_a_sequence_that_a_head_does_not_follow_is_no_late_answer(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was under way when the head was followed again: it decodes plainly, and the next one is drafted for."""
    wanted = request([5, 7, 9], 40)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    loop, controller = head_loop(tiny_model, monkeypatch)
    waited: list[tuple[float, ...]] = []
    monkeypatch.setattr(controller, "observe_cuts", lambda *of: waited.append(of))
    draft = ScriptedDraft(loop.drafting, knowing_tree([truth], loop.drafting._vocabulary_size, 3, right=1.0))
    live = begin(loop, draft, wanted)
    for _ in range(4):
        loop.step()
    assert loop.drafting.is_open(live.sequence) and live.sequence.totals.drafted_steps
    loop.drafting.update_load(1, useful=False)
    loop.drafting.update_load(1, useful=True)
    known = len(waited)
    while loop.live:
        assert not loop.drafting.is_open(live.sequence)
        loop.step()
    assert tuple(live.sequence.token_ids) == truth and live.sequence.totals.fallback_steps == 0
    assert known and len(waited) == known, "no step waited for a draft that does not follow its sequence"
    following = loop.make(2, wanted)
    loop.add(following)
    while loop.live:
        loop.step()
    assert following.sequence.totals.drafted_steps > 4 and following.sequence.totals.fallback_steps == 0
    assert len(waited) > known


@pytest.mark.parametrize("pays", [True, False])
def test_a_head_follows_an_answer_from_its_beginning_if_it_is_expected_to_pay(
    pays: bool, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also during a pause, which another answer has caused: later it would lack the states of the prompt."""
    wanted = request([5, 7, 9], 40)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    loop, controller = head_loop(tiny_model, monkeypatch)
    if not pays:
        _teach(controller, 0.05)
    controller._since_cuts, controller._cut_tries.pause = 100, 500
    loop.drafting.update_load(1, useful=False)
    live = begin(
        loop, ScriptedDraft(loop.drafting, knowing_tree([truth], loop.drafting._vocabulary_size, 3, right=1.0)), wanted
    )
    # It is the draft that is known.
    loop.speculation._draft = loop.drafting.info
    loop.step()
    assert loop.drafting.is_open(live.sequence) is pays
    while loop.live:
        loop.step()
    assert tuple(live.sequence.token_ids) == truth and (live.sequence.totals.drafted_steps > 0) is pays


def test_only_sequences_that_get_a_place_count_as_beginning(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each brings a tenth of a token, and drafting costs a tenth of a step: four for one place pay no more than one."""
    loop, controller = head_loop(tiny_model, monkeypatch)
    _teach(controller, 0.1)
    monkeypatch.setattr(type(loop.scheduler), "load", property(lambda _: 1))
    for number in range(4):
        loop.add(loop.make(number, request([5, 7, 9], 4)))
    assert not loop.gathering._pays_for_beginning()
    _teach(controller, 0.3)
    assert loop.gathering._pays_for_beginning()
