"""The stack on a real Docker engine: what it serves, how it is locked in, and that every query people see has data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from compose_stack import SERVICES, ComposeStack, StackFailed, healthy, run
from dashboard import METRIC, alerts, answerable, queries, rules
from waits import HUNG_SECONDS, wait_until

from outrider.errors import InvalidField
from outrider.ports import free_port
from outrider.sampling import SamplingParams
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider_client import Client, Speculation
from outrider_client.results import Result

pytestmark = [pytest.mark.compose]

# Repeats itself, so that the trie has something to draft; short enough for two cores.
PROMPT = "one two three four five six seven eight nine ten, " * 4
TRACEPARENT = "00-5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e-5ca1ab1e5ca1ab1e-01"
# Rates need a few scrapes on both sides of the traffic.
TRAFFIC_SECONDS = 40.0
# Of the 30 that a target drains for: long enough for compose to begin, short enough for a machine that slows down.
DRAINED_SECONDS = 10.0


def free_ports() -> tuple[int, int]:
    """Two neighbours."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first, first + 1


def make_stack() -> ComposeStack | str:
    """The stack, not yet up, or why there cannot be one."""
    try:
        return ComposeStack()
    except StackFailed as reason:
        return str(reason)


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    running = make_stack()
    if isinstance(running, str):
        pytest.fail(running, pytrace=False)
    try:
        running.up()
        yield running
    finally:
        running.down()


async def generate(port: int, max_tokens: int = 24, prompt: str = PROMPT) -> Result:
    async with Client.connect(f"127.0.0.1:{port}") as client:
        return await client.generate(text=prompt, sampling=SamplingParams(max_tokens=max_tokens)).result()


async def traffic(port: int, until: float) -> None:
    """Requests that end, one that is cancelled, one that is refused, and one that is traced, over and over."""
    address = f"127.0.0.1:{port}"
    async with Client.connect(address) as client, grpc.aio.insecure_channel(address) as channel:
        traced: Any = target_pb2_grpc.TargetServiceStub(channel)
        while time.monotonic() < until:
            await client.generate(text=PROMPT, sampling=SamplingParams(max_tokens=16)).result()
            async with client.generate(text=PROMPT, sampling=SamplingParams(max_tokens=64)) as generation:
                async for _ in generation:
                    break
            with pytest.raises(InvalidField):
                await client.generate(text=PROMPT, sampling=SamplingParams(temperature=math.nan)).result()
            request = target_pb2.GenerateRequest(text=PROMPT)
            request.sampling.max_tokens = 4
            async for _ in traced.Generate(request, metadata=[("traceparent", TRACEPARENT)]):
                pass


@pytest.fixture(scope="module")
def after_traffic(stack: ComposeStack) -> ComposeStack:
    """The stack once Prometheus has scraped some traffic, and has evaluated its rules on it."""
    asyncio.run(traffic(stack.port, time.monotonic() + TRAFFIC_SECONDS))
    wait_until(lambda: stack.values("outrider:acceptance_by_depth:rate5m >= 0"))
    return stack


def test_a_generation_through_the_published_port_is_drafted_for(stack: ComposeStack) -> None:
    def is_drafted_for() -> bool:
        result = asyncio.run(generate(stack.port))
        assert result.completion_tokens == 24
        assert result.text
        return result.speculation.accepted_tokens > 0

    # On a busy machine the first passes may take so long that drafts do not pay yet.
    wait_until(is_drafted_for)


def test_the_gateway_answers_through_its_port(stack: ComposeStack) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.http_port}/v1/completions",
        json.dumps({"prompt": PROMPT, "max_tokens": 8}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]


def test_containers_have_the_limits_that_are_asked_for(stack: ComposeStack) -> None:
    hosts = {service: stack.inspect(service)["HostConfig"] for service in SERVICES}
    assert {service: host["NanoCpus"] for service, host in hosts.items()} == {
        **dict.fromkeys(SERVICES, 0),
        "target": 1_500_000_000,
        "draft": 1_250_000_000,
    }
    assert {service: host["Memory"] for service, host in hosts.items()} == {
        "target": 6 << 30,
        "draft": 2 << 30,
        "gateway": 1 << 30,
        "prometheus": 0,
    }


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_locked_in(stack: ComposeStack, service: str) -> None:
    found = stack.inspect(service)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["RestartPolicy"]["Name"] == "on-failure"
    assert host["PidsLimit"] == 512
    assert found["Config"]["User"] not in ("", "0", "root")
    bindings = [binding for port in (host["PortBindings"] or {}).values() for binding in port]
    assert {binding["HostIp"] for binding in bindings} <= {"127.0.0.1"}


def test_prometheus_scrapes_every_service(after_traffic: ComposeStack) -> None:
    assert after_traffic.values('up{job=~"outrider-(target|draft|gateway)"}') == [1.0] * 3


@pytest.mark.parametrize("title", queries())
def test_every_panel_has_data(after_traffic: ComposeStack, title: str) -> None:
    query = queries()[title]
    values = after_traffic.values(query)
    assert values, f"{query} returns nothing"
    if all(math.isnan(value) for value in values):
        # A share of nothing: what it counts is there, and happens on a GPU alone.
        counted = {name: after_traffic.values(f"sum({name})") for name in METRIC.findall(query)}
        assert all(counted.values()), f"{query} asks for what is not there: {counted}"
        assert [0.0] in counted.values(), f"{query} returns NaN only"


@pytest.mark.parametrize("name", [rule["record"] for rule in rules() if "record" in rule])
def test_every_recorded_ratio_has_data(after_traffic: ComposeStack, name: str) -> None:
    values = after_traffic.values(name)
    assert values
    # Rates are extrapolated to the window's ends, each by itself, so a share can come out a little above one.
    limit = 64.0 if "length" in name else 1.1
    assert all(0.0 <= value <= limit for value in values if not math.isnan(value))


