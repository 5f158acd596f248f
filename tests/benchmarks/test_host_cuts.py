"""Trees that the host cuts, by the engine's own loop on a simulated executor: drafts that are good are waited for."""

from __future__ import annotations

import pytest

from benchmarks.loads.host_cuts import SHAPES, CutDrafter, CutEngine, CutTrie, alone


def test_a_load_is_the_same_each_time() -> None:
    """No clock of the machine takes part."""
    found = [CutEngine(SHAPES["cpu"]).load(2, 4, seed=1) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", ["cpu", "gpu"])
def test_good_drafts_make_more_and_others_cost_little(shape: str) -> None:
    # Of fewer answers than `alone` has.
    rates = {
        draft: CutEngine(SHAPES[shape], drafts=None if draft == "none" else CutDrafter).load(1, 14, 1, draft)
        for draft in ("good", "worthless", "slow", "none")
    }
    speeds = {draft: rate["tokens_per_second"] for draft, rate in rates.items()}
    assert speeds["good"] > 1.4 * speeds["none"]
    assert min(speeds["worthless"], speeds["slow"]) > 0.97 * speeds["none"]
    assert rates["worthless"]["drafted"] < 0.15 and rates["good"]["drafted"] > 0.8
    # A draft that is not waited for rests.
    assert rates["worthless"]["growths_per_token"] < 0.15 and rates["good"]["growths_per_token"] > 0.3


def test_where_rows_are_dear_for_many_sequences_few_steps_wait() -> None:
    """On a CPU, where sixteen sequences make a row cost as much as it brings."""
    rates = [alone(SHAPES["cpu"], draft, 16, seed=1) for draft in ("poor", "none")]
    assert rates[0]["tokens_per_second"] > 0.97 * rates[1]["tokens_per_second"]
    assert rates[0]["drafted"] < 0.2


def test_drafts_that_become_worthless_are_left_and_good_ones_found_again() -> None:
    engine = CutEngine(SHAPES["cpu"])
    good, worthless, again = (engine.load(1, 12, seed=1, draft=draft) for draft in ("good", "worthless", "good"))
    assert worthless["drafted"] < 0.3
    assert again["tokens_per_second"] > 0.9 * good["tokens_per_second"]


def test_a_trie_is_waited_for_where_most_places_repeat_nothing() -> None:
    """Also where a row alone costs nearly as much as a pass."""
    rates = [CutEngine(SHAPES["avx2"], drafts=drafts).load(1, 12, 1, "trie") for drafts in (CutTrie, None)]
    assert rates[0]["tokens_per_second"] > 1.04 * rates[1]["tokens_per_second"]
    assert 0 < rates[0]["drafted"] < 0.1
