"""Time of steps shared by tenants: whoever wants little is not held up by whoever wants much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from outrider.limits import TenantLimits
from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.kv_cache import KVCache
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence, SequenceRequest, SequenceState, SequenceTotals
from target_service.core.step_times import StepTimes

Machine = Callable[[int, int], float]


def dear(decoding: int, rows: int) -> float:
    """A processor: each sequence takes a tenth of what a step alone takes."""
    return 5.0 + 0.5 * decoding + 0.05 * rows


def cheap(decoding: int, rows: int) -> float:
    """A GPU: sixty-four sequences take a fifth more than one, and prompts as long as they are."""
    return 5.0 + decoding / 64 + 0.02 * rows


class Played:
    """A scheduler, and an engine that takes the times of a machine. Every output is `length` tokens."""

    def __init__(self, machine: Machine, *, length: int = 1 << 20, chunk: int = 256) -> None:
        cache = KVCache(4096, 16, [(1, 4, 4)], torch.float32, torch.device("cpu"))
        # Machines here take seconds for a step.
        config = TargetConfig(max_running=64, max_step_rows=512, prefill_chunk=chunk, prompt_wait_ms=60_000)
        self.scheduler = Scheduler(config, cache)
        self._machine, self._length, self._count = machine, length, 0
        # Of each step: seconds, and sequences by tenant.
        self.steps: list[tuple[float, Counter[str]]] = []
        # Rows of prompts of each.
        self.read: list[int] = []

    def add(self, tenant: str, prompt: int, weight: float = 1.0) -> Sequence:
        # Nothing in common, so that no page is shared.
        first = 10_000 * (self._count + 1)
        tokens = tuple(range(first, first + prompt))
        asked = SequenceRequest(
            tokens, SamplingParams(), VerificationMode.GREEDY, 0, 16, tenant=tenant, limits=TenantLimits(weight)
        )
        self._count += 1
        one = Sequence(self._count, asked, list(tokens), SequenceTotals(prompt_tokens=prompt))
        self.scheduler.add(one)
        return one

    def run(self, steps: int) -> None:
        for _ in range(steps):
            schedule = self.scheduler.schedule()
            chunks = schedule.chunks
            if chunks:
                self.scheduler.count_launched(schedule)
            decoding = sum(chunk.takes_tree for chunk in chunks)
            rows = sum(chunk.count for chunk in chunks if not chunk.takes_tree)
            seconds = self._machine(decoding, rows)
            self.read.append(rows)
            self.steps.append((seconds, Counter(chunk.sequence.request.tenant for chunk in chunks)))
            self.scheduler.times.observe_step(decoding, rows, seconds, own=schedule.own)
            for chunk in chunks:
                one, reaches = chunk.sequence, chunk.reaches_root
                one.kv_length += chunk.count
                if reaches:
                    one.token_ids.append(1)
                    one.state = SequenceState.RUNNING
                if len(one.token_ids) - len(one.request.token_ids) >= self._length:
                    self.scheduler.remove(one)

    def longest(self, last: int) -> float:
        return max(seconds for seconds, _ in self.steps[-last:])

    def served(self, last: int) -> Counter[str]:
        return sum((tenants for _, tenants in self.steps[-last:]), Counter[str]())


def crowd(played: Played, prompt: int = 4, weight: float = 1.0) -> None:
    """One tenant alone with one sequence, then with sixty-three, so that both are known."""
    played.add("many", prompt, weight)
    played.run(20)
    for _ in range(62):
        played.add("many", prompt, weight)
    played.run(40)


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.5])
def test_nobody_waits_for_a_step_longer_than_his_own_by_his_part(weight: float) -> None:
    played = Played(dear)
    crowd(played)
    played.add("few", 4, weight)
    played.run(200)
    alone, part = dear(1, 0), weight / (weight + 1.0)
    # Times are means of sizes that are near each other.
    assert played.longest(50) <= 1.15 * alone / part
    served = played.served(50)
    # In every step, and the others have most of what is left of it.
    assert served["few"] == 50
    room = (0.75 * alone / part - 5.0) / 0.5 - 1
    assert served["many"] >= 50 * max(1, int(room))


def test_one_tenant_alone_is_not_held_back() -> None:
    played = Played(dear)
    crowd(played)
    played.run(50)
    assert played.served(50) == {"many": 50 * 63}


def test_who_comes_back_at_once_does_not_meet_a_long_step() -> None:
    played = Played(dear)
    crowd(played)
    for _ in range(20):
        one = played.add("few", 4)
        played.run(8)
        played.scheduler.remove(one)
        played.run(2)
    assert played.longest(100) <= 1.15 * 2 * dear(1, 0)
    # Who stays away leaves his part to the others.
    played.run(10)
    assert played.served(5) == {"many": 5 * 63}


def test_where_sequences_are_cheap_all_of_them_go() -> None:
    played = Played(cheap)
    crowd(played)
    played.add("few", 4)
    played.run(50)
    assert played.served(40) == {"many": 40 * 63, "few": 40}


def test_what_was_never_seen_holds_nobody_back() -> None:
    played = Played(dear)
    for _ in range(63):
        played.add("many", 4)
    played.add("few", 4)
    played.run(30)
    assert played.served(20) == {"many": 20 * 63, "few": 20}


def test_anothers_prompts_are_read_in_pieces() -> None:
    """A prompt of five hundred rows makes a step three times as long; whoever decodes beside it waits twice as long at
    most."""
    played = Played(cheap, length=400)
    played.add("few", 4)
    played.run(20)
    # What reading takes is known from a time when nobody else was there.
    for _ in range(3):
        played.add("few", 300)
    played.run(20)
    long = [played.add("many", 2000) for _ in range(4)]
    played.run(5)
    before = sum(one.kv_length for one in long)
    played.run(20)
    assert played.longest(20) <= 1.25 * 2 * cheap(4, 0)
    # They come to their end at the pace that the half of the time allows.
    assert sum(one.kv_length for one in long) - before >= 20 * 150


def test_prompts_come_to_their_end_however_dear_they_are() -> None:
    played = Played(lambda _, rows: 1.0 + 100.0 * rows)
    played.add("few", 4)
    played.run(5)
    one = played.add("many", 160)
    played.run(40)
    assert one.state is SequenceState.RUNNING


def test_prompts_without_end_do_not_hide_what_decoding_takes() -> None:
    """Each step reads a piece of some prompt of the many's, so that none only decodes."""
    played = Played(dear, length=400)
    played.add("few", 4)
    played.run(20)
    for _ in range(300):
        played.add("many", 60)
    played.run(80)
    assert played.longest(40) <= 1.15 * 2 * dear(1, 0) + dear(0, 16) - dear(0, 0)


