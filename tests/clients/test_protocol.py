"""The examples of docs/protocol.md, run as they stand against a real target with a tiny model and a real draft."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from draft_harness import build_server
from scripted_service import model_tokenizer
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from draft_service.config import DraftConfig
from draft_service.drafters.base import create
from outrider.errors import all_errors
from outrider.sampling import MAX_LOGPROBS
from outrider.serving.calls import MAX_METADATA_BYTES
from outrider.settings import MAX_MESSAGE_BYTES
from outrider.tree import MAX_DISTRIBUTION_SUPPORT, MAX_DISTRIBUTION_WEIGHT
from outrider.v1 import draft_pb2, target_pb2, tree_pb2
from outrider.wire.frames import MAX_CLOSED_PER_FRAME, MAX_OUTSTANDING_CREDIT, MAX_SEQUENCES_PER_FRAME
from outrider_client import Client, Policy, ServiceUnreachable
from target_service.api.admission import DEFAULT_MAX_TOKENS
from target_service.config import TargetConfig
from target_service.lifecycle import serve_engine
from target_service.shared_engine import SharedEngine

_ROOT = Path(__file__).parents[2]
_CONTRACT = (draft_pb2, target_pb2, tree_pb2)
_PAGE = (_ROOT / "docs/protocol.md").read_text()
_EXAMPLES = ("raw_generate", "raw_verify", "raw_rejection", "raw_propose")


@asynccontextmanager
async def drafting(address: str) -> AsyncIterator[str]:
    drafter = create("prompt_lookup")
    drafter.start()
    server, _ = build_server(DraftConfig(listen=address), drafter)
    await server.start()
    server.health.set_serving(True)
    try:
        yield server.address
    finally:
        await server.stop(0)
        drafter.stop()


@pytest.fixture
async def target(tiny_model: Any, tmp_path: Path) -> AsyncIterator[str]:
    """Address of a target with a model of random weights, and a draft beside it."""
    async with served(tiny_model, tmp_path, f"unix:{tmp_path}/target") as address:
        yield address


@asynccontextmanager
async def served(model: Any, folder: Path, listen: str) -> AsyncIterator[str]:
    stopping = asyncio.Event()
    runner = runner_for(model, model_tokenizer(), num_pages=64, page_size=16, name="tiny")
    async with drafting(f"unix:{folder}/draft") as draft:
        config = TargetConfig(listen=listen, draft=draft, drain_seconds=60.0, reflection=True)
        running = asyncio.create_task(serve_engine(config, SharedEngine(config, runner), stopping))
        async with Client.connect(config.listen) as client, asyncio.timeout(HUNG_SECONDS):
            while not await is_serving(client):
                await asyncio.sleep(0.05)
        try:
            yield config.listen
        finally:
            stopping.set()
            assert await running == 0


async def is_serving(client: Client) -> bool:
    try:
        return await client.serving(HUNG_SECONDS)
    except ServiceUnreachable:
        return False


def typed(program: str) -> list[str]:
    """The page's commands of a program."""
    blocks = re.findall(r"```\n(.*?)```", _PAGE, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0] for line in lines if line.startswith(f"{program} ")]


