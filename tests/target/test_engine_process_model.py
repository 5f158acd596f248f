"""A model behind either arrangement of processes says the same, and the service ends in the same ways."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from forked import Child
from other_weights import other_weights
from waits import HUNG_SECONDS

from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc, tree_pb2

PROMPT = {"token_ids": [10, 20, 30]}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"tokens": PROMPT, "sampling": {"max_tokens": 60, "ignore_eos": True}},
    "again_drafted": {"tokens": PROMPT, "sampling": {"max_tokens": 60, "ignore_eos": True}},
    "sampled": {"tokens": PROMPT, "sampling": {"max_tokens": 60, "temperature": 0.9, "seed": 7}},
    "logprobs": {"text": "open sesame", "sampling": {"max_tokens": 9, "logprobs": 2, "ignore_eos": True}},
    "shaped": {
        "text": "open",
        "sampling": {"max_tokens": 30, "presence_penalty": 1.0, "logit_bias": {40: 3.5}, "min_tokens": 5},
    },
    "form": {
        "text": "open",
        "sampling": {
            "max_tokens": 30,
            "temperature": 1,
            "seed": 3,
            "structured_output": {
                "json_schema": '{"type": "array", "items": {"enum": ["é", 1]}, "minItems": 2, "maxItems": 3}'
            },
        },
    },
    "bad_form": {"text": "open", "sampling": {"structured_output": {"regex": "("}}},
    "stop_tokens": {"tokens": PROMPT, "sampling": {"max_tokens": 200, "stop_token_ids": list(range(100, 160))}},
    "stop_strings": {"tokens": PROMPT, "sampling": {"max_tokens": 200, "stop": ["a", "e", "\u0000", "1", " "]}},
    "endless": {"tokens": PROMPT, "sampling": {"max_tokens": 480, "ignore_eos": True}},
    "too_long": {"tokens": {"token_ids": [5] * 600}},
    "bad_field": {"tokens": PROMPT, "sampling": {"top_p": 3.0}},
    "bad_token": {"tokens": {"token_ids": [5000]}},
}


@dataclass
class Service:
    """A target service as a process, and the address it serves."""

    process: Child
    address: str
    metrics: str

    async def page(self) -> str:
        """What Prometheus would read."""

        def read() -> str:
            with urllib.request.urlopen(self.metrics) as response:
                return str(response.read().decode())

        return await asyncio.to_thread(read)

    async def gave_everything_back(self) -> None:
        """Wait until no page of the KV cache is used, or fail after ten seconds."""
        async with asyncio.timeout(HUNG_SECONDS):
            while 'outrider_kv_pages{state="used"} 0.0' not in await self.page():
                await asyncio.sleep(0.02)

    async def ended_since(self, before: Counter[str], requests: int) -> Counter[str]:
        """How so many requests ended, or fewer after ten seconds: pages come back a moment before they are counted."""
        found = outcomes(await self.page()) - before
        with suppress(TimeoutError):
            async with asyncio.timeout(HUNG_SECONDS):
                while found.total() < requests:
                    await asyncio.sleep(0.02)
                    found = outcomes(await self.page()) - before
        return found


@asynccontextmanager
async def started(folder: Path, arrangement: str, *flags: str) -> AsyncIterator[Service]:
    arguments = ["--model", str(folder), "--dtype", "float32", "--threads", "1", "--served-model-name", "tiny"]
    arguments += ["--listen", "127.0.0.1:0", "--kv-tokens", "4096", "--engine-process", arrangement]
    arguments += ["--draft", "inprocess:trie", "--row-budget", "all", "--metrics-listen", "127.0.0.1:0", *flags]
    with tempfile.TemporaryDirectory() as own:
        log = Path(own, "log")
        log.touch()
        # An engine's process is started by it as always.
        process = Child("target_service", arguments, log)
        await asyncio.to_thread(process.start)
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                while (ready := re.search(r"ready: \S+ on (\S+)\n", log.read_text())) is None:
                    assert process.alive, log.read_text()
                    await asyncio.sleep(0.02)
            metrics = re.search(r"metrics on (\S+)", log.read_text())
            assert metrics is not None
            yield Service(process, ready[1], metrics[1])
        finally:
            await asyncio.to_thread(process.end)


@pytest.fixture(scope="module")
def model_folder(tiny_model: Any, byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


class Near(float):
    """A log-probability: sums of other shapes round otherwise, where a draft came sooner or later."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4


