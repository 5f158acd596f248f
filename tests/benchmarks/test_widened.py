"""The arithmetic of the yardstick, on answers and pages whose figures are known, and the settings of its services."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from benchmarks.serving.clients import Reply
from benchmarks.serving.figures import TimedAnswer, Window
from benchmarks.serving.services import flags_of
from benchmarks.widened import metrics as widened_metrics
from benchmarks.widened.cold import cold_figures
from benchmarks.widened.metrics import (
    STEPS,
    Series,
    buckets,
    difference,
    quantile,
    read_page,
    share,
    step_figures,
    total,
    value,
)
from benchmarks.widened.proxy import DelayProxy
from benchmarks.widened.run import COLUMNS, Record, line, mode_of, parse, plan_of, verifications_of
from benchmarks.widened.runs import (
    PromptCursor,
    Run,
    answers_of,
    busy_spans,
    decoding_rate,
    in_flight_rates,
    run_figures,
    with_ratios,
)
from benchmarks.widened.services import Subject, draft_settings, subjects_of, target_settings
from outrider.telemetry.table import METRICS
from target_service.config import TargetConfig

PAGE = """\
# TYPE outrider_steps counter
outrider_steps_total {steps}
# TYPE outrider_step_phase_seconds histogram
outrider_step_phase_seconds_bucket{{le="0.001",phase="wait"}} {quick}
outrider_step_phase_seconds_bucket{{le="0.002",phase="wait"}} {all}
outrider_step_phase_seconds_bucket{{le="+Inf",phase="wait"}} {all}
outrider_step_phase_seconds_count{{phase="wait"}} {all}
outrider_step_phase_seconds_sum{{phase="wait"}} {waited}
# TYPE outrider_draft_passes counter
outrider_draft_passes_total{{outcome="hit"}} {hits}
outrider_draft_passes_total{{outcome="miss"}} {misses}
"""


def page(**figures: float) -> dict:  # type: ignore[type-arg]
    none = {"steps": 0, "quick": 0, "all": 0, "waited": 0, "hits": 0, "misses": 0}
    return read_page(PAGE.format(**(none | figures)))


def steady(begin: float, count: int, each: int = 1) -> TimedAnswer:
    """A message a second, the first after a second."""
    return TimedAnswer(begin, [begin + 1.0 + i for i in range(count)], [each] * count)


def test_what_a_run_added_is_a_difference() -> None:
    before = page(steps=10, quick=5, all=10, waited=0.5, hits=1, misses=1)
    after = page(steps=30, quick=15, all=30, waited=0.53, hits=16, misses=6)
    figures = step_figures(difference(before, after))
    assert (figures["steps"], figures["hit_share"]) == (20, 0.75)
    # Half of the waits are up to 1 ms, the others between 1 and 2.
    assert figures["wait_ms"] == {"p50": 1.0, "p90": 1.8, "p99": 1.98, "worst": 2.0}
    assert figures["step_ms"]["wait"] == 1.5
    assert figures["step_ms"]["plan"] is None and figures["device_idle_share"] is None
    twice = step_figures(total([difference(before, after)] * 2))
    assert (twice["steps"], twice["wait_ms"]) == (40, figures["wait_ms"])


def test_what_is_not_exported_is_null() -> None:
    figures = step_figures({})
    assert figures["wait_ms"] == {"p50": None, "p90": None, "p99": None, "worst": None}
    assert figures["hit_share"] is None and set(figures["step_ms"].values()) == {None}
    assert (value(page(steps=3), STEPS), value(page(steps=3), Series("not_there"))) == (3, None)
    assert (share(1, 4), share(None, 4), share(0, 0)) == (0.25, None, None)


def test_series_are_told_apart_by_their_labels() -> None:
    text = "# TYPE outrider_device_seconds counter\n"
    text += 'outrider_device_seconds_total{state="busy"} 3\noutrider_device_seconds_total{state="idle"} 1\n'
    text += "# TYPE outrider_draft_passes counter\n"
    text += 'outrider_draft_passes_total{outcome="hit"} 8\noutrider_draft_passes_total{outcome="miss"} 2\n'
    figures = step_figures(read_page(text))
    assert (figures["device_idle_share"], figures["hit_share"]) == (0.25, 0.8)
    assert figures["counted"]["draft_rows"] is None


def test_every_series_is_one_that_a_target_exports() -> None:
    chosen = [one for one in vars(widened_metrics).values() if isinstance(one, Series)]
    for series in (*chosen, *widened_metrics.COUNTED.values()):
        metric = METRICS[series.name.removesuffix("_total")]
        assert series.name.endswith("_total") == (metric.type == "counter"), series
        assert {label for label, _ in series.labels} <= set(metric.labels), series
    for name in (widened_metrics.ROUND_TRIP, widened_metrics.PHASE):
        assert METRICS[name].type == "histogram"


def test_quantiles_are_linear_within_a_bucket() -> None:
    counted = [(1.0, 0.0), (2.0, 4.0), (4.0, 8.0), (float("inf"), 8.0)]
    assert [quantile(counted, part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert quantile([(1.0, 2.0), (float("inf"), 4.0)], 1.0) == 1.0
    assert quantile([(1.0, 0.0)], 0.5) is None and quantile([], 0.5) is None
    assert buckets(page(quick=1, all=2), "outrider_step_phase_seconds", phase="wait")[0] == (0.001, 1.0)


def test_prompts_are_handed_out_once_task_by_task() -> None:
    tasks = {task: [(number, place) for place in range(5)] for number, task in enumerate("abc")}
    cursor, other = PromptCursor(tasks), PromptCursor(tasks)
    warm = {one.prompt for one in cursor.settling(6, 8, 0.0)}
    # Two of five warm up, so that three are measured.
    requests = cursor.next_prompts(9, 8, 0.8)
    assert [one.prompt[0] for one in requests] == [0, 1, 2] * 3
    assert len({one.prompt for one in requests}) == 9 and not warm & {one.prompt for one in requests}
    assert {one.tenant for one in requests} == {"measured-0"} and cursor.laps == 1
    assert requests == other.next_prompts(9, 8, 0.8)
    # Then they are new to another tenant, and drawn with other seeds.
    again = cursor.next_prompts(2, 8, 0.8)
    assert [one.prompt for one in again] == [one.prompt for one in requests[:2]]
    assert again[0].tenant == "measured-1" and again[0].seed == 9
    lap = [(one.prompt, one.tenant) for one in cursor.settling(12, 8, 0.0)]
    assert len(set(lap)) == 12


def test_requests_that_are_taken_together_are_one_tenants_where_there_are_enough_prompts() -> None:
    tasks = {task: [(number, place) for place in range(6)] for number, task in enumerate("ab")}
    cursor = PromptCursor(tasks)
    taken = [cursor.next_prompts(count, 8, 0.0) for count in (4, 3, 2, 7)]
    # Six are measured: two were left where three were wanted.
    assert [{one.tenant for one in requests} for requests in taken[:3]] == [
        {"measured-0"},
        {"measured-1"},
        {"measured-1"},
    ]
    assert {one.tenant for one in taken[3]} == {"measured-1", "measured-2"}, "of seven none can be one tenant's"
    assert cursor.laps == 3
    # All prompts settle a load that is larger than what is kept for it.
    few, many = cursor.settling(6, 8, 0.0, 6), cursor.settling(12, 8, 0.0, 7)
    assert {one.tenant for one in few} == {"settling-0"} and len({one.prompt for one in many}) > 6
    assert len({(one.prompt, one.tenant) for one in many}) == 12
    assert not {one.tenant for one in few + many} & {one.tenant for requests in taken for one in requests}


def test_each_mode_of_verification_asks_the_same_prompts_for_other_tenants() -> None:
    tasks = {"a": [(place,) for place in range(5)]}
    requests, typical = (PromptCursor(tasks, mode).next_prompts(3, 8, 0.8) for mode in ("", "typical"))
    assert [one.prompt for one in requests] == [one.prompt for one in typical]
    assert [one.seed for one in requests] == [one.seed for one in typical]
    assert {(one.tenant, one.verification) for one in typical} == {("typical-measured-0", "typical")}
    assert {one.verification for one in requests} == {""}


def test_typical_acceptance_is_measured_where_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse([*ARGUMENTS, "--verification", "default,typical"])
    assert verifications_of(options, Subject("merged", "second GPU"), [0.0, 0.8]) == ["default", "typical"]
    assert verifications_of(options, Subject("merged", "second GPU"), [0.0]) == ["default"]
    assert verifications_of(options, Subject("plain", ""), [0.8]) == ["default"]
    assert [mode_of("default", 0.0), mode_of("default", 0.8), mode_of("typical", 0.8)] == [
        *("greedy", "coupled", "typical"),
    ]
    settings = target_settings(plan_of(options), Subject("merged", "second GPU"))
    assert settings["allow_lossy"] and "--allow-lossy" in flags_of(settings)
    assert "allow_lossy" not in target_settings(plan_of(parse(ARGUMENTS)), Subject("merged", "second GPU"))
    with pytest.raises(SystemExit):
        parse([*ARGUMENTS, "--verification", "rejection"])
    assert "--verification takes" in capsys.readouterr().err


def test_one_stream_is_measured_from_first_message_to_last() -> None:
    answers = [
        TimedAnswer(0.0, [1.0, 2.0, 4.0], [2, 3, 5]),
        TimedAnswer(10.0, [10.5, 12.5], [1, 4]),
        TimedAnswer(20.0, [21.0], [1]),
    ]
    assert decoding_rate(answers, 1) == (12, 5.0)


def test_a_cold_start_is_compared_with_the_same_prompts_once_settled() -> None:
    # Answers of a second each, half as fast in the first two seconds.
    cold = [
        TimedAnswer(0.0, [0.1, 1.0], [1, 9]),
        TimedAnswer(1.0, [1.1, 2.0], [1, 9]),
        TimedAnswer(2.0, [2.1, 3.0], [1, 18]),
    ]
    settled = [TimedAnswer(at, [at + 0.1, at + 1.0], [1, 18]) for at in (7.0, 8.0, 9.0)]
    figures = cold_figures(cold, settled)
    assert figures["first"] == {"answers": 2, "cold_per_second": 10.0, "settled_per_second": 20.0, "ratio": 0.5}
    assert figures["later"] == {"answers": 1, "cold_per_second": 20.0, "settled_per_second": 20.0, "ratio": 1.0}


def test_several_streams_are_measured_while_all_of_them_decode() -> None:
    answers = [steady(0, 11), steady(2, 5), steady(8, 5)]
    assert busy_spans(answers, 2) == [Window(3.0, 7.0), Window(9.0, 11.0)]
    # Half a gap off each edge: 3.5 to 6.5 and 9.5 to 10.5, in which each stream says three and one.
    assert decoding_rate(answers, 2) == (8, 4.0)
    assert decoding_rate([steady(0, 1)], 2) == (0, 0.0)


def test_steps_are_counted_whole_though_their_messages_spread() -> None:
    """Streams in step, 30 ms apart: a rate of two tokens a second and stream."""
    answers = [TimedAnswer(0.0, [1 + i + late for i in range(20)], [2] * 20) for late in (0.0, 0.03, 0.06)]
    rate = decoding_rate(answers, 3)
    assert rate.per_second == pytest.approx(6.0, rel=0.01)


def test_streams_and_service_are_measured_while_all_are_in_flight() -> None:
    replies = [Reply(steady(0, 4), 0, 4), Reply(steady(4, 4), 0, 4), Reply(steady(0, 8), 1, 8)]
    streams, service = in_flight_rates(replies, 2)
    # From 1 to 8: both are in flight; slot 0 reads a prompt for a second, and its first message counts for one of them.
    assert service == (14, 7.0)
    assert streams == (13, 6.5)


def test_a_row_has_all_repeats_and_their_spread() -> None:
    def run(count: int, seconds: float) -> Run:
        answer = TimedAnswer(0.0, [1.0 + seconds * i for i in range(count)], [1] * count)
        return Run(((Reply(answer, 0, 1 + (count - 1) // 2),),), 10.0, page(steps=count, all=count, waited=0.01))

    figures = run_figures([run(11, 0.1), run(5, 0.2)], 1)
    assert figures["tokens_per_second"] == pytest.approx(14 / 1.8, abs=0.01)
    assert figures["spread"] == {"min": 5.0, "median": 7.5, "max": 10.0}
    assert figures["tokens_per_step"] == 2.0
    assert figures["n"] == {"answers": 2, "tokens": 16, "repeats": 2}
    assert figures["first_token_ms"]["p50"] == 1000.0
    assert figures["lossy_share"] == 0.0
    typical = Reply(steady(0, 4), 0, 3, lossy_tokens=1)
    assert run_figures([Run(((typical,),), 10.0, page())], 1)["lossy_share"] == 0.25
    row = {"mode": "head", "placement": "same GPU", "prompts": "new", "concurrency": 1, "temperature": 0.8}
    row |= {**figures, "verification": "coupled", "speculation_active": False}
    assert len(COLUMNS) == len(line(row).removesuffix(" (not drafting)"))


def test_ratios_are_to_plain_of_the_same_load_and_temperature() -> None:
    def row(mode: str, concurrency: int, temperature: float, speed: float | None, prompts: str = "new") -> dict:  # type: ignore[type-arg]
        named = {"mode": mode, "concurrency": concurrency, "temperature": temperature, "prompts": prompts}
        return named | {"tokens_per_second": speed}

    rows = [row("trie", 1, 0.0, 30.0), row("plain", 1, 0.0, 20.0), row("plain", 8, 0.0, 100.0)]
    rows += [row("trie", 8, 0.0, 90.0, "repeated"), row("trie", 8, 0.8, 90.0), row("trie", 1, 0.0, None)]
    rows += [{"mode": "head", "concurrency": None, "temperature": None, "prompts": "new", "error": "no"}]
    assert [one["ratio_to_plain"] for one in with_ratios(rows)] == [1.5, 1.0, 1.0, 0.9, None, None, None]
    assert (answers_of(1, 2, 7), answers_of(8, 2, 7), answers_of(4, 1, 7)) == (7, 16, 8)


ARGUMENTS = [
    "--model",
    "/tmp",
    "--head",
    "/tmp",
    "--medusa",
    "/medusa",
    "--concurrency",
    "1,64",
    "--json",
    "/tmp/nowhere/out.json",
]


def test_each_service_has_settings_of_its_own() -> None:
    options = parse([*ARGUMENTS, "--eagle", '{"topk": 8}', "--target", '{"draft_wait_ms": 5, "speculation": true}'])
    plan = plan_of(options)
    second, trie = Subject("merged", "second GPU"), Subject("trie", "own process")
    assert draft_settings(plan, second).environment()["CUDA_VISIBLE_DEVICES"] == "1"
    assert draft_settings(plan, Subject("head", "same GPU")).environment()["CUDA_VISIBLE_DEVICES"] == "0"
    assert draft_settings(plan, trie).environment()["CUDA_VISIBLE_DEVICES"] == ""
    variables = draft_settings(plan, second).environment()
    assert (variables["OUTRIDER_EAGLE_TOPK"], variables["OUTRIDER_EAGLE_CUDA_GRAPHS"]) == ("8", "True")
    assert int(variables["OUTRIDER_EAGLE_KV_TOKENS"]) >= 64 * 1600
    medusa = draft_settings(plan, Subject("medusa", "same GPU"))
    variables = medusa.environment()
    assert (medusa.drafter, variables["OUTRIDER_MEDUSA_HEAD"], variables["CUDA_VISIBLE_DEVICES"]) == (
        *("medusa", "/medusa", "0"),
    )
    assert "OUTRIDER_EAGLE_HEAD" not in variables
    assert target_settings(plan, Subject("medusa", "same GPU"))["draft_head"] == "/medusa"
    lookups = {mode: target_settings(plan, Subject(mode, "")).get("lookup_tokens") for mode in ("plain", "lookup")}
    assert lookups == {"plain": 0, "lookup": 15}
    settings = target_settings(plan, second)
    assert (settings["draft_head"], settings["draft_wait_ms"], settings["max_running"]) == ("/tmp", 5, 64)
    assert set(settings) <= set(TargetConfig.__dataclass_fields__)
    assert flags_of({"speculation": True, "reflection": False, "draft_wait_ms": 5}) == [
        *("--speculation", "--no-reflection", "--draft-wait-ms", "5")
    ]


def test_what_is_the_same_in_two_placements_is_measured_once() -> None:
    found = subjects_of(["trie", "head", "plain", "lookup"], ["second", "same", "inprocess"])
    assert [one.name for one in found] == [
        *("plain", "trie-own-process", "trie-in-process"),
        *("head-second-gpu", "head-same-gpu", "head-in-process", "lookup"),
    ]


def test_a_record_is_whole_after_every_row(tmp_path: Path) -> None:
    record = Record(parse([*ARGUMENTS[:-1], str(tmp_path / "out.json")]))
    record.add({"mode": "head", "placement": "", "prompts": "new", "error": "died"})
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["results"][0]["error"] == "died"
    assert {"machine", "versions", "commit", "command", "date"} <= set(document)


def test_a_proxy_adds_its_delay_to_a_round_trip(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "far"))
    server.listen()

    def echo() -> None:
        there, _ = server.accept()
        with there:
            while piece := there.recv(1 << 16):
                there.sendall(piece)

    threading.Thread(target=echo, daemon=True).start()
    with DelayProxy(tmp_path / "near", tmp_path / "far", 0.05), socket.socket(socket.AF_UNIX) as here:
        here.connect(str(tmp_path / "near"))
        begin = time.monotonic()
        # Two pieces are on their way at once.
        here.sendall(b"one")
        time.sleep(0.02)
        here.sendall(b"two" * 50_000)
        came = b""
        while len(came) < 150_003:
            came += here.recv(1 << 16)
        assert time.monotonic() - begin >= 0.07
        assert came == b"one" + b"two" * 50_000
        here.shutdown(socket.SHUT_WR)
        assert here.recv(1) == b""
    server.close()