@pytest.mark.parametrize("program", ["buf", "grpcurl"])
async def test_the_page_is_true_of_tools(program: str, tiny_model: Any, tmp_path: Path, unused_tcp_port: int) -> None:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(program, path=beside)
    if found is None:
        pytest.skip(f"{program} is not installed")
    said = []
    async with served(tiny_model, tmp_path, f"127.0.0.1:{unused_tcp_port}") as address:
        for line in typed(program):
            _, *words = shlex.split(line.replace("127.0.0.1:50051", address))
            process = await asyncio.create_subprocess_exec(
                found, *words, cwd=_ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            out, _ = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
            assert process.returncode == 0, (line, out.decode())
            said.append(out.decode())
    listed, health, info, generated = said
    assert "outrider.v1.TargetService" in listed and '"SERVING"' in health
    # Random weights may end their text at any token.
    assert '"tiny"' in info and '"finished"' in generated and '"completionTokens"' in generated


def example(name: str) -> str:
    return (_ROOT / f"clients/python/{name}.py").read_text()


async def run(name: str, address: str) -> list[str]:
    """What the example writes, line by line, at this address instead of its own."""
    source, places = re.subn(r"127\.0\.0\.1:5005[12]", address, example(name))
    assert places == 1
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert process.returncode == 0, out.decode()
    return out.decode(errors="replace").splitlines()


def shown(name: str) -> list[str]:
    """What the page says that an example writes: the block behind the example's own."""
    _, _, behind = _PAGE.partition(example(name))
    found = re.search(r"```text\n(.*?)```", behind, re.DOTALL)
    assert found is not None
    return found.group(1).splitlines()


@pytest.mark.parametrize("name", _EXAMPLES)
def test_the_page_shows_the_example_as_it_is(name: str) -> None:
    assert f"```python\n{example(name)}```" in _PAGE
    # Whoever reads the page has no SDK.
    assert "outrider_client" not in example(name)


async def test_generate(target: str) -> None:
    first, *_, count, drafted, refused, ended = await run("raw_generate", target)
    assert re.fullmatch(r"seed 7, \d+ prompt tokens", first)
    assert re.fullmatch(r"\d+ tokens, FINISH_REASON_(LENGTH|END_OF_SEQUENCE)", count)
    assert re.fullmatch(r"\d+ of them were drafted", drafted)
    assert [refused, ended] == shown("raw_generate")[-2:]


async def test_verify(target: str) -> None:
    assert await run("raw_verify", target) == shown("raw_verify")


async def test_rejection(target: str) -> None:
    (line,) = await run("raw_rejection", target)
    assert re.fullmatch(r"8 tokens in [1-8] steps", line)


async def test_propose() -> None:
    async with drafting("127.0.0.1:0") as address:
        assert await run("raw_propose", address) == shown("raw_propose")


def test_errors_are_those_that_there_are() -> None:
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \| ([A-Za-z_ ]+) \| .* \|$", _PAGE, re.MULTILINE)
    codes = {reason: code for reasons, code in rows for reason in re.findall(r"[A-Z_]+", reasons)}
    assert codes.pop("INTERNAL") == "INTERNAL"
    assert codes.keys() == {kind.reason for kind in all_errors()}
    for kind in all_errors():
        assert codes[kind.reason] in (kind.code.name, "the same")
        assert codes[kind.reason] != "the same" or kind.reason == kind.code.name


def test_fields_that_are_named_are_there() -> None:
    # Metadata, packages, and the names that health knows beside the services'.
    known = {"authorization", "default", "traceparent", "outrider", "google", "rpc", "liveness", "readiness"}
    for module in _CONTRACT:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            known |= {message.name, *message.fields_by_name, *message.oneofs_by_name}
        for service in module.DESCRIPTOR.services_by_name.values():
            known |= {service.name, *service.methods_by_name}
    prose = re.sub(r"```.*?```", "", _PAGE, flags=re.DOTALL)
    named = re.findall(r"`([a-z][a-z_.]+)(?:\[i\])?`", prose)
    assert len(named) > 40
    assert [name for name in named if not set(name.split(".")) <= known] == []


def test_limits_are_those_of_the_services() -> None:
    config = TargetConfig()
    for said in (
        f"The target listens on {config.listen} and the draft on {DraftConfig().listen}",
        f"a service takes {MAX_MESSAGE_BYTES >> 20} MiB",
        f"at most {MAX_OUTSTANDING_CREDIT:,} outstanding",
        f"At most {MAX_SEQUENCES_PER_FRAME} sequences a frame",
        f"at most {MAX_CLOSED_PER_FRAME:,} a frame",
        f"{config.max_sequences_per_stream} may be open on a stream",
        f"no tree for {config.verify_idle_seconds:g} s is ended",
        f"at most {MAX_DISTRIBUTION_SUPPORT} tokens, and integer weights up to {MAX_DISTRIBUTION_WEIGHT:,}",
        f"at most {MAX_METADATA_BYTES >> 10} KiB",
        f"up to {DEFAULT_MAX_TOKENS:,} tokens or what the context leaves",
        f"The SDKs take {Policy().call_timeout:g} s for one answer and {Policy().generate_timeout:g} s",
        f"up to {MAX_LOGPROBS} for as many alternatives",
    ):
        assert said in _PAGE