async def said(stub: Any, fields: dict[str, Any]) -> Any:
    """All that a client sees of one answer but how it was cut into chunks, and its times."""
    tokens: list[int] = []
    logprobs: list[Any] = []
    text, finish = "", None
    try:
        async for response in stub.Generate(pb.GenerateRequest(**fields)):
            tokens += response.chunk.token_ids
            text += response.chunk.text
            logprobs += [
                (Near(entry.logprob), [(t.token_id, Near(t.logprob)) for t in entry.top])
                for entry in response.chunk.logprobs
            ]
            if response.HasField("finished"):
                done = response.finished
                finish = (done.finish_reason, done.stop_token_id, done.stop_string, str(done.usage))
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return tokens, text, logprobs, finish


# At leaving an answer before its end.
ATTEMPTS = 20


async def left_after(chunks: int, call: Any) -> None:
    """Hear so many chunks of an answer, then leave."""
    for _ in range(chunks):
        await call.read()
    call.cancel()


def outcomes(page: str) -> Counter[str]:
    """How many requests ended in which way."""
    found = re.findall(r'^outrider_requests_total{outcome="(\w+)"} (\S+)$', page, re.MULTILINE)
    return Counter({outcome: int(float(count)) for outcome, count in found})


async def verified(stub: Any) -> list[list[int]]:
    """What a client that drafts nonsense hears."""
    call = stub.Verify()
    await call.write(pb.VerifyRequest(open=pb.OpenVerification(**PROMPT, sampling={"max_tokens": 20})))
    sequence_id = (await call.read()).opened.sequence_id
    root, heard = PROMPT["token_ids"][-1], []
    for step in range(10):
        tree = tree_pb2.TokenTree(token_ids=[root, *range(40, 50)], parents=[0] * 11)
        await call.write(pb.VerifyRequest(tree=pb.VerifyTree(sequence_id=sequence_id, step=step, tree=tree)))
        verdict = (await call.read()).verdict
        heard.append([*verdict.accepted_rows, -1, *verdict.token_ids])
        root = verdict.token_ids[-1]
    call.cancel()
    return heard


async def all_that_is_said(folder: Path, arrangement: str) -> dict[str, Any]:
    async with started(folder, arrangement) as service:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            heard = {name: await said(stub, fields) for name, fields in REQUESTS.items() if name != "endless"}
            # On a busy machine answers may end by their length before their callers leave.
            for _ in range(ATTEMPTS):
                before = outcomes(await service.page())
                calls = [stub.Generate(pb.GenerateRequest(**REQUESTS["endless"])) for _ in range(4)]
                await asyncio.gather(*(left_after(1, call) for call in calls))
                await service.gave_everything_back()
                met = await service.ended_since(before, 4)
                assert met.total() == met["cancelled"] + met["length"] == 4, met
                if met["cancelled"]:
                    break
            assert met["cancelled"], met
            heard["verified"] = await verified(stub)
            together = await asyncio.gather(*(said(stub, REQUESTS["greedy"]) for _ in range(12)))
        # Texts are read by another process.
        children = service.process.children()
        engines = [child for child in children if "target_service.engine_process" in child.cmdline()]
        service.process.send(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, 20) == 0
    assert len(engines) == (arrangement == "own")
    assert not any(child.is_running() for child in children)
    assert together == [heard["greedy"]] * 12
    return heard


async def test_both_arrangements_say_the_same(model_folder: Path) -> None:
    shared, own = await asyncio.gather(*(all_that_is_said(model_folder, kind) for kind in ("shared", "own")))
    assert own == shared
    assert own["again_drafted"] == own["greedy"]
    assert len(own["greedy"][0]) == 60
    assert own["too_long"][0] is grpc.StatusCode.OUT_OF_RANGE
    assert own["stop_strings"][3][2]


