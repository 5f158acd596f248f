"""vLLM's runner over a real draft process with tries: outputs are the model's own, drafts are kept, nothing raises."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from draft_process import Service
from vllm_runner import Asked, Runner, plain, reciting, repeating, vllm_config
from waits import HUNG_SECONDS, wait_until

from outrider_vllm import Proposer


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("draft"))
    service.start("--drafter", "trie")
    yield service
    service.end()


@contextmanager
def connected(address: str, **options: Any) -> Iterator[tuple[Any, Proposer]]:
    """vLLM's configuration and a proposer that has met its draft, and waits for it unless a test bounds the wait."""
    config = vllm_config(**({"draft": address} | options))
    proposer = Proposer(config)
    if "wait_ms" not in options:
        wait_at_most(HUNG_SECONDS, proposer)
    try:
        wait_until(lambda: draft_is_there(proposer))
        yield config, proposer
    finally:
        proposer.close()


def draft_is_there(proposer: Proposer) -> bool:
    """As a step without rows finds it."""
    assert proposer.propose([], *arrays()) == []
    return proposer._drafting.connected


def arrays() -> tuple[Any, Any]:
    runner = Runner(vllm_config(), [])
    return runner._lengths, runner._token_ids


def wait_at_most(seconds: float, proposer: Proposer) -> None:
    """Also for longer than a setting may say."""
    object.__setattr__(proposer._config, "wait_ms", seconds * 1e3)


def check(requests: list[Asked], model: Any = reciting) -> None:
    for request in requests:
        assert request.output == plain(model, request.prompt, request.max_tokens)


def per_step(requests: list[Asked]) -> float:
    return sum(len(request.output) for request in requests) / sum(request.steps for request in requests)


def test_a_text_that_repeats_itself_is_accepted(service: Service) -> None:
    with connected(service.address, tenant="repeats") as (config, proposer):
        requests = Runner(config, [proposer], repeating).answer(*(([3 + i, 5, 6], 120) for i in range(4)))
        check(requests, repeating)
        # Of seven that a step can bring.
        assert per_step(requests) > 3


def test_what_was_answered_before_is_drafted_for_the_next_who_asks(service: Service) -> None:
    with connected(service.address, tenant="again") as (config, proposer):
        runner = Runner(config, [proposer])
        first = runner.answer(([40, 2, 3], 100))
        check(first)
        assert per_step(first) < 1.2

        def known() -> bool:
            again = runner.answer(([40, 2, 3], 100))
            check(again)
            return per_step(again) > 4

        # The trie is taught off the request's path.
        wait_until(known)


def test_reordering_preemption_pieces_and_rows_used_again(service: Service) -> None:
    coins = random.Random(7)
    with connected(service.address, rows=5, tenant="moves") as (config, proposer):
        runner = Runner(config, [proposer], repeating, chunk=8)
        requests = [
            runner.ask([coins.randrange(1, 50)] * coins.randrange(1, 40), coins.randrange(1, 90)) for _ in range(30)
        ]
        while not all(request.done for request in requests):
            runner.step()
            running = [request for request in runner.rows if not request.done]
            if len(running) > 1 and coins.random() < 0.15:
                runner.preempt(coins.choice(running))
            if len(runner.rows) > 1 and coins.random() < 0.5:
                runner.swap(*coins.sample(range(len(runner.rows)), 2))
        check(requests, repeating)
        assert per_step(requests) > 2
        # Nothing is remembered of requests that are long gone.
        wait_until(lambda: proposer.propose([], *arrays()) == [] and len(proposer._tracker) == 0)
        assert not proposer._drafting._open_requests and not proposer._drafting._refused


def test_two_ranks_one_speaks_and_the_other_is_silent(service: Service) -> None:
    with connected(service.address, tenant="ranks") as (config, first):
        second = Proposer(vllm_config(rank=1, draft=service.address))
        runner = Runner(config, [first, second], repeating)
        requests = runner.answer(([9, 9], 60))
        check(requests, repeating)
        assert requests[0].accepted > 20
        lengths, token_ids = runner._lengths, runner._token_ids
        assert second.propose([[1], [], [2]], lengths, token_ids) == [[], [], []]
        assert second._drafting._link is None
        # The first of the last stage of a pipeline speaks.
        third = Proposer(vllm_config(rank=2, draft=service.address))
        assert third._drafting._link is not None
        third.close()
        second.close()


def test_engines_of_an_external_launcher_get_no_drafts(service: Service) -> None:
    config = vllm_config(draft=service.address)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    proposer = Proposer(config)
    requests = Runner(config, [proposer], repeating).answer(([9, 9], 20))
    check(requests, repeating)
    assert requests[0].drafted == 0


def test_near_the_longest_text_chains_are_cut_and_calls_left_out(service: Service) -> None:
    with connected(service.address, length=64, tokens=6, tenant="long") as (config, proposer):
        requests = Runner(config, [proposer], repeating).answer(([3, 4], 62), ([5, 6, 7], 20))
        check(requests, repeating)
        assert requests[0].accepted > 10


