"""`outrider tune`: what is tried, how its time is spent, what is chosen, and the file that services read."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from timeless_loop import TimelessLoop

from draft_service.config import DraftConfig, drafter_config
from outrider.settings import SettingsError, load
from outrider_client.local.placement import GpuPlacement
from outrider_client.local.settings_file import read_document, to_toml, with_settings
from outrider_client.results import RequestTimes, Result, SpeculationTotals, TargetInfo
from outrider_client.terminal.options import TuneOptions
from outrider_client.tuning.budget import LEAST_PAIRS, Costs, final_seconds, measurable, next_share
from outrider_client.tuning.candidates import Candidate, known_candidates, parse_candidates
from outrider_client.tuning.estimates import Estimate, better, estimate, most_promising, over_loads
from outrider_client.tuning.report import save_tuning_plot, sentences, tuning_table, verdict
from outrider_client.tuning.services import Setup, read_setup
from outrider_client.tuning.session import (
    NO_TIME,
    Comparison,
    LoadFigures,
    Measured,
    Tuning,
    _Tuner,
    read_prompts,
)
from target_service.config import TargetConfig

COSTS = Costs(change=4.0, pair=2.0)
SMALL = Candidate((("trie", "num_draft_tokens", 16),))
INFO = TargetInfo("m", 10, "", 512, 64, "float32", 16, 1024, (), "trie", (2,), "0.1.0", speculation_reason="it pays")


def spend(seconds: float, waiting: int, costs: Costs) -> tuple[list[float], float]:
    """The shares that candidates get when each takes just its own, and what is left for the end."""
    left, shares = seconds, list[float]()
    while share := next_share(left, final_seconds(seconds, costs), waiting - len(shares), not shares, costs):
        shares.append(share)
        left -= share
        if len(shares) == waiting:
            break
    return shares, left


@pytest.mark.parametrize("seconds", [5.0, 9.9, 10.0, 19.0, 20.0, 35.0, 90.0, 1000.0])
@pytest.mark.parametrize("waiting", [1, 2, 7])
def test_the_time_is_spent_and_not_exceeded(seconds: float, waiting: int) -> None:
    shares, left = spend(seconds, waiting, COSTS)
    assert left >= -1e-9
    assert all(share >= (COSTS.least if len(shares) > 1 else COSTS.barely) for share in shares)
    assert bool(shares) == (seconds >= COSTS.barely)
    # Several are decided by a second measurement, for which there is time.
    assert len(shares) < 2 or left >= max(COSTS.least, seconds / 3) - 1e-6
    # Nobody is left out whom there was time for.
    assert len(shares) in (0, waiting) or left - final_seconds(seconds, COSTS) < COSTS.least


@pytest.mark.parametrize("seconds", [5.0, 9.9, 10.0, 19.0, 20.0, 35.0, 90.0, 1000.0])
@pytest.mark.parametrize("waiting", [0, 1, 2, 7])
def test_what_there_is_time_for_is_known_beforehand(seconds: float, waiting: int) -> None:
    shares, _ = spend(seconds, waiting, COSTS) if waiting else ([], seconds)
    assert measurable(seconds, waiting, COSTS) == len(shares)


def test_shares_are_equal() -> None:
    shares, _ = spend(120.0, 5, COSTS)
    assert shares == pytest.approx([16.0] * 5)


def test_one_candidate_may_have_all_the_time() -> None:
    assert spend(15.0, 4, COSTS) == ([15.0], 0.0)


def pairs_of(ratio: float, noise: float, count: int, seed: int) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    base = [draw.uniform(5.0, 50.0) for _ in range(count)]
    return [(speed * ratio * math.exp(draw.gauss(0.0, noise)), speed) for speed in base]


def test_the_interval_holds_the_ratio_as_often_as_it_says() -> None:
    for count in (LEAST_PAIRS, 8, 30):
        found = [estimate(pairs_of(1.1, 0.2, count, seed)) for seed in range(2000)]
        held = sum(one.low <= 1.1 <= one.high for one in found) / len(found)
        # Three standard errors of a share of 2,000 around 95 %.
        assert held == pytest.approx(0.95, abs=0.015)


def test_noise_is_chosen_seldom_and_gains_are_found() -> None:
    of_noise = sum(better(estimate(pairs_of(1.0, 0.2, 10, seed))) for seed in range(2000)) / 2000
    of_gains = sum(better(estimate(pairs_of(1.3, 0.2, 10, seed))) for seed in range(200)) / 200
    assert of_noise < 0.04
    assert of_gains > 0.9


def test_a_single_pair_says_nothing_sure() -> None:
    one = estimate([(30.0, 10.0)])
    assert (round(one.ratio, 6), one.low, better(one)) == (3.0, 0.0, False)
    assert not better(estimate([]))


def test_twice_and_half_as_fast_cancel() -> None:
    assert estimate([(2.0, 1.0), (1.0, 2.0)]).ratio == pytest.approx(1.0)


def test_loads_count_the_same_and_the_least_sure_decides() -> None:
    both = over_loads([Estimate(math.log(1.2), 0.01, 40), Estimate(math.log(0.9), 0.03, 2)])
    assert both.ratio == pytest.approx(math.sqrt(1.2 * 0.9))
    assert (both.freedom, both.error) == (2, pytest.approx(math.hypot(0.01, 0.03) / 2))


@pytest.mark.parametrize(
    ("means", "place"),
    [([0.1, 0.3, 0.2], 1), ([0.2, 0.3, 0.3], 1), ([-0.1, 0.0], None), ([], None)],
    ids=["the fastest", "the first of equals", "none is faster", "none"],
)
def test_most_promising(means: Sequence[float], place: int | None) -> None:
    assert most_promising([Estimate(mean, 0.5, 3) for mean in means]) == place


def test_candidates_are_read_as_they_are_written() -> None:
    text = "trie.num-draft-tokens=16 trie.breadth=1; target.max_draft_nodes=15;trie.breadth=1 ; "
    found = parse_candidates(text)
    assert [one.label for one in found] == [
        "trie.num_draft_tokens=16 trie.breadth=1",
        "target.max_draft_nodes=15",
        "trie.breadth=1",
    ]
    assert parse_candidates("; ".join(one.label for one in found)) == found
    assert (found[1].draft, found[1].max_nodes, found[0].max_nodes) == ((), 15, None)


@pytest.mark.parametrize("text", ["breadth=1", "trie.breadth", "trie.breadth=x", "tree.breadth=1", "target.threads=1"])
def test_wrong_candidates(text: str) -> None:
    with pytest.raises(SettingsError, match="--candidates"):
        parse_candidates(text)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafter", ["trie", "prompt_lookup", "eagle", "medusa", "model", "mtp", "merged"])
def test_services_take_every_known_candidate(drafter: str, captured: bool, tmp_path: Path) -> None:
    found = known_candidates(drafter, ("eagle", "trie"), captured)
    assert len(set(found)) == len(found)
    for candidate in found:
        path = tmp_path / "outrider.toml"
        path.write_text(to_toml(with_settings({}, candidate.settings), "a comment"))
        target = load(TargetConfig, "target", path=path)
        changed = 0
        for section, name, value in candidate.settings:
            config = target if section == "target" else drafter_config(section, path=path)
            assert getattr(config, name) == value
            changed += value != getattr(type(config)(), name)
        assert changed
    # Shapes of trees among them, and not only how many rows of them are verified.
    assert any(one.draft for one in found)


def test_a_file_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[target]\nmax-running = 7\nmodel = "a \\"b\\" \\\\ ü"\nspeculation = true\n[trie]\nbreadth = 3\n')
    document = with_settings(
        read_document(path), [("trie", "breadth", 1), ("trie", "num_draft_tokens", 16), ("draft", "drafter", "trie")]
    )
    path.write_text(to_toml(document, "two\nlines"), encoding="utf-8")
    target = load(TargetConfig, "target", path=path)
    assert (target.max_running, target.model, target.speculation) == (7, 'a "b" \\ ü', True)
    trie = drafter_config("trie", path=path)
    assert (trie.breadth, trie.num_draft_tokens) == (1, 16)
    assert load(DraftConfig, "draft", path=path).drafter == "trie"


def test_parts_of_merged_are_read_as_the_draft_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text('[merged]\nmerged_drafters = "medusa , trie"\n')
    flags = "--merged-drafters=model,prompt_lookup"
    for draft_flags, file, parts in ((flags, path, {"model", "prompt_lookup"}), ("", path, {"medusa", "trie"})):
        setup = read_setup(TuneOptions(drafter="merged", draft_flags=draft_flags), file, {})
        assert {section for one in setup.candidates for section, _, _ in one.draft} == parts


def test_what_would_win_over_a_candidate_is_refused() -> None:
    options = TuneOptions(candidates="trie.breadth=1", draft_flags="--breadth=2")
    with pytest.raises(SettingsError, match="--breadth is what is tuned"):
        read_setup(options, None, {})
    with pytest.raises(SettingsError, match="OUTRIDER_TRIE_BREADTH"):
        read_setup(TuneOptions(candidates="trie.breadth=1"), None, {"OUTRIDER_TRIE_BREADTH": "2"})


def test_prompts_that_come_along_take_turns_by_task() -> None:
    prompts = read_prompts("")
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts) >= 12
    firsts = [prompt.prompt_id.partition("/")[0] for prompt in prompts[:6]]
    assert len(set(firsts)) == len(firsts)


def measured(label: str, mean: float, error: float = 0.01) -> Measured:
    return Measured(label, {load: LoadFigures(Estimate(mean, error, 5), 20.0, 1.9, 18.0) for load in (1, 4)})


def tuning(final: float | None, error: float = 0.01) -> Tuning:
    own = (SMALL, measured(SMALL.label, 0.2))
    last = None if final is None else (SMALL, measured(SMALL.label, final, error))
    left_out = ((Candidate((("trie", "breadth", 1),)), NO_TIME),)
    return Tuning(INFO, measured("default", 0.4), (own,), last, left_out, minutes_for_all=6.2)


class ScriptedSide:
    """A target that takes `start_seconds` to start, and answers at once."""

    def __init__(self, start_seconds: float) -> None:
        self.draft_seconds = start_seconds / 2
        self.taken: list[Candidate] = []
        self.started = False
        self._seconds = start_seconds

    async def start(self) -> None:
        self.started = True
        await asyncio.sleep(self._seconds)

    async def apply(self, candidate: Candidate) -> None:
        self.taken.append(candidate)

    def client(self) -> ScriptedSide:
        return self

    async def info(self) -> TargetInfo:
        return INFO

    def backend(self, *_: object, **__: object) -> ScriptedSide:
        return self

    async def answer(self, *_: object) -> Result:
        await asyncio.sleep(0.01)
        return Result(
            text="ab", token_ids=(1, 2), finish_reason=None, stop_token_id=None, stop_string=None, prompt_tokens=1,
            completion_tokens=2, speculation=SpeculationTotals(1, 1, 1, 1, (1,), (1,), 0, 0),
            times=RequestTimes(0.0, 0.0, 0.0), time_to_first_token=0.001, duration=0.002,
        )  # fmt: skip

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("seconds", "start_seconds", "second"),
    [(4.0, 1.5, False), (4.0, 0.1, True)],
    ids=["no time to start another", "time for all"],
)
def test_a_second_target_on_a_gpu_is_started_where_it_measures_more(
    seconds: float, start_seconds: float, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = (SMALL, *(Candidate((("target", "max_draft_nodes", rows),)) for rows in (7, 3)))
    setup = Setup(TuneOptions(minutes=seconds / 60), None, {}, GpuPlacement(), (), (), candidates, gpu=True)
    sides = ScriptedSide(start_seconds), ScriptedSide(start_seconds)
    comparison = Comparison(read_prompts("")[:2], [1], 4)
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        loop = runner.get_loop()
        monkeypatch.setattr("outrider_client.tuning.session.monotonic", loop.time)
        monkeypatch.setattr(time, "perf_counter", loop.time)
        found = runner.run(_Tuner(setup, comparison, cast("Any", sides), 0, lambda _: None).tune())
        assert loop.time() < seconds + 2.0
    tried = [candidate for candidate, _ in found.measured]
    assert (sides[0].started, sides[1].started) == (True, second)
    assert tried == list(candidates if second else candidates[1:])
    assert sides[not second].taken == []
    assert found.left_out == (() if second else ((SMALL, NO_TIME),))


def test_the_choice_and_what_is_said_of_it(tmp_path: Path) -> None:
    gain, noise, nothing = tuning(0.1), tuning(0.1, error=0.2), tuning(None)
    assert [one.chosen for one in (gain, noise, nothing)] == [SMALL, None, None]
    assert verdict(gain) == "Tuning adds 1.11 x (1.09 to 1.13) of the settings in force: trie.num_draft_tokens=16."
    assert verdict(noise).startswith("Tuning adds nothing") and "within the noise" in verdict(noise)
    assert verdict(nothing).startswith("Tuning adds nothing")
    said = "\n".join(sentences(gain))
    assert "1.49 x" in said and "it pays" in said and "for lack of time: trie.breadth=1" in said
    assert "--minutes 7" in said
    # Plain decoding at two loads, a candidate, and the same once more.
    assert tuning_table(gain).row_count == 6
    for one in (gain, nothing):
        path = tmp_path / f"{one.chosen is None}.png"
        save_tuning_plot(one, path)
        assert os.path.getsize(path) > 1000
