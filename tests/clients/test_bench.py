"""The benchmark on a scripted target: plan, interleaving, figures, exit status, table and plot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tcp_server import answering

from outrider.errors import PositionOutOfRange
from outrider.settings import SettingsError
from outrider_client.bench.backends import TargetBackend
from outrider_client.bench.plot import save_plot
from outrider_client.bench.profile import StepProfile, profile_table
from outrider_client.bench.prompts import load_prompts
from outrider_client.bench.report import ALL_TASKS, SCHEMA, cells, differing, percentile
from outrider_client.bench.runner import Plan, Runner
from outrider_client.bench.samples import BenchMode
from outrider_client.bench.session import make_plan
from outrider_client.cli.base import EXIT_DIFFERENT
from outrider_client.cli.bench import _verdict
from outrider_client.client import Message
from outrider_client.connection import Connection
from outrider_client.results import RequestTimes, Result, SpeculationTotals
from outrider_client.terminal.options import BenchOptions, ClientOptions

PLAIN, TRIE = BenchMode("plain"), BenchMode("trie", "remote")
CELL_KEYS = {
    "mode",
    "draft_placement",
    "task",
    "concurrency",
    "n",
    "tokens_per_second",
    "tokens_per_second_spread",
    "speedup_over_plain",
    "mean_accepted_length",
    "acceptance_by_depth",
    "ttft_ms",
    "tpot_ms",
    "identical_to_plain",
    "differing_outputs",
    "compared_outputs",
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"id": "a", "task": "chat", "turns": ["one", "two"]},
        {"id": "b", "task": "code", "turns": ["three"]},
        {"id": "c", "task": "chat", "turns": ["four"]},
        {"id": "d", "task": "code", "turns": ["five"]},
        {"id": "e", "task": "code", "turns": ["six"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


class Scripted:
    """A backend that notes what it is asked."""

    def __init__(self, name: str, log: list[str], tokens: Sequence[int] = (1, 2, 3, 4)) -> None:
        self._name = name
        self._log = log
        self._tokens = tuple(tokens)
        self.conversations: list[Sequence[Message]] = []
        self.tenants: list[str] = []

    async def answer(self, messages: Sequence[Message], max_tokens: int, tenant: str) -> Result:
        self._log.append(self._name)
        self.conversations.append(tuple(messages))
        self.tenants.append(tenant)
        if messages[0][1] == "six":
            raise PositionOutOfRange("too long")
        drafted = SpeculationTotals(2, 2, 4, 2, (2, 2), (2, 1), draft_wait_ns=0, fallback_steps=0)
        plain = SpeculationTotals(4, 0, 0, 0, (), (), draft_wait_ns=0, fallback_steps=0)
        token_ids = self._tokens[:max_tokens]
        return Result(
            text=f"answer of {self._name}",
            token_ids=token_ids,
            finish_reason=None,
            stop_token_id=None,
            stop_string=None,
            prompt_tokens=3,
            completion_tokens=len(token_ids),
            speculation=plain if self._name == "plain" else drafted,
            times=RequestTimes(0.0, 0.0, 0.0),
            time_to_first_token=0.01,
            duration=0.013,
        )


def plan_of(prompts: Path, **changes: Any) -> Plan:
    return make_plan(BenchOptions(prompts=str(prompts), **changes))


async def measured(
    plan: Plan, trie_tokens: Sequence[int] = (1, 2, 3, 4)
) -> tuple[list[dict[str, Any]], Any, list[str]]:
    log: list[str] = []
    backends = {PLAIN: Scripted("plain", log), TRIE: Scripted("trie", log, trie_tokens)}
    return cells(await Runner(plan, backends, lambda _: None).measure_all(), plan.modes), backends, log


def test_limit_takes_evenly_from_tasks(prompts: Path) -> None:
    assert [prompt.prompt_id for prompt in load_prompts(prompts, limit=3)] == ["a", "c", "b"]
    assert [prompt.prompt_id for prompt in load_prompts(prompts)] == ["a", "c", "b", "d", "e"]
    assert [prompt.prompt_id for prompt in load_prompts(prompts, tasks=["code"])] == ["b", "d", "e"]


def test_a_prompt_holds_any_line_break_that_json_allows(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    row = {"id": "a", "task": "qa", "turns": ["one\u2028two\x85three"]}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    [prompt] = load_prompts(path)
    assert prompt.turns == tuple(row["turns"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":1:"),
        ("[]", "not an object"),
        ('{"id": "a", "task": "t"}', "turns"),
        ('{"id": "a", "task": "t", "turns": []}', "turns"),
        ('{"id": 1, "task": "t", "turns": ["x"]}', "id must"),
        ("", "no prompts"),
    ],
    ids=["json", "list", "no-turns", "empty-turns", "id", "empty-file"],
)
def test_wrong_prompt_files(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SettingsError, match=said):
        load_prompts(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"modes": ""},
        {"modes": "transformers"},
        {"profile": True, "target": "x:1"},
        {"concurrency": "0"},
        {"concurrency": "x"},
        {"draft_placement": "far"},
        {"repeats": 0},
        {"tasks": "poetry"},
        {"target": "x:1", "modes": "trie,prompt_lookup"},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_wrong_plans(prompts: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        plan_of(prompts, **changes)


def test_modes_and_placements(prompts: Path) -> None:
    plan = plan_of(prompts, modes="trie,plain,transformers", draft_placement="remote,inprocess", concurrency="1,4")
    labels = ["plain", "trie (remote)", "trie (inprocess)", "transformers"]
    assert [mode.label for mode in plan.modes] == labels
    # Six turns in all; transformers' loop runs at one request at a time only.
    assert plan.requests() == 6 * 4 + 6 * 3


async def test_modes_take_turns(prompts: Path) -> None:
    _, backends, log = await measured(plan_of(prompts, second_turns=False))
    assert log == ["plain", "trie", "trie", "plain", "plain", "trie", "trie", "plain", "plain", "trie"]
    assert len(set(backends[TRIE].tenants)) == 1


async def test_second_turns_build_on_one_answer(prompts: Path) -> None:
    _, backends, _ = await measured(plan_of(prompts))
    expected = (("user", "one"), ("assistant", "answer of plain"), ("user", "two"))
    for mode in (PLAIN, TRIE):
        assert [talk for talk in backends[mode].conversations if len(talk) == 3] == [expected]


async def test_isolation_gives_every_prompt_a_tenant(prompts: Path) -> None:
    _, backends, _ = await measured(plan_of(prompts, isolate=True, second_turns=False))
    assert len(set(backends[TRIE].tenants)) == 5


async def test_cells(prompts: Path) -> None:
    found, _, _ = await measured(plan_of(prompts, repeats=2))
    assert [(cell["task"], cell["mode"]) for cell in found if cell["task"] == ALL_TASKS] == [
        ("all", "plain"),
        ("all", "trie"),
    ]
    cell = next(cell for cell in found if (cell["task"], cell["mode"]) == ("code", "trie"))
    assert set(cell) >= CELL_KEYS
    assert (cell["n"], cell["refused"]) == (4, {"POSITION_OUT_OF_RANGE": 2})
    assert (cell["mean_accepted_length"], cell["acceptance_by_depth"]) == (2.0, [1.0, 0.5])
    assert cell["ttft_ms"] == {"p50": 10.0, "p95": 10.0} and cell["tpot_ms"]["p95"] == pytest.approx(1.0)
    assert (cell["identical_to_plain"], cell["compared_outputs"]) == (True, 4)
    spread = cell["tokens_per_second_spread"]
    assert spread["min"] <= cell["tokens_per_second"] <= spread["max"] and len(spread["by_repeat"]) == 2
    assert differing(found) == 0


async def test_differences_are_counted(prompts: Path) -> None:
    found, _, _ = await measured(plan_of(prompts), trie_tokens=(1, 2, 3, 5))
    cell = next(cell for cell in found if (cell["task"], cell["mode"]) == (ALL_TASKS, "trie"))
    assert (cell["identical_to_plain"], cell["differing_outputs"]) == (False, 5)
    assert differing(found) == 5


async def test_a_drafter_that_never_drafts_is_told_of_once(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures would pass for those of a drafter that does not help."""
    found, _, _ = await measured(plan_of(prompts))
    document = {"results": found, "target": {"dtype": "bfloat16"}}
    _verdict(document)
    assert "drafted no token" not in capsys.readouterr().err
    for cell in found:
        cell["drafted_tokens"] = 0
    assert _verdict(document) == 0
    said = capsys.readouterr().err
    assert said.count("drafted no token in any answer") == 1 and said.startswith("trie")


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([], 0.5)) == (50.0, 95.0, None)


