"""Whether a draft is followed: found out soon where it costs more than it brings, and kept where it brings more."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from target_service.speculation.policy.draft_gate import DraftGate

pytestmark = pytest.mark.values

ONE_PASS = 6e-3
# Passes of a kind of text, and of each comparison; tokens of the text that is compared.
TEXT, COMPARED, STRETCH = 40, 6, 16
# Passes without a draft before it is followed, and rows of each.
ALONE_FIRST, ROWS = 48, 32


@dataclass
class Engine:
    """Passes of a text that goes from loops to lists and back: without a draft they make 1 to 7 tokens, for 40 passes
    at a time. Where a draft is followed they make more of them a second by `gain`, in passes that take as much longer
    as `longer` says, and the passes that a stretch of text needs vary by `noise` besides. One pass in six ends a
    comparison."""

    gain: float
    noise: float = 0.0
    longer: float = 1.0
    seed: int = 0
    load: int = 1
    now: float = 100.0
    # Of each pass, whether it was followed, and its seconds.
    passes: list[tuple[bool, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self.switch = DraftGate()

    def run(self, passes: int = 1 << 30, seconds: float = 1e9) -> list[bool]:
        """Whether each was followed."""
        begun, until = len(self.passes), self.now + seconds
        while len(self.passes) < begun + passes and self.now < until:
            with_draft = self.switch.uses_draft(self.load)
            if len(self.passes) % TEXT == 0:
                self._unaided = self._dice.choice((1.0, 1.3, 2.0, 7.0))
            took = ONE_PASS * (self.longer if with_draft else 1.0) * self._dice.lognormvariate(0, 0.02)
            self.now += took
            self.passes.append((with_draft, took))
            self.switch.observe_pass(self.load, ROWS, took, with_draft=with_draft)
            if with_draft and len(self.passes) % COMPARED == 0:
                shape = 1 / self.noise**2 if self.noise else 0.0
                by_lookup = STRETCH / self._unaided
                needed = by_lookup / (self.gain * self.longer)
                needed = self._dice.gammavariate(shape, needed / shape) if shape else needed
                self.switch.compare(self.load, needed, by_lookup)
        return [with_draft for with_draft, _ in self.passes[begun:]]

    def lost(self) -> float:
        """The share of the tokens that passes would have made without the draft, since the first."""
        whole = sum(took for _, took in self.passes)
        made = sum(took * (self.gain if with_draft else 1.0) for with_draft, took in self.passes)
        return 1 - made / whole


def runs_of(with_draft: list[bool]) -> list[tuple[bool, int]]:
    """Whether passes in a row were followed, and how many."""
    return [(followed, len(list(run))) for followed, run in itertools.groupby(with_draft)]


def first_trial(with_draft: list[bool]) -> int:
    """Passes that were followed before it was dropped for longer than passes without it are timed; all if it never
    was."""
    followed = 0
    for with_it, count in runs_of(with_draft):
        if not with_it and count != ALONE_FIRST and followed:
            return followed
        followed += count * with_it
    return len(with_draft)


def is_dropped(with_draft: list[bool]) -> bool:
    return first_trial(with_draft) < len(with_draft)


def test_a_first_load_is_followed_at_once_and_timed_alone_where_it_is_in_doubt() -> None:
    """Behind its first eight answers, and once."""
    engine = Engine(gain=1.3)
    assert engine.switch.uses_draft(1) and not engine.switch.measures(1)
    first, alone, rest = runs_of(engine.run(passes=600))
    assert first[0] and 128 <= first[1] < 140
    assert alone == (False, ALONE_FIRST) and rest[0]


def test_one_in_no_doubt_is_never_left() -> None:
    assert all(Engine(gain=2.0, noise=0.3).run(passes=2000))


@pytest.mark.parametrize("gain", [1.15, 1.3])
def test_another_load_is_timed_alone_once_that_takes_a_hundredth(gain: float) -> None:
    """Of the tokens that were made there, where the first load has shown what the draft costs of a pass."""
    engine = Engine(gain)
    engine.run(300)
    engine.load = 8
    first, alone, rest = runs_of(engine.run(passes=4000))
    # What is spared is known to some hundredths by then.
    assert first[0] and first[1] == pytest.approx(100 * ALONE_FIRST * (1 - 1 / gain), rel=0.15)
    assert alone == (False, ALONE_FIRST) and rest[0]


def test_passes_alone_are_timed_soon_where_a_draft_hardly_pays() -> None:
    """At a load that follows another, once it has been compared a few times."""
    engine = Engine(gain=1.3, noise=0.02)
    engine.run(300)
    engine.load, engine.gain = 8, 1.01
    first, alone, rest = runs_of(engine.run(passes=400))
    assert first[0] and first[1] < 60
    assert alone == (False, ALONE_FIRST) and rest[0]


def test_times_are_compared_between_passes_of_as_many_rows() -> None:
    """Passes with the draft have more rows and take longer by that; of as many rows they take a tenth longer."""
    switch = DraftGate()
    for rows, seconds in ((1, 4.0), (16, 4.4), (64, 5.0)) * 20:
        switch.observe_pass(1, rows, seconds, with_draft=False)
    for rows, seconds in ((16, 4.84), (64, 5.5), (256, 9.0)) * 20:
        switch.observe_pass(1, rows, seconds, with_draft=True)
    for _ in range(40):
        switch.compare(1, 4.0, 6.0)
    assert switch.gain(1) == pytest.approx(1.5 / 1.1, rel=0.01)


def test_it_says_that_it_measures() -> None:
    engine = Engine(gain=1.2)
    while engine.switch.uses_draft(1):
        assert not engine.switch.measures(1)
        engine.run(1)
    engine.run(ALONE_FIRST - 1)
    assert engine.switch.measures(1)
    engine.run(1)
    assert not engine.switch.measures(1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("longer", [1.0, 2.0])
def test_one_that_halves_the_speed_is_dropped_at_once(longer: float, noise: float, seed: int) -> None:
    engine = Engine(0.5, noise, longer, seed)
    # What varies more takes longer to see.
    assert first_trial(engine.run(passes=1200)) <= (150 if noise < 0.6 else 300)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("longer", [1.0, 2.0])
def test_one_that_halves_the_speed_costs_little(longer: float, noise: float, seed: int) -> None:
    """Of the tokens of a minute."""
    engine = Engine(0.5, noise, longer, seed)
    engine.run(seconds=60)
    assert engine.lost() < (0.035 if noise < 0.6 else 0.055)


def test_pauses_double_until_tries_take_a_hundredth() -> None:
    """Each is as many times as long as the draft was followed before it."""
    engine = Engine(0.5)
    engine.run(seconds=900)
    runs = [(followed, count) for followed, count in runs_of([one for one, _ in engine.passes]) if count != ALONE_FIRST]
    shares = [alone / with_it for (_, with_it), (_, alone) in zip(runs[3::2], runs[4::2], strict=False)]
    assert shares[:7] == pytest.approx([16, 32, 64, 100, 100, 100, 100], rel=0.05)


@pytest.mark.parametrize("seed", range(12))
def test_one_that_makes_a_little_less_is_dropped_in_time(seed: int) -> None:
    """Where passes vary so little that it can be told."""
    assert first_trial(Engine(0.97, 0.02, seed=seed).run(passes=1000)) <= 250


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_one_that_makes_more_is_kept(noise: float, seed: int) -> None:
    assert not is_dropped(Engine(1.3, noise, seed=seed).run(passes=5000))


@pytest.mark.parametrize("seed", range(12))
def test_one_that_makes_more_is_kept_however_passes_vary(seed: int) -> None:
    assert not is_dropped(Engine(1.3, 0.6, seed=seed).run(passes=5000))


@pytest.mark.parametrize("seed", range(3))
def test_one_that_halves_the_speed_is_dropped_after_a_slow_start(seed: int) -> None:
    """A pass without it took half a second, as where something is compiled or captured."""
    engine = Engine(0.5, 0.1, seed=seed)
    engine.switch.observe_pass(1, ROWS, 0.5, with_draft=False)
    assert first_trial(engine.run(passes=500)) <= 150


@pytest.mark.parametrize("seed", range(6))
def test_a_good_one_after_a_bad_one_is_followed_within_the_pause(seed: int) -> None:
    engine = Engine(0.5, 0.2, seed=seed)
    engine.run(seconds=1.0)
    assert not engine.switch.uses_draft(1)
    engine.gain = 1.3
    with_draft = engine.run(seconds=30.0)
    assert with_draft.index(True) * ONE_PASS < 3.0
    assert not is_dropped(with_draft)


def test_pauses_are_short_again_after_a_good_one() -> None:
    engine = Engine(0.5)
    engine.run(seconds=20.0)
    engine.gain = 1.3
    engine.run(seconds=40.0)
    engine.gain = 0.5
    while engine.switch.uses_draft(1):
        engine.run(passes=1)
    assert engine.run(passes=8 * 128 + 1)[-1]


def test_another_draft_is_followed_at_once_and_judged_anew() -> None:
    engine = Engine(0.5)
    engine.run(seconds=20.0)
    assert not engine.switch.uses_draft(1)
    engine.switch.forget()
    assert engine.switch.uses_draft(1)
    # What passes made without one is still known, and the first pause is as short as it was.
    with_draft = engine.run(passes=60)
    tried = first_trial(with_draft)
    assert 30 <= tried <= 40
    assert True in engine.run(passes=8 * tried)


def test_loads_are_told_apart_by_powers_of_two() -> None:
    engine = Engine(0.5, load=4)
    engine.run(passes=200)
    assert not any(engine.switch.uses_draft(load) for load in (3, 4))
    engine.load, engine.gain = 8, 1.3
    assert not engine.switch.uses_draft(8)
    engine.run(passes=ALONE_FIRST)
    assert all(engine.switch.uses_draft(load) for load in (5, 7, 8))
    # The nearest load says whether it is followed where none was tried.
    assert not any(engine.switch.uses_draft(load) for load in (1, 2, 4, 16))
    assert all(engine.run(passes=500))
    assert engine.switch.uses_draft(16)


@pytest.mark.parametrize(("alone", "kept"), [(1.0, True), (1.25, True), (1.8, False)])
def test_one_has_to_make_more_than_passes_without_it(alone: float, kept: bool) -> None:
    """A draft with which lookup's text takes 1 / 1.5 of the passes, where those without one make `alone` times as much
    by recycled tokens."""
    engine = Engine(gain=1.5)
    for needed in [8.0 / alone] * 40:
        engine.switch.compare(1, needed, 8.0, with_draft=False)
    assert is_dropped(engine.run(1500)) is not kept


def test_a_text_that_is_copied_in_part_is_judged_by_its_passes() -> None:
    """A draft whose passes take a quarter longer, and that needs 8 passes of 12 where nothing is copied: to the tokens
    of a pass it adds a twentieth, but it spares a third of the passes."""
    engine = Engine(gain=1.0)
    for _ in range(60):
        for with_draft, seconds in ((True, 1.25), (False, 1.0)):
            engine.switch.observe_pass(1, ROWS, seconds, with_draft=with_draft)
        engine.switch.compare(1, 1.0, 1.0)
        engine.switch.compare(1, 8.0, 12.0)
    assert engine.switch.uses_draft(1)
    assert engine.switch.gain(1) == pytest.approx(13 / 9 / 1.25, rel=0.05)


@pytest.mark.parametrize("load", [1, 2, 16, 64])
@pytest.mark.parametrize("gain", [1.2, 2.0, 3.0])
def test_what_one_load_shows_serves_at_the_next(gain: float, load: int) -> None:
    """The first eight answers at a load that was never met make what later ones do: they are some sixty passes."""
    engine = Engine(gain, 0.3, load=8)
    engine.run(400)
    engine.load = load
    assert not engine.switch.measures(load)
    assert all(engine.run(60))
    with_draft = engine.run(2000)
    # Passes without it are timed once that costs little: at 1.2 after some 1,100.
    assert with_draft.count(False) == (ALONE_FIRST if gain < 1.5 else 0)
    assert all(with_draft[-100:])


@pytest.mark.parametrize("seed", range(6))
def test_a_load_where_it_does_not_pay_is_found_out_all_the_same(seed: int) -> None:
    engine = Engine(2.0, 0.3, load=8, seed=seed)
    engine.run(400)
    engine.load, engine.gain = 64, 0.7
    begun = len(engine.passes)
    engine.run(seconds=60.0)
    engine.passes = engine.passes[begun:]
    assert not engine.switch.uses_draft(64) or engine.lost() < 0.05
    assert engine.lost() < 0.05
    engine.load = 8
    assert engine.switch.uses_draft(8)


def test_where_the_nearest_load_has_none_it_is_measured_alone_first() -> None:
    engine = Engine(0.5, load=8)
    engine.run(300)
    engine.load, engine.gain = 16, 1.3
    assert engine.switch.measures(16)
    assert engine.run(100) == [False] * ALONE_FIRST + [True] * (100 - ALONE_FIRST)


def test_its_gain_is_known_where_it_was_judged_and_near_there() -> None:
    engine = Engine(gain=1.6)
    assert engine.switch.gain(1) is None
    engine.run(2000)
    assert engine.switch.gain(1) == pytest.approx(1.6, rel=0.1) == engine.switch.gain(8)
    dropped = Engine(gain=0.5)
    dropped.run(2000)
    assert (dropped.switch.gain(1) or 0) <= 1


def test_another_draft_is_in_no_doubt() -> None:
    engine = Engine(1.2, load=8)
    engine.run(400)
    engine.load = 16
    engine.run(200)
    assert engine.switch.uses_draft(16)
    engine.switch.forget()
    assert not engine.switch.measures(8)
