"""How passes are launched: with which draft, ahead or held for it, and with how many rows.

One estimate of what passes take (`PassTimes`) and one of what they make (`TokenYield`) serve all of these decisions:
what makes most tokens a second is chosen. The device ranks drafted nodes by path probability and takes the best
(`tree_kernels.node_table`); how many it may take is chosen among the sizes that steps are captured for. Where the host
cuts the trees (`tree_cuts`), the rate prices their rows, and each step waits for its drafts or does without. Both
estimates hold at every load, so that one that was never met begins with what the others have shown. What seems slower
is tried again for as long as tries take a hundredth of the time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from math import inf
from typing import NamedTuple

from target_service.core.running_means import RunningMean
from target_service.core.schedule import Schedule
from target_service.core.sequence import Sequence
from target_service.execution.batch import DeviceRows
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.draft_gate import DraftGate
from target_service.speculation.policy.estimates import (
    ENOUGH,
    POOLED,
    Mode,
    PassTimes,
    TokenYield,
    WaitYield,
    compile_pooled,
)
from target_service.speculation.policy.launch_mode import HOPELESS, MARGIN, LaunchMode, load_size
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from target_service.speculation.policy.throughput_trial import ThroughputTrial
from target_service.speculation.policy.tries import Tries
from tree_kernels.node_table.layout import KEPT

# Launches between two tries at most: some five seconds at 8B size, in which a new draft, or a text that begins to
# repeat itself, is noticed. And launches of a try: of rows where none seem to pay, and of the other launch mode.
_LONGEST_PAUSE, _TRY, _TRY_MODE = 1024, 6, 16
# Passes of a mode before its tokens are believed: they vary by as much as the mean, so that the error of the mean of 32
# is a sixth of it. And waiting passes after which a hopeless first trial ends: of 891
# passes of one request 104 waited at that rate (two H100, `benchmarks/results/2026-11-25-h100-widened-eleventh.md`).
_TRIAL, _FEW = 32, 12
# Plain passes that the first steps may lose which wait for trees that the host cuts. Chosen: what a few of them make
# varies by more than they take, and that drafts pay after all is found out by a try only.
_TRIAL_LOSS = 4.0
# Rows between which the time of one more is taken. Chosen.
_PROMPT_ROWS = 512


class _ExpectedPass(NamedTuple):
    """Of all sequences of a pass, and from the end of the pass before it."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class SpeculationController:
    """Chooses launch mode and rows of each launch, and whether they are a draft's."""

    def __init__(
        self, most: int, cost: StepCost | None, live: Mapping[int, LiveSequence], disable_above: int = 1 << 30
    ) -> None:
        """A sequence gets at most `most` rows, and none above `disable_above` sequences; 0 turns the controller off.
        `cost` of None takes as many rows as are allowed. `live` is the engine's own table."""
        self.on = most > 0
        if self.on:
            compile_pooled()
        self._limit = min(most, KEPT)
        self._live = live
        self._disable_above = disable_above
        self.times = None if cost is None else PassTimes(cost)
        # Of passes most of whose sequences have forms: their rows take the host masks, and bring text that is forced.
        # What is known of other passes does not hold for them.
        self._of_forms = None if cost is None else PassTimes(cost)
        self._yields = {(mode, forms): TokenYield() for mode in (None, *LaunchMode) for forms in (False, True)}
        self.draft_gate, self.throughput_trial = DraftGate(), ThroughputTrial()
        self._was_alone = True
        self._row_tries, self._mode_tries = Tries(_TRY, _LONGEST_PAUSE), Tries(_TRY_MODE, _LONGEST_PAUSE)
        # By load, what steps made that waited for trees that the host cuts; tries of waiting for them, and launches
        # since the last that waited. A try is one step, so that there are many: of one that finds nothing to verify
        # only the wait is lost. Launches between two tries at most: a wait may take many times a pass. Chosen.
        self._wait_yields, self._cut_tries = dict[int, WaitYield](), Tries(1, 16384)
        self._since_cuts = 0
        # By sequences, those of them with drafts, and mode of plain passes: a pass without waiting, and one with it.
        self._compared: tuple[tuple[int, int, Mode], _ExpectedPass, _ExpectedPass] | None = None
        # The faster launch mode so far.
        self._preferred = LaunchMode.RUN_AHEAD
        self._since_timed = 0
        # Of the last launch: its mode, and how long it waited.
        self._mode: Mode = None
        self._waits = 0.0
        # And whether most of its sequences have forms.
        self._forms = False
        # Most rows of a launch, at first those of one sequence.
        self._most_rows = 1 + KEPT
        # Tokens of a sequence in a recent pass, with the weight of one launch.
        self.tokens_each = RunningMean.settled(0.02, 1.0)
        # Of a recent answer.
        # Tokens of an answer before one has ended, and the weight of one answer in their mean. Chosen.
        self._answer_tokens = RunningMean(0.05, 256.0, 1)
        # See `NodeTables.trust`.
        self.trust = 1.0
        # Keys that trees grown behind a pass take, by the number of its sequences; see `DeviceRows.tail`.
        self.tail: Callable[[int], int] = lambda _: 0

    def forget_draft(self) -> None:
        """Drop what was observed of a draft: another one has connected, or the weights have changed."""
        self.draft_gate.forget()
        self.throughput_trial.forget()
        for mode, forms in itertools.product(LaunchMode, (False, True)):
            self._yields[mode, forms] = TokenYield()
        self._preferred = LaunchMode.RUN_AHEAD
        self._wait_yields, self._compared = {}, None

    def uses_draft(self, load: int) -> bool:
        """Whether drafted rows of the next launches may be a draft's."""
        return self.throughput_trial.allows_rows(load) and self.draft_gate.uses_draft(load)

    def rows_worth_a_draft(self, load: int, remaining: int) -> float:
        """Rows of a prompt that take as much time as the draft spares a sequence of which `remaining` tokens may
        follow: more than any prompt has where its gain is not known."""
        gain = self.draft_gate.gain(load)
        if self.times is None or gain is None:
            return inf
        cost = self.times.cost
        a_row = (cost(load + _PROMPT_ROWS) - cost(load)) / _PROMPT_ROWS
        # Its part of the passes that it takes with the draft.
        takes = min(remaining, self._answer_tokens.value) / self.tokens_each.value * cost(load) / load
        return takes * max(0.0, gain - 1.0) / a_row if a_row > 0 else inf

    def choose_mode(self, load: int, answer_seconds: float, launch_seconds: float) -> LaunchMode:
        """How the next pass of `load` sequences is launched, all of whose rows the device may choose.

        `answer_seconds` and `launch_seconds` are the times of a draft's answer, 0 where unknown, and of a launch. While
        a pass waits, the device is idle until the answer has come and the pass is launched.
        """
        ahead, waiting = (self._yield(mode) for mode in (LaunchMode.RUN_AHEAD, LaunchMode.WAIT_FOR_DRAFT))
        times = self._pass_times
        if self.times is None or times is None or not answer_seconds or ahead.count < _TRIAL:
            return LaunchMode.RUN_AHEAD
        held = answer_seconds + launch_seconds
        rates = self._rates_at(load, LaunchMode.RUN_AHEAD, self.times.gap(load, LaunchMode.RUN_AHEAD) or 0.0)
        best = max(rates, key=rates.__getitem__)
        # Waiting is tried where it takes at most this share of a pass: waiting passes made a fifth more tokens than
        # others whose trees came in time (3.36 and 2.83,
        # `benchmarks/results/2026-11-25-h100-widened-eleventh.md`).
        if held > 0.2 * times.expected((best,), load, LaunchMode.RUN_AHEAD)[best] * times.cost(load):
            return LaunchMode.RUN_AHEAD
        waited = self.times.gap(load, LaunchMode.WAIT_FOR_DRAFT)
        rate = {
            LaunchMode.RUN_AHEAD: rates[best],
            LaunchMode.WAIT_FOR_DRAFT: max(
                self._rates_at(load, LaunchMode.WAIT_FOR_DRAFT, held if waited is None else waited).values()
            ),
        }
        share = rate[LaunchMode.WAIT_FOR_DRAFT] / rate[LaunchMode.RUN_AHEAD]
        if waiting.count < _TRIAL and not (waiting.count >= _FEW and share < HOPELESS):
            return LaunchMode.WAIT_FOR_DRAFT
        # Rate that waiting needs against the others: means of sixty passes vary by 7 %, and a wrong choice costs more
        # where the device is idle for it.
        if share > 1.1:
            self._preferred = LaunchMode.WAIT_FOR_DRAFT
        elif share < 1.0:
            self._preferred = LaunchMode.RUN_AHEAD
        (other,) = set(LaunchMode) - {self._preferred}
        # As seldom as may be: what the other makes is known by then, and changes slowly.
        return other if self._mode_tries.due(1.0) else self._preferred

    def is_preferred(self, mode: LaunchMode) -> bool:
        """Whether a mode is the faster one so far; passes of the other one are trials."""
        return mode is self._preferred

    def _rates_at(self, load: int, mode: Mode, held: float = 0.0) -> dict[int, float]:
        """Tokens a second of a sequence by the rows of a pass at this load."""
        sizes = [size for size in row_sizes(max(load, self._most_rows)) if load < size <= load * (1 + self._limit)]
        return self._rates(sizes, load, mode, held)

    def choose(
        self, schedule: Schedule, max_rows: int, mode: Mode, waits: float = 0.0, cut_rows: int = 0
    ) -> DeviceRows | None:
        """The rows of a step of at most `max_rows`, which waits `waits` seconds for its drafts, with those of the
        sequences whose rows the host lays out, `cut_rows` drafted ones among them; None where a plain step is better,
        or there are only such sequences."""
        if not (self.on and self.throughput_trial.allows_rows(len(schedule.chunks))):
            return None
        self._mode, self._waits, self._most_rows = mode, waits, max_rows
        live, chunks, laid_out = self._live, schedule.chunks, schedule.laid_out
        self._forms = most_have_forms([chunk.sequence for chunk in chunks])
        if len(chunks) > self._disable_above:
            return None
        limits = [self._max_rows(live[chunk.sequence.sequence_id]) for chunk in chunks[laid_out:]]
        if not any(limits):
            return None
        rows = cut_rows + sum([chunk.count for chunk in chunks[:laid_out]])
        best = self._best(limits, rows, max_rows, mode, waits, unread=schedule.unread > 0)
        return DeviceRows(best, (*[0] * laid_out, *limits), laid_out, rows, self.tail(len(chunks))) if best else None

    def _best(
        self, limits: SequenceOf[int], laid_out_rows: int, max_rows: int, mode: Mode, waits: float, *, unread: bool
    ) -> int:
        """Rows of a pass of sequences with these limits, beside those that the host lays out; 0 for a plain one.
        `unread`: prompts are left unread."""
        # Sizes of passes without those, which the device could run instead.
        sizes, sequences = _sizes(limits, 0, max_rows), len(limits)
        beside = _sizes(limits, laid_out_rows, max_rows) if laid_out_rows else sizes
        if not beside or self.times is None:
            return beside[-1] if beside else 0
        if not laid_out_rows:
            return self._tried(sizes, sequences, mode, waits)
        rate = sequences * max(self._rates(sizes, sequences, mode, waits).values())
        rate = self._worth_beside(rate, beside[0]) if unread else rate
        tokens = {rows: sequences * self._tokens(sequences, rows - laid_out_rows, mode) for rows in beside}
        # Rows pay if they bring more than passes without the others do in the time that they take.
        cost = self.times.cost
        profit = {rows: tokens[rows] - rate * cost(rows) for rows in beside}
        best = max(beside, key=lambda rows: profit[rows])
        plain = row_sizes(max_rows)[bisect.bisect_left(row_sizes(max_rows), laid_out_rows + sequences)]
        return best if profit[best] > MARGIN * sequences - rate * cost(plain) else 0

    def beside_prompts(self, sequences: int, rows: int) -> int:
        """Drafted rows of these sequences in a pass of `rows` whose others read prompts and leave some unread: as many
        as let a row of a prompt cost the fewest tokens, compared with what time is worth there."""
        assert self.times is not None
        if rows <= 2 * sequences or sequences > self._disable_above:
            return 0
        rate = sequences * max(self._rates_at(sequences, self._mode, self._waits).values())
        made, read = self._worth_beside(rate, rows) * self.times.cost(rows), rows - sequences
        lost = {
            count: (made - sequences * self._yield(self._mode).tokens(count / sequences)) / (read - count)
            for count in [0, *(int(each * sequences) for each in POOLED if each * sequences < read / 2)]
        }
        return min(lost, key=lost.__getitem__)

    def _worth_beside(self, rate: float, rows: int) -> float:
        """Tokens that a second is worth in a pass of `rows` that leaves prompts unread, where passes without prompts
        make `rate` tokens a second: as many as are made then, or as those rows are worth to who waits for them. So few
        sequences leave prompts nearly all rows, and many, whose time is worth more, do not."""
        assert self.times is not None
        # Rows of prompts that a token is worth where prompts are left unread; without drafts it takes one. Chosen,
        # simulated: with one or two long prompts make fewer tokens and slower ones, with four first tokens come later
        # (`benchmarks/results/2026-11-29-cpu-first-tokens.md`).
        return max(rate, rows / (3.0 * self.times.cost(rows)))

    def observe_answer(self, tokens: int) -> None:
        """Observe the tokens of an answer that has ended by itself."""
        self._answer_tokens.observe(tokens)

    def observe_passes(
        self, outcomes: SequenceOf[Verified | None], mode: Mode, drafted: SequenceOf[bool], *, forms: bool = False
    ) -> None:
        """Learn from passes whose rows the device chose. `drafted`: the sequence's table holds only a draft's nodes.
        `forms`: see `most_have_forms`."""
        passes = [one for outcome in outcomes if outcome is not None for one in outcome.device_passes]
        if not passes:
            self.tokens_each.observe(1.0)
            return
        self._yields[mode, forms].observe_passes(passes)
        self.tokens_each.observe(1 + sum([one.accepted for one in passes]) / len(passes))
        known = zip(outcomes, drafted, strict=True)
        drafted_passes = [one for outcome, has in known if has and outcome is not None for one in outcome.device_passes]
        if mode is not None and drafted_passes:
            from_table = sum([one.accepted_from_table for one in drafted_passes]) / len(drafted_passes)
            excess = from_table - sum([one.expected_from_table for one in drafted_passes]) / len(drafted_passes)
            # Change of the trust in a draft's scores by one pass, for each token expected too much; a larger one
            # follows the noise of single passes (0.02 moved trust by a seventh up and down in a simulation). Its bounds
            # are chosen, not measured: from the lower one, where hardly a row pays, some 600 passes that each bring
            # a token more than expected lead back to full trust; the upper one keeps a lucky run from filling passes
            # with wrong rows.
            self.trust = min(1.25, max(0.05, self.trust * (1 + 0.005 * excess)))

    def observe_time(self, sequences: int, rows: int, seconds: float, mode: Mode, *, forms: bool = False) -> None:
        """Observe the `seconds` of a pass on the device, that in which it waited for masks included; `rows` is 0 for a
        plain one. `forms`: see `most_have_forms`."""
        times = self._of_forms if forms else self.times
        if times is not None:
            times.observe_pass(sequences, rows, seconds, mode)

    @property
    def _pass_times(self) -> PassTimes | None:
        """Of passes like the last launch."""
        return self._of_forms if self._forms else self.times

    def _yield(self, mode: Mode) -> TokenYield:
        """The same of tokens."""
        return self._yields[mode, self._forms]

    def choose_wait(
        self, load: int, drafted: int, *, ahead: bool, timed: bool = True, sending: float = 0.0
    ) -> LaunchMode:
        """Whether the next step of `load` sequences waits for the drafts of `drafted` of them, whose trees the host
        cuts. Called once for each step.

        Args:
            ahead: a step that does not wait may be launched behind the one under way.
            timed: its time will be observed, so that it may be a try.
            sending: the time to send the draft what it needs for a try, in plain passes.
        """
        if self.times is None:
            return LaunchMode.WAIT_FOR_DRAFT
        waits = self._waits_for_cuts(load, drafted, ahead=ahead, timed=timed, sending=sending)
        if timed:
            self._since_cuts = 0 if waits else self._since_cuts + 1
        return LaunchMode.WAIT_FOR_DRAFT if waits else LaunchMode.RUN_AHEAD

    def _waits_for_cuts(self, load: int, drafted: int, *, ahead: bool, timed: bool, sending: float) -> bool:
        times = self.times
        assert times is not None
        # Where they are launched ahead, the passes launched at once have settled by then.
        enough = _TRIAL if ahead else ENOUGH
        if max(times.gaps_observed(load, mode) for mode in (None, LaunchMode.RUN_AHEAD)) < enough:
            return False
        if not self._knows_cuts:
            return timed
        of = load, drafted, self._plain_mode(load)
        if self._compared is None or self._compared[0] != of:
            # Kept while no step waits: nothing is learnt of waiting then.
            self._compared = of, self._plain_pass(load), self._waiting_pass(load, drafted)
        _, plain, waiting = self._compared
        if waiting.rate > MARGIN * plain.rate:
            if timed:
                self._cut_tries.end()
            return True
        takes, waits = waiting.seconds / plain.seconds, self._waits_near(load)
        if timed and waits.count < _TRIAL and waits.count * (takes - waiting.tokens / plain.tokens) < _TRIAL_LOSS:
            return True
        if not timed or not self._cut_tries.due(takes - 1 + sending):
            return False
        waits.restart()
        return True

    @property
    def _knows_cuts(self) -> bool:
        """Whether enough steps waited for trees that the host cuts."""
        assert self.times is not None
        known = any([waits.count >= ENOUGH for waits in self._wait_yields.values()])
        return known and self.times.gap(1, LaunchMode.WAIT_FOR_DRAFT) is not None

    def _waits_near(self, load: int) -> WaitYield:
        """What steps made that waited, at this load or the nearest where enough did."""
        size = load_size(load)
        known = [of for of, waits in self._wait_yields.items() if waits.count >= ENOUGH]
        return self._wait_yields[min(known, key=lambda of: (abs(of - size), of))]

    def needs_unfed(self, load: int) -> bool:
        """Whether plain passes that feed no head have to be timed, now that a head's drafts are."""
        if self.times is None or not self._knows_cuts:
            return False
        return self.times.gaps_observed(load, None) < ENOUGH

    def keeps_cuts(self, launches: int) -> bool:
        """Whether a step waited less than so many launches ago for trees that the host cuts, or may in less."""
        return self._since_cuts < launches or self._cut_tries.is_near(launches)

    def expect_cuts(self) -> None:
        """Such steps are about to come, in spite of a pause: sequences begin for which they are expected to pay."""
        self._since_cuts = 0

    def longest_wait(self, load: int) -> float:
        """Longest wait for trees that the host cuts, in seconds."""
        if self.times is None or not any(self.times.gaps_observed(load, mode) for mode in (None, LaunchMode.RUN_AHEAD)):
            return inf
        # Longest wait for a draft whose trees the host cuts, in plain passes: one hardly ever makes more tokens.
        return 8.0 * self._plain_pass(load).seconds

    def cut_rate(self, load: int, drafted: int) -> float:
        """Tokens a second of `load` sequences, for `drafted` of which the host has trees."""
        if self.times is None:
            return 0.0
        plain = self._plain_pass(load).rate
        return max(plain, self._waiting_pass(load, drafted).rate) if drafted and self._knows_cuts else plain

    def _plain_mode(self, load: int) -> Mode:
        """As what plain passes are timed: as those that feed no head, once such were."""
        assert self.times is not None
        return None if self.times.gaps_observed(load, None) >= ENOUGH else LaunchMode.RUN_AHEAD

    def _plain_pass(self, load: int) -> _ExpectedPass:
        """A pass of roots alone."""
        times = self.times
        assert times is not None
        mode = self._plain_mode(load)
        seconds = times.expected((0,), load, mode)[0] * times.cost(load) + (times.gap(load, mode) or 0.0)
        return _ExpectedPass(load * self.tokens_each.value, seconds)

    def _waiting_pass(self, load: int, drafted: int) -> _ExpectedPass:
        """A pass that waits for its drafts, with the rows that its trees are cut to."""
        times, waits = self.times, self._waits_near(load)
        assert times is not None
        seconds = times.expected((0,), load, LaunchMode.WAIT_FOR_DRAFT)[0] * times.cost(load)
        seconds *= 1 + waits.extra * drafted / load
        tokens = drafted * waits.tokens + (load - drafted) * self.tokens_each.value
        return _ExpectedPass(tokens, seconds + (times.gap(load, LaunchMode.WAIT_FOR_DRAFT) or 0.0))

    def observe_cuts(self, load: int, drafted: int, rows: int, accepted: float) -> None:
        """Observe a step of `load` sequences that waited for the drafts of `drafted` of them: the drafted rows that
        were verified, and those of them that were accepted."""
        times = self.times
        if times is None:
            return
        plain = times.cost(load)
        extra, gap = times.cost(load + rows) / plain - 1, times.gap(load, LaunchMode.WAIT_FOR_DRAFT) or 0.0
        waits = self._wait_yields.setdefault(load_size(load), WaitYield())
        waits.observe_step(1 + accepted / drafted, extra * load / drafted, 1 + extra + gap / plain)
        self._compared = None

    def _max_rows(self, live: LiveSequence) -> int:
        """Drafted rows that the sequence may have."""
        request, grammar = live.sequence.request, live.verifier.grammar
        if not request.speculate or (grammar is not None and grammar.slow):
            return 0
        # The target samples the last token itself.
        # Rows for each token that a sequence may still generate. Chosen: as many children as a head's nodes have. A
        # page or two are held for them at the end.
        return max(0, min(self._limit, request.max_draft_nodes, 8 * (live.sequence.remaining - 1)))

    def _tried(self, sizes: SequenceOf[int], sequences: int, mode: Mode, waits: float) -> int:
        """The size with the highest rate, or at times another one, to measure it again."""
        times = self._pass_times
        assert times is not None
        if self._was_alone and mode is not None:
            self._yield(mode).restart()
            self._row_tries.hasten()
        self._was_alone = mode is None
        self._since_timed += 1
        # Launches until all sizes are timed again: contexts grow.
        if self._since_timed > 512:
            self._since_timed = 0
            times.forget((0, *sizes), sequences, mode)
        rates, measured = self._rates(sizes, sequences, mode, waits), times.measured(sequences, mode)
        rates[0] *= MARGIN
        best = max(rates, key=rates.__getitem__)
        for rows, rate in rates.items():
            # Share of the best rate that a size needs, as estimated, to be timed.
            if rows not in measured and rate > 0.7 * rates[best]:
                return rows
        if best:
            return best
        expected = times.expected((0, sizes[0]), sequences, mode)
        return sizes[0] if self._row_tries.due(max(0.0, expected[sizes[0]] / expected[0] - 1)) else 0

    def _rates(self, sizes: SequenceOf[int], sequences: int, mode: Mode, waits: float) -> dict[int, float]:
        """Tokens a second of a sequence by the rows of a pass, 0 for a plain one; others wait `waits` seconds."""
        times = self._pass_times
        assert times is not None
        cost = times.cost(sequences)
        return {
            rows: self._tokens(sequences, rows, mode) / (cost * multiple + (waits if rows else 0.0))
            for rows, multiple in times.expected((0, *sizes), sequences, mode).items()
        }

    def _tokens(self, sequences: int, rows: int, mode: Mode) -> float:
        """Tokens of each sequence in a pass with `rows`."""
        return self._yield(mode).tokens(max(0, rows - sequences) / sequences)


def most_have_forms(sequences: SequenceOf[Sequence]) -> bool:
    """Whether grammars mask the rows of most of these sequences."""
    return 2 * sum([one.request.has_form for one in sequences]) > len(sequences)


def _sizes(limits: SequenceOf[int], prefill_rows: int, max_rows: int) -> list[int]:
    """Sizes that a pass may have with rows of prompts, one root for each limit, and drafted rows up to the limits."""
    held = prefill_rows + len(limits)
    sizes = row_sizes(max_rows)
    first = bisect.bisect_right(sizes, held)
    # The smallest size that holds all, and those below.
    return list(sizes[first : 1 + bisect.bisect_left(sizes, held + sum(limits), first)])
