"""That ratios compare the same work: which prompts a wave and a closed loop ask."""

from __future__ import annotations

import pytest

from benchmarks.shared.workload import closed_requests, random_prompts, read_conversations, wave

PROMPTS = [(number,) for number in range(280)]


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_waves_are_the_slices_that_peers_get(concurrency: int) -> None:
    for number in range(3):
        assert wave(PROMPTS, number, concurrency) == PROMPTS[number * concurrency : (number + 1) * concurrency]


def test_the_warm_up_has_prompts_of_its_own() -> None:
    warm_up = wave(PROMPTS, -1, 64)
    assert len(warm_up) == 64
    assert not set(warm_up) & {prompt for number in range(3) for prompt in wave(PROMPTS, number, 64)}


def test_waves_go_round_when_prompts_run_out() -> None:
    assert wave(PROMPTS[:5], 1, 4) == [(4,), (0,), (1,), (2,)]


@pytest.mark.parametrize(("concurrency", "count"), [(1, 25), (8, 40), (64, 320)])
def test_a_closed_loop_warms_up_with_rising_lengths(concurrency: int, count: int) -> None:
    requests = closed_requests(PROMPTS, concurrency, 200)
    lengths = [tokens for _, tokens in requests]
    assert len(requests) == count
    assert lengths[:concurrency] == sorted(lengths[:concurrency])
    assert set(lengths[concurrency - 1 :]) == {200}


def test_random_prompts_are_the_same_for_every_engine() -> None:
    prompts = random_prompts(3, 16, 49152)
    assert prompts == random_prompts(5, 16, 128256)[:3]
    assert all(1000 <= token < 30000 for prompt in prompts for token in prompt)


def test_conversations_come_task_by_task() -> None:
    conversations = read_conversations()
    assert len(conversations) == 280
    assert sum(len(one.turns) for one in conversations) == 320
    assert [one.task for one in conversations] == [
        task for task in dict.fromkeys(c.task for c in conversations) for _ in range(40)
    ]