def test_a_prompt_that_is_no_text_is_left_alone(service: Service) -> None:
    with connected(service.address, tenant="embeddings") as (config, proposer):
        runner = Runner(config, [proposer], repeating)
        odd, fine = runner.answer(([3, 4, -1, 6], 30), ([3, 4, 100_000], 30))
        fine = runner.answer(([3, 4], 60))[0]
        check([fine], repeating)
        assert odd.drafted == 0 and fine.accepted > 20


def test_a_draft_that_is_killed_is_done_without_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.start("--drafter", "trie")
    with connected(service.address) as (config, proposer):
        runner = Runner(config, [proposer], repeating)
        before, during = runner.ask([5, 6], 150), runner.ask([7, 8], 400)
        while not before.accepted:
            runner.step()
        service.end(signal.SIGKILL)
        while proposer._drafting.connected:
            runner.step()
        accepted = during.accepted
        without = runner.answer(([11, 12], 30))
        check(without, repeating)
        assert (
            without[0].drafted == 0 and during.accepted - accepted <= config.speculative_config.num_speculative_tokens
        )
        service.start("--drafter", "trie")
        # One that is under way is told again from its first token.
        wait_until(lambda: draft_is_there(proposer))
        assert not during.done
        drafted = during.drafted
        while not during.done:
            runner.step()
        assert during.drafted > drafted
        check([before, during], repeating)
    service.end()


def test_a_frozen_draft_is_waited_for_a_few_times_and_then_not(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.start("--drafter", "trie")
    with connected(service.address, failures_to_open=3) as (config, proposer):
        runner = Runner(config, [proposer], repeating)
        check(runner.answer(([5, 6], 30)), repeating)
        service.send(signal.SIGSTOP)
        wait_at_most(0.1, proposer)
        check(runner.answer(([7, 8], 300)), repeating)
        assert proposer._drafting.late == 3
        service.send(signal.SIGCONT)
        wait_at_most(HUNG_SECONDS, proposer)

        def drafted() -> bool:
            (request,) = runner.answer(([9, 10], 400), pause=0.002)
            check([request], repeating)
            return request.accepted > 100

        wait_until(drafted)
        # One that came in time has it waited for again.
        assert proposer._drafting._latency.waiting_pays
    service.end()


def test_no_draft_at_all_costs_nothing(tmp_path: Path) -> None:
    config = vllm_config(draft=f"unix:{tmp_path}/nobody.sock", wait_ms=1000)
    proposer = Proposer(config)
    runner = Runner(config, [proposer])
    check(runner.answer(([1, 2], 50), ([3, 4], 50)))
    assert proposer._drafting.late == 0
    proposer.close()


def test_nothing_that_goes_wrong_here_reaches_vllm(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(service.address, tenant="wrong") as (config, proposer):
        runner = Runner(config, [proposer], repeating)
        running = runner.ask([3, 4], 200)
        for _ in range(10):
            runner.step()
        with monkeypatch.context() as patched:
            patched.setattr(proposer._drafting, "chain", lambda *_: 1 / 0)
            runner.step()
            assert running.drafts == []
            assert len(proposer._tracker) == 0 and not proposer._drafting._open_requests
        with monkeypatch.context() as patched:
            patched.setattr(proposer._drafting, "close", lambda *_: 1 / 0)
            runner.step()
            assert running.drafts == []
        # Shapes that no version of vLLM has.
        assert proposer.propose([[1], [2]], None, None) == [[], []]  # type: ignore[arg-type]
        accepted = running.accepted
        while not running.done:
            runner.step()
        check([running], repeating)
        assert running.accepted > accepted + 50


def test_a_proposer_that_is_collected_leaves_the_draft(service: Service) -> None:
    threads = [Proposer(vllm_config(draft=service.address))._drafting._link._thread for _ in range(2)]  # type: ignore
    assert not any(thread.is_alive() for thread in threads)


def test_drafts_that_are_not_waited_for_are_used_a_step_later(service: Service) -> None:
    with connected(service.address, wait_ms=0, tenant="late") as (config, proposer):
        runner = Runner(config, [proposer], repeating)

        def used() -> bool:
            requests = runner.answer(([3, 4], 200), ([5, 6], 200), pause=0.01)
            check(requests, repeating)
            return per_step(requests) > 2

        wait_until(used)


def test_a_log_line_says_how_it_goes(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.outrider")
    # A line each step.
    with connected(service.address, log_seconds=1e-9, tenant="log") as (config, proposer):
        Runner(config, [proposer], repeating).answer(([3, 4], 100))
    last = [record.getMessage() for record in caplog.records if "proposed" in record.getMessage()][-1]
    steps, proposed, accepted, *_ = [int(word) for word in last.split() if word.isdigit()]
    assert last.startswith("draft connected") and steps > 5 and proposed >= accepted > 40