async def ended_by(stub: Any, begin: pb.BeginUpdate) -> tuple[int, Any, list[grpc.StatusCode]]:
    """How many updates it took until one met a request under way, the answer to that one, and how its requests ended.

    Raises:
        AssertionError: None was met by any of the attempts.
    """
    # On a busy machine both answers may end by their length before the weights are read.
    for attempt in range(ATTEMPTS):
        calls = [stub.Generate(pb.GenerateRequest(**REQUESTS["endless"])) for _ in range(2)]
        for call in calls:
            await call.read()
        answer = await stub.UpdateWeights(iter([pb.UpdateWeightsRequest(begin=begin)]))
        codes = await asyncio.gather(*(ending(call) for call in calls))
        if answer.aborted_sequences:
            return attempt + 1, answer, codes
    raise AssertionError(f"no request was under way in any of {ATTEMPTS} updates")


async def ending(call: Any) -> grpc.StatusCode:
    """How a request ends whose answer is heard to the end."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def across_an_update(folder: Path, weights: Path, arrangement: str) -> dict[str, Any]:
    """What is said before an update, by a request that it meets, and after it; and by others that were streamed."""
    flags = ["--weights-folder", str(weights), "--weights-without-token"]
    fields = REQUESTS["greedy"]
    async with started(folder, arrangement, *flags) as service, grpc.aio.insecure_channel(service.address) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        heard = {"before": await said(stub, fields)}
        begin = pb.BeginUpdate(folder="other", running=pb.RUNNING_REQUESTS_ABORT)
        attempts, answer, codes = await ended_by(stub, begin)
        version = answer.model_version
        # The first weights are version 1.
        assert version == 1 + attempts
        assert set(codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}
        assert answer.aborted_sequences == codes.count(grpc.StatusCode.UNAVAILABLE)
        heard["answer"] = answer.tensors, answer.bytes
        heard["after"] = await said(stub, fields)
        assert f"outrider_model_version {version}.0" in await service.page()
        content = (folder / "model.safetensors").read_bytes()
        begin = pb.BeginUpdate(files=pb.WeightFiles(sizes=[len(content)]))
        pieces = [content[at : at + 10**5] for at in range(0, len(content), 10**5)]
        requests = [
            pb.UpdateWeightsRequest(begin=begin),
            *(pb.UpdateWeightsRequest(data=piece) for piece in pieces),
        ]
        assert (await stub.UpdateWeights(iter(requests))).model_version == version + 1
        heard["back"] = await said(stub, fields)
        assert (await stub.GetTargetInfo(pb.GetTargetInfoRequest())).model_version == version + 1
        await service.gave_everything_back()
    return heard


async def test_weights_are_updated_in_both_arrangements(
    model_folder: Path, tiny_model: Any, byte_tokenizer: Any, tmp_path: Path
) -> None:
    other = other_weights(tiny_model)
    other.save_pretrained(tmp_path / "other")
    byte_tokenizer.save_pretrained(tmp_path / "other")
    async with started(tmp_path / "other", "shared") as new, grpc.aio.insecure_channel(new.address) as channel:
        fresh = await said(target_pb2_grpc.TargetServiceStub(channel), REQUESTS["greedy"])
    for arrangement in ("shared", "own"):
        heard = await across_an_update(model_folder, tmp_path, arrangement)
        assert heard["before"] == heard["back"] != fresh
        assert heard["after"] == fresh
        tensors = len(list(other.parameters()))
        assert heard["answer"] == (tensors, sum(one.nbytes for one in other.parameters()))


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--model", "/absent/model"], 1, "cannot serve /absent/model"),
        (["--draft", "inprocess:absent"], 2, "absent"),
        (["--listen", "nowhere"], 2, "cannot listen: 'nowhere' is not HOST:PORT"),
    ],
    ids=["model", "draft", "address"],
)
def test_refusals(model_folder: Path, flags: list[str], status: int, message: str) -> None:
    command = [sys.executable, "-m", "target_service", "--model", str(model_folder), "--kv-tokens", "256"]
    command += ["--threads", "1", "--engine-process", "own", "--listen", "127.0.0.1:0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False)
    assert (ended.returncode, message in ended.stderr) == (status, True), ended.stderr