@pytest.mark.parametrize("name", alerts())
def test_every_alert_has_data_to_judge_by(after_traffic: ComposeStack, name: str) -> None:
    for judged in answerable(alerts()[name]):
        assert after_traffic.values(judged), f"{judged} of {alerts()[name]} judges nothing"


def test_no_alert_fires_on_a_healthy_stack(after_traffic: ComposeStack) -> None:
    pages = [
        alert["labels"]["alertname"]
        for alert in after_traffic.prometheus("alerts")["alerts"]
        if alert["labels"]["severity"] == "page" and alert["state"] == "firing"
    ]
    assert pages == []


def test_latency_buckets_carry_trace_ids(after_traffic: ComposeStack) -> None:
    def ids() -> set[str]:
        now = time.time()
        found = after_traffic.prometheus(
            "query_exemplars",
            query="outrider_time_to_first_token_seconds_bucket",
            start=str(now - 300),
            end=str(now),
        )
        return {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}

    # The traced request may have been the last, and the next scrape is to come.
    wait_until(ids)
    assert TRACEPARENT.split("-")[1] in ids()


def test_a_stopped_draft_shows_and_harms_nothing(after_traffic: ComposeStack) -> None:
    stack = after_traffic
    before = asyncio.run(generate(stack.port))
    stack.compose("stop", "draft")
    without = asyncio.run(generate(stack.port))
    assert without.token_ids == before.token_ids
    wait_until(lambda: stack.values("outrider_draft_connected") == [0.0])
    stack.compose("start", "draft")
    stack.wait_until_healthy("draft")


def test_one_of_two_drafts_is_enough(after_traffic: ComposeStack) -> None:
    """`--scale draft=2`: whichever the target is connected to, the other takes over when it is stopped."""
    stack = after_traffic
    stack.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "draft=2", "draft")
    stack.wait_until_healthy("draft")
    both = [container["Name"].removeprefix("/") for container in stack.containers("draft")]
    assert len(both) == 2
    # Each has a snapshot of its own.
    said = [re.findall(r"tries are kept in (\S+),", run("docker", "logs", name, errors=True)) for name in both]
    assert sorted(files[-1] for files in said) == [f"/var/lib/outrider/tries{end}.safetensors" for end in ("-2", "")]
    for stopped in both:
        run("docker", "stop", stopped)
        assert asyncio.run(generate(stack.port)).speculation.accepted_tokens > 0
        run("docker", "start", stopped)
        stack.wait_until_healthy("draft")


def test_each_of_two_targets_has_a_port(after_traffic: ComposeStack) -> None:
    """`--scale target=2` with a range of ports; what runs already keeps its own."""
    stack, (first, last) = after_traffic, free_ports()
    up = ("up", "--detach", "--no-build", "--no-recreate", "--no-deps")
    stack.compose(*up, "--scale", "target=2", "target", OUTRIDER_PORT=f"{first}-{last}")
    stack.wait_until_healthy("target")
    published = [container["NetworkSettings"]["Ports"]["50051/tcp"][0] for container in stack.containers("target")]
    assert len(published) == 2 and {port["HostIp"] for port in published} == {"127.0.0.1"}
    ports = {int(port["HostPort"]) for port in published}
    assert stack.port in ports and len(ports & {first, last}) == 1
    for port in ports:
        assert asyncio.run(generate(port)).completion_tokens == 24
    stack.compose(*up, "--scale", "target=1", "target")
    assert len(stack.containers("target")) == 1


def test_a_target_starts_without_its_draft(after_traffic: ComposeStack) -> None:
    """One that never becomes healthy; the target finds the next."""
    stack = after_traffic
    stack.compose("rm", "--stop", "--force", "target", "draft", timeout=HUNG_SECONDS)
    stack.compose("up", "--detach", "--no-build", "draft", "target", OUTRIDER_DRAFTER="absent")
    stack.wait_until_healthy("target")
    assert asyncio.run(generate(stack.port)).speculation.accepted_tokens == 0
    assert not all(map(healthy, stack.containers("draft")))
    stack.compose("up", "--detach", "--no-build", "--no-deps", "draft")
    stack.wait_until_healthy("draft", "target")
    wait_until(lambda: asyncio.run(generate(stack.port)).speculation.accepted_tokens)


def test_a_stopped_target_finishes_what_it_began(after_traffic: ComposeStack) -> None:
    """Last: nothing answers afterwards. Plain decoding, whose pace tells how much can end while the target drains."""
    stack, first, ended = after_traffic, threading.Event(), []

    async def read(max_tokens: int) -> None:
        async with Client.connect(f"127.0.0.1:{stack.port}") as client:
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            generation = client.generate(text=PROMPT, sampling=sampling, speculation=Speculation(enabled=False))
            async for _ in generation:
                first.set()
            ended.append((await generation.result(), time.monotonic()))

    begun = time.monotonic()
    asyncio.run(read(16))
    tokens = min(max(int(16 * DRAINED_SECONDS / (time.monotonic() - begun)), 16), 2048)
    first.clear()
    client = threading.Thread(target=lambda: asyncio.run(read(tokens)))
    client.start()
    assert first.wait(HUNG_SECONDS)
    stopped = time.monotonic()
    stack.compose("stop", "target", timeout=HUNG_SECONDS)
    client.join(timeout=HUNG_SECONDS)
    assert [result.completion_tokens for result, _ in ended] == [16, tokens]
    assert ended[1][1] > stopped + 1, "it ended before the target was told to stop"
    assert stack.inspect("target")["State"]["ExitCode"] == 0
