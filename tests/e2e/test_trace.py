"""One trace per request across client, target and draft: real servers, real OTLP, one receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from draft_harness import build_server
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from draft_service.config import DraftConfig
from draft_service.drafters.base import create
from outrider.sampling import SamplingParams
from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import set_up_tracing
from outrider_client import Client
from outrider_client.demo.trace_sink import ReceivedSpan, TraceSink
from target_service.config import TargetConfig
from target_service.lifecycle import serve_engine
from target_service.shared_engine import SharedEngine

# Token ids that no count, size or time in a span comes near.
PROMPT = [198, 197, 196] * 7
SERVICES = (telemetry.CLIENT, telemetry.TARGET_SERVICE, telemetry.DRAFT_SERVICE)


@asynccontextmanager
async def draft(path: Path, sink: TraceSink) -> AsyncIterator[str]:
    drafter = create("prompt_lookup")
    drafter.start()
    tracing = set_up_tracing(telemetry.DRAFT_SERVICE, sink.endpoint)
    server, _ = build_server(DraftConfig(listen=f"unix:{path}"), drafter, tracing=tracing)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)
        await asyncio.to_thread(tracing.shutdown)
        drafter.stop()


@asynccontextmanager
async def target(model: Any, config: TargetConfig) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    runner = runner_for(model, None, num_pages=64, page_size=16, name="tiny")
    running = asyncio.create_task(serve_engine(config, SharedEngine(config, runner), stopping))
    try:
        yield
    finally:
        stopping.set()
        assert await running == 0


@asynccontextmanager
async def receiver() -> AsyncIterator[TraceSink]:
    sink = TraceSink()
    await sink.start()
    try:
        yield sink
    finally:
        await sink.stop()


async def traced_request(client: Client) -> str:
    """Generate until the draft has connected and was of use; the trace id of that request."""
    async with asyncio.timeout(HUNG_SECONDS):
        while True:
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            result = await client.generate(token_ids=PROMPT, sampling=sampling).result()
            if result.speculation.drafted_tokens:
                return result.trace_id


def tree(spans: list[ReceivedSpan]) -> dict[tuple[str, str], tuple[str, str] | None]:
    """(service, name) of every span, with that of its parent."""
    names = {span.span_id: (span.service, span.name) for span in spans}
    return {(span.service, span.name): names.get(span.parent_id) for span in spans}


async def one_trace(model: Any, folder: Path, steps: bool) -> list[ReceivedSpan]:
    """The spans of one request of which every service has sent its part."""
    async with receiver() as sink:
        config = TargetConfig(
            listen=f"unix:{folder}/target",
            draft=f"unix:{folder}/draft",
            draft_wait_ms=2000.0,
            row_budget="all",
            otlp_endpoint=sink.endpoint,
            trace_steps=steps,
            drain_seconds=60.0,
        )
        tracing = set_up_tracing(telemetry.CLIENT, sink.endpoint)
        async with draft(folder / "draft", sink), target(model, config):
            async with Client.connect(config.listen, tracing=tracing) as client:
                async with asyncio.timeout(HUNG_SECONDS):
                    while not ((folder / "target").exists() and await client.serving(HUNG_SECONDS)):
                        await asyncio.sleep(0.05)
                trace_id = await traced_request(client)
            await asyncio.to_thread(tracing.shutdown)
        return await sink.wait(trace_id, SERVICES, timeout=HUNG_SECONDS)


@pytest.mark.parametrize("steps", [False, True], ids=["totals", "with steps"])
async def test_one_trace_across_three_services(tiny_model: Any, tmp_path: Path, steps: bool) -> None:
    spans = await one_trace(tiny_model, tmp_path, steps)
    client_span = (telemetry.CLIENT, telemetry.GENERATE)
    request_span = (telemetry.TARGET_SERVICE, telemetry.GENERATE)
    names = [telemetry.QUEUE, telemetry.PREFILL, telemetry.DECODE, *([telemetry.STEP] if steps else [])]
    assert tree(spans) == {
        client_span: None,
        request_span: client_span,
        (telemetry.DRAFT_SERVICE, telemetry.DRAFT_SEQUENCE): request_span,
        **{(telemetry.TARGET_SERVICE, name): request_span for name in names},
    }
    by_name = {(span.service, span.name): span for span in spans}
    whole, drafted = by_name[request_span], by_name[telemetry.DRAFT_SERVICE, telemetry.DRAFT_SEQUENCE]
    assert whole.attributes["rpc.response.status_code"] == "OK"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 24
    assert drafted.attributes["outrider.sequence_id"] == whole.attributes["outrider.sequence_id"]
    assert drafted.attributes["outrider.drafter"] == "prompt_lookup"
    phases = [span for span in spans if span.parent_id == whole.span_id and span is not drafted]
    assert all(whole.start_ns <= span.start_ns and span.end_ns <= whole.end_ns for span in phases)
    said = {str(token) for token in PROMPT}
    assert not any(str(value) in said for span in spans for value in span.attributes.values())