def test_a_short_prompt_does_not_wait_for_the_turn_of_anothers_long_one() -> None:
    played = Played(lambda _, rows: 5.0 + 0.5 * rows, length=4)
    played.add("few", 4)
    played.run(20)
    for _ in range(30):
        played.add("many", 3000)
    played.run(20)
    for _ in range(20):
        one = played.add("few", 3)
        played.run(1)
        assert one.state is SequenceState.RUNNING
        played.run(4)


def test_a_size_whose_first_steps_were_held_up_is_tried_again() -> None:
    held_up = True
    played = Played(lambda decoding, rows: dear(decoding, rows) * (20.0 if held_up and decoding > 1 else 1.0))
    crowd(played)
    held_up = False
    played.add("few", 4)
    played.run(400)
    room = (0.75 * 2 * dear(1, 0) - 5.0) / 0.5 - 1
    assert played.served(50)["many"] >= 50 * int(room)


def test_steps_without_him_leave_room_for_who_comes_in_the_middle_of_one() -> None:
    played = Played(dear)
    crowd(played)
    for _ in range(20):
        one = played.add("few", 4)
        played.run(8)
        played.scheduler.remove(one)
        played.run(2)
    without = [seconds for seconds, tenants in played.steps[-100:] if not tenants["few"]]
    assert without and max(without) <= 1.15 * 1.5 * dear(1, 0)
    # Nobody pays for that where sequences are cheap.
    played = Played(cheap)
    crowd(played)
    one = played.add("few", 4)
    played.run(8)
    played.scheduler.remove(one)
    played.run(2)
    assert played.served(2) == {"many": 2 * 63}


def test_who_joins_alone_is_held_to_what_reading_alone_takes() -> None:
    """A prompt that nobody decodes beside waits for no draft: a step of its own is shorter than one that decodes."""
    times = StepTimes()
    for _ in range(20):
        times.observe_step(1, 0, 4.0)
        times.observe_step(0, 3, 2.5)
    assert times.seconds(0, 3) == pytest.approx(2.5)


def test_many_tenants_of_one_sequence_all_go() -> None:
    played = Played(dear)
    for number in range(30):
        played.add(str(number), 4)
        played.run(4)
    played.run(20)
    assert set(played.served(20).values()) == {20}