async def test_tenants_share_one_connection(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one would be a part of the time to a tenant's first token."""
    connected: list[str] = []
    connect = Connection.__init__

    def counted(connection: Connection, address: str, **given: Any) -> None:
        connected.append(address)
        connect(connection, address, **given)

    monkeypatch.setattr(Connection, "__init__", counted)
    backend = TargetBackend(ClientOptions(tenant="own"), running.address, True, memory="tried-")
    for tenant in ("a", "b"):
        await backend.answer([("user", "hello")], 2, tenant)
    await backend.client().generate(text="hello").result()
    await backend.close()
    assert connected == [running.address]
    assert [tenant for _, tenant, _ in running.target.requests] == ["tried-a", "tried-b", "own"]


async def test_a_token_file_is_read_once(guarded: Any, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("sixteen-letters!\n")
    backend = TargetBackend(ClientOptions(token_file=str(path)), guarded.address, True)
    path.unlink()
    await backend.answer([("user", "hello")], 2, "a")
    await backend.close()
    assert [tenant for _, tenant, _ in guarded.target.requests] == ["acme"]


async def test_the_command_on_a_running_target(running: Any, prompts: Path, tmp_path: Path, outrider: Any) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    words = ["bench", "--prompts", str(prompts), "--target", running.address, "--concurrency", "1,2"]
    status, out, err = await outrider(*words, "--max-tokens", "6", "--json", str(figures), "--plot", str(picture))
    assert status == 0, err
    assert "trie" in out and "2.50" not in err
    document = json.loads(figures.read_text())
    assert document["schema"] == SCHEMA
    assert set(document) >= {"machine", "versions", "commit", "arguments", "command", "target", "results"}
    assert document["arguments"]["max_tokens"] == 6
    assert {(c["mode"], c["task"], c["concurrency"]) for c in document["results"]} == {
        (mode, task, level) for mode in ("plain", "trie") for task in ("chat", "code", "all") for level in (1, 2)
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("dtype", "status"), [("float32", EXIT_DIFFERENT), ("bfloat16", 0)])
async def test_exit_status_of_a_lossy_target(
    running: Any, prompts: Path, outrider: Any, dtype: str, status: int
) -> None:
    running.target.dtype = dtype
    running.target.lie = lambda tokens: [*tokens[:-1], 7]
    words = ["bench", "--prompts", str(prompts), "--target", running.address, "--max-tokens", "4", "--limit", "2"]
    ended, _, err = await outrider(*words)
    assert ended == status
    assert "outputs differ from plain decoding" in err


async def test_a_target_with_another_drafter(running: Any, prompts: Path, outrider: Any) -> None:
    words = ["bench", "--prompts", str(prompts), "--target", running.address, "--modes", "plain,prompt_lookup"]
    ended, _, err = await outrider(*words)
    assert ended == 2 and "the target's drafter is trie, not prompt_lookup" in err


async def test_plot_of_one_mode(prompts: Path, tmp_path: Path) -> None:
    plan = plan_of(prompts, modes="plain", second_turns=False)
    backends = {PLAIN: Scripted("plain", [])}
    document = {
        "results": cells(await Runner(plan, backends, lambda _: None).measure_all(), plan.modes),
        "machine": {"cores": 2, "processor": "x"},
        "target": {"model": "m", "dtype": "float32"},
        "arguments": {"repeats": 1},
        "prompts": 5,
        "commit": "",
    }
    save_plot(document, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


_METRICS = """\
# TYPE outrider_steps counter
outrider_steps_total {steps}
# TYPE outrider_step_phase_seconds histogram
outrider_step_phase_seconds_bucket{{phase="plan",le="+Inf"}} {steps}
outrider_step_phase_seconds_count{{phase="plan"}} {steps}
outrider_step_phase_seconds_sum{{phase="plan"}} {plan}
outrider_step_phase_seconds_sum{{phase="forward"}} {forward}
"""


@pytest.fixture
async def metrics_page() -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of a page, and the texts it will show, the last one over and over."""
    texts: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n" + text.encode())
        await writer.drain()

    async with answering(answer) as address:
        yield f"http://{address}/metrics", texts


async def test_profile_adds_up_what_each_block_took(metrics_page: tuple[str, list[str]]) -> None:
    url, texts = metrics_page
    texts += [_METRICS.format(steps=n, plan=n * 0.001, forward=n * 0.05) for n in (10, 20, 100, 130)]
    profile = StepProfile({TRIE: url})
    for _ in range(2):
        before = await profile.read(TRIE)
        await profile.add(TRIE, before)
    await profile.add(PLAIN, await profile.read(PLAIN))
    (row,) = profile.per_step()
    assert (row["mode"], row["steps"]) == ("trie", 40)
    assert (row["plan"], row["forward"], row["host"]) == pytest.approx((1.0, 50.0, 1.0))
    assert profile_table([row]).row_count == 1
