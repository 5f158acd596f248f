"""What the demo shows, from a scripted target and real spans; and the whole of it on the real model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.console import Console
from waits import HUNG_SECONDS
from warm_python import shared_python

from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import set_up_tracing
from outrider_client import Client, SamplingParams, Speculation
from outrider_client.demo.show import totals_table, trace_table
from outrider_client.demo.trace_sink import ReceivedSpan, TraceSink


def shown(renderable: Any) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def span(name: str, span_id: str, parent_id: str, start: int, end: int) -> ReceivedSpan:
    return ReceivedSpan(
        "t", span_id, parent_id, name, "outrider-target", start * 10**6, end * 10**6, {"outrider.steps": 3}
    )


async def test_totals(running: Any) -> None:
    async with Client.connect(running.address) as client:
        sampling = SamplingParams(max_tokens=6)
        drafted = await client.generate(text="x", sampling=sampling).result()
        plain = await client.generate(text="x", sampling=sampling, speculation=Speculation(enabled=False)).result()
        running.target.lie = lambda tokens: [*tokens[:-1], 7]
        wrong = await client.generate(text="x", sampling=sampling).result()
    text = shown(totals_table({"trie": drafted}, plain))
    assert "yes, all 6 tokens" in text and "3.00" in text and "50% 50%" in text
    both = shown(totals_table({"trie": drafted, "trie and EAGLE head": wrong}, plain))
    assert "trie and EAGLE head" in both and "yes, all 6 tokens" in both and "NO" in both


def test_trace_is_indented_below_parents() -> None:
    spans = [
        span("a", "1", "", 10, 30),
        span("b", "2", "1", 11, 15),
        span("c", "3", "2", 12, 13),
        span("d", "4", "9", 20, 21),
    ]
    rows = [line.rstrip() for line in shown(trace_table(spans)).splitlines()]
    names = [row[: len(row) - len(row.lstrip())] + row.split()[0] for row in rows if "target" in row]
    assert names == ["  a", "    b", "      c", "  d"]
    assert any("b" in row and "1.0" in row and "4.0" in row for row in rows)


async def test_sink_receives_what_the_exporter_sends(running: Any) -> None:
    sink = TraceSink()
    await sink.start()
    tracing = set_up_tracing(telemetry.CLIENT, sink.endpoint)
    async with Client.connect(running.address, tracing=tracing) as client:
        result = await client.generate(text="x", sampling=SamplingParams(max_tokens=3)).result()
    await asyncio.to_thread(tracing.shutdown)
    (received,) = await sink.wait(result.trace_id, [telemetry.CLIENT], HUNG_SECONDS)
    await sink.stop()
    assert (received.name, received.service) == (telemetry.GENERATE, telemetry.CLIENT)
    assert received.attributes["gen_ai.usage.output_tokens"] == 3
    assert "3 tokens" in shown(trace_table([received]))


@pytest.mark.model
async def test_the_demo_itself(start_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts three services, which would import for longer than they serve. The target times no steps."""
    monkeypatch.setenv("OUTRIDER_TARGET_ROW_BUDGET", "all")
    python = str(shared_python("services") / "python")
    status, out, err = await start_with("demo", "--max-tokens", "8", python=python)
    assert status == 0, out + err
    assert "yes, all" in out
    for service in ("client", "target", "draft"):
        assert service in out.partition("Trace ")[2]
