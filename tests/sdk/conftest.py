"""The real services, with a tiny model from disk, and each SDK's conformance program built from its sources."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import json_format
from sdk.toolchains import BUILDS, Toolchain, go, typescript
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from waits import HUNG_SECONDS

from outrider.ports import free_port
from outrider.v1 import target_pb2 as pb
from outrider_client.local.stack import Stack, private_directory


@dataclass(frozen=True)
class Services:
    """Where the draft, the target and the target's metrics answer."""

    target: str
    draft: str
    metrics: str

    def gauge(self, name: str) -> float:
        """The value of one series, labels included in its name."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=HUNG_SECONDS) as page:
            found = re.search(rf"^{re.escape(name)} (\S+)$", page.read().decode(), re.MULTILINE)
        assert found is not None, f"no series {name}"
        return float(found[1])

    async def until(self, name: str, value: float) -> None:
        """Wait until a series has this value, or fail."""
        async with asyncio.timeout(HUNG_SECONDS):
            while await asyncio.to_thread(self.gauge, name) != value:
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        """Wait until nothing runs or waits and no page is in use, or fail."""
        for name in ("outrider_requests_running", "outrider_requests_waiting", 'outrider_kv_pages{state="used"}'):
            await self.until(name, 0)


@dataclass(frozen=True)
class Sdk:
    """One language's programs, and the services they speak to."""

    toolchain: Toolchain
    services: Services

    async def run(self, case: str, request: pb.GenerateRequest | None = None, **fields: Any) -> Any:
        """The case's result. Fails with the program's own message when it fails."""
        # Of a call, where the case reads it: the SDKs' own ten seconds may pass on a busy machine.
        limit = {"timeoutMs": int(1000 * HUNG_SECONDS)}
        given = {"target": self.services.target, "draft": self.services.draft} | limit | fields
        if request is not None:
            given["request"] = json_format.MessageToDict(request)
        return json.loads(await self._output(*self.toolchain.conformance, case, given=json.dumps(given)))

    async def run_example(self, name: str, *arguments: str) -> tuple[int, str, str]:
        """How an example ends, and what it prints on standard output and on standard error."""
        return await self._ended(*self.toolchain.examples[name], *arguments)

    async def _output(self, *argv: str, given: str = "") -> str:
        status, out, err = await self._ended(*argv, given=given)
        assert status == 0, err
        return out

    async def _ended(self, *argv: str, given: str = "") -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(given.encode()), HUNG_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        return process.returncode or 0, out.decode(), err.decode()


def letter_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters: ids 0 to 2 are special, then printable ASCII, then other letters."""
    letters = [*map(chr, range(0x20, 0x7F)), *map(chr, range(0xA1, 0x1000))]
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {letter: 3 + i for i, letter in enumerate(letters[: vocabulary_size - 3])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    return fast


@pytest.fixture(scope="session")
def model_folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save_pretrained(folder)
    letter_tokenizer(tiny_model.config.vocab_size).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def services(model_folder: Path) -> AsyncIterator[Services]:
    """A draft and a target process on Unix sockets."""
    metrics = f"127.0.0.1:{free_port()}"
    with private_directory() as sockets:
        async with Stack(sockets) as stack:
            draft = await stack.start("draft", "draft_service")
            flags = ("--dtype", "float32", "--threads", "1", "--kv-tokens", "8192", "--metrics-listen", metrics)
            # A tiny model is faster than any draft: without these nothing might be drafted.
            flags += ("--row-budget", "all", "--draft-wait-ms", "1000")
            target = await stack.start(
                "target", "target_service", "--model", str(model_folder), "--draft", draft, *flags
            )
            running = Services(target, draft, metrics)
            await running.until("outrider_draft_connected", 1)
            yield running


@pytest.fixture(scope="session", params=[typescript, go], ids=lambda make: make.__name__)
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    """A language whose SDK has been built."""
    toolchain: Toolchain = request.param()
    BUILDS[toolchain.language](toolchain)
    return toolchain


@pytest.fixture
def sdk(toolchain: Toolchain, services: Services) -> Sdk:
    return Sdk(toolchain, services)