def test_times_follow_a_machine_that_becomes_slower() -> None:
    times = StepTimes()
    for seconds in (1.0, 2.0):
        for _ in range(60):
            times.observe_step(1, 0, seconds)
            times.observe_step(32, 0, 3 * seconds)
            times.observe_step(32, 100, 4 * seconds)
        assert times.seconds(1, 0) == pytest.approx(seconds, rel=0.02)
        assert times.seconds(32, 100) == pytest.approx(4 * seconds, rel=0.02)
        assert times.seconds(32, 50) == pytest.approx(3.5 * seconds, rel=0.02)
        assert times.seconds(16, 0) == pytest.approx(seconds + 2 * seconds * 15 / 31, rel=0.02)
    assert times.decoding_within(4.0, 64) == pytest.approx(16, abs=1)
    assert times.prefill_within(32, 7.0, 512) == pytest.approx(50, abs=2)


@pytest.mark.parametrize("held_up", [7, 12, 16])
def test_few_rows_that_were_held_up_do_not_hold_up_many(held_up: int) -> None:
    """A pause of the machine falls into the only step that reads so few rows, and such a step does not come again."""
    times, a_row, alone = StepTimes(lambda rows: 4e-3 + 2e-5 * rows), 2e-5, 5e-3
    for _ in range(20):
        times.observe_step(4, 0, alone)
        times.observe_step(4, 1000, alone + 1000 * a_row)
    before = times.prefill_within(4, 15e-3, 2048)
    times.observe_step(4, held_up, 30e-3)
    for _ in range(2):
        # What is read at the least while all seem slow.
        times.observe_step(4, 16, alone + 16 * a_row)
    assert before > 400
    assert times.prefill_within(4, 15e-3, 2048) == pytest.approx(before, rel=0.1)


def test_a_first_step_that_compiles_says_nothing() -> None:
    times = StepTimes()
    for seconds in (30.0, 1.0, 1.0, 1.0):
        times.observe_step(4, 0, seconds)
    assert times.seconds(4, 0) == 1.0
    assert StepTimes().seconds(4, 100) == 0.0


def test_what_a_crowd_makes_of_short_steps_is_not_what_a_tenants_own_takes() -> None:
    """Beside many who come at once every step is held up: by their calls, their replies and their drafts."""
    held = 1.0

    def busy(decoding: int, rows: int) -> float:
        return held * dear(decoding, rows)

    played = Played(busy)
    crowd(played)
    played.add("few", 4)
    held = 10.0
    played.run(30)
    held = 1.0
    played.run(200)
    assert played.longest(150) <= 1.15 * 2 * dear(1, 0)
    # What the held up steps said of more than a few does not keep the others out for good.
    played.run(2000)
    assert played.longest(100) <= 1.15 * 2 * dear(1, 0)
    assert played.served(100)["many"] >= 100 * 6


def test_what_ones_own_step_takes_is_followed_while_others_are_there() -> None:
    """Contexts grow: a step of one takes three times what it took when he was alone."""
    grown = 1.0

    def growing(decoding: int, rows: int) -> float:
        return grown * cheap(decoding, rows)

    played = Played(growing)
    crowd(played)
    played.add("few", 4)
    played.run(20)
    grown = 3.0
    for one in played.scheduler.running[40:]:
        played.scheduler.remove(one)
    played.add("few", 4)
    played.run(600)
    # All that are left, but for a step now and then that is one's alone.
    assert played.served(40)["many"] >= 37 * 40


def test_prompts_are_not_read_in_crumbs_for_good_since_ones_own_step_got_longer() -> None:
    grown = 1.0

    def growing(decoding: int, rows: int) -> float:
        return grown * cheap(decoding, rows)

    played = Played(growing)
    played.add("few", 4)
    played.run(20)
    for _ in range(3):
        played.add("few", 300)
    played.run(20)
    grown = 3.0
    for _ in range(40):
        played.add("many", 2000)
    played.run(600)
    # Some 250 rows beside who decodes take as long as his own step.
    assert sum(played.read[-100:]) >= 100 * 100


def test_drafted_rows_beside_prompts_do_not_make_those_dear() -> None:
    """Steps that read few rows beside many drafted ones, by which few would be read for good."""

    def cost(rows: int) -> float:
        return 5e-3 + 3e-5 * rows

    times = StepTimes(cost)
    for _ in range(20):
        times.observe_step(64, 0, cost(64))
        times.observe_step(64, 250, cost(64 + 250 + 400), drafted=400)
    # What is left of 24 ms, at 0.03 for each row.
    assert times.prefill_within(64, 24e-3, 2048) == pytest.approx((24e-3 - cost(64)) / 3e-5, abs=2)
