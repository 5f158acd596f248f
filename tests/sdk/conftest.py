"""The real services, with a tiny model from disk, and each SDK's conformance program built from its sources."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import json_format
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.v1 import target_pb2 as pb
from outrider_client.local.stack import Stack, private_directory

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "clients"
GO_WORKSPACE = ROOT / "build" / "go"
CASE_SECONDS = 60.0


@dataclass(frozen=True)
class Toolchain:
    """How one language's SDK is built, run and generated."""

    language: str
    # Where it is built, and with which environment.
    folder: Path
    environment: dict[str, str]
    conformance: tuple[str, ...]
    example: tuple[str, ...]
    build: tuple[tuple[str, ...], ...]
    generate: tuple[str, ...]
    generated: str

    def run(self, *argv: str, folder: Path | None = None) -> None:
        """Run a build step, and fail with what it printed."""
        where = folder or self.folder
        done = subprocess.run(argv, cwd=where, env=self.environment, capture_output=True, text=True, timeout=280)
        if done.returncode:
            pytest.fail(f"{' '.join(argv)}\n{done.stdout}{done.stderr}", pytrace=False)


def typescript() -> Toolchain:
    folder = CLIENTS / "typescript"
    installed = folder / "node_modules" / ".package-lock.json"
    fresh = installed.exists() and installed.stat().st_mtime >= (folder / "package-lock.json").stat().st_mtime
    install = () if fresh else (("npm", "ci", "--ignore-scripts"),)
    return Toolchain(
        language="typescript",
        folder=folder,
        environment=_environment(str(folder / "node_modules" / ".bin")),
        conformance=("node", str(folder / "dist" / "conformance" / "main.js")),
        example=("node", str(folder / "dist" / "examples" / "chat.js")),
        build=(*install, ("npm", "run", "build")),
        generate=("buf", "generate", str(ROOT), "--template", "buf.gen.yaml"),
        generated="src/gen",
    )


def go() -> Toolchain:
    """Debian's Go libraries are a GOPATH; the SDK is linked into one of its own under its import path."""
    link = GO_WORKSPACE / "src" / "outrider" / "clients" / "go"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(CLIENTS / "go", target_is_directory=True)
    programs = {name: str(GO_WORKSPACE / "bin" / name) for name in ("conformance", "chat")}
    paths = {"GOPATH": f"{GO_WORKSPACE}:/usr/share/gocode", "PWD": str(link)}
    return Toolchain(
        language="go",
        folder=link,
        environment=_environment() | {"GO111MODULE": "off", "GOFLAGS": ""} | paths,
        conformance=(programs["conformance"],),
        example=(programs["chat"],),
        build=(
            ("go", "build", "-o", programs["conformance"], "./conformance"),
            ("go", "build", "-o", programs["chat"], "./examples/chat"),
            ("go", "vet", "./..."),
        ),
        generate=("buf", "generate", str(ROOT), "--template", "buf.gen.yaml", "--path", str(ROOT / "protos/outrider")),
        generated="outriderv1",
    )


def _environment(*folders: str) -> dict[str, str]:
    """The process's own, with programs of these folders and of this Python's first."""
    path = os.pathsep.join([*folders, str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path}


@dataclass(frozen=True)
class Services:
    """Where the draft, the target and the target's metrics answer."""

    target: str
    draft: str
    metrics: str

    def gauge(self, name: str) -> float:
        """The value of one series, labels included in its name."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=5) as page:
            found = re.search(rf"^{re.escape(name)} (\S+)$", page.read().decode(), re.MULTILINE)
        assert found is not None, f"no series {name}"
        return float(found[1])

    async def until(self, name: str, value: float) -> None:
        """Wait until a series has this value, or fail after five seconds."""
        async with asyncio.timeout(5):
            while await asyncio.to_thread(self.gauge, name) != value:
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        """Wait until nothing runs or waits and no page is in use, or fail after five seconds."""
        for name in ("outrider_requests_running", "outrider_requests_waiting", 'outrider_kv_pages{state="used"}'):
            await self.until(name, 0)


@dataclass(frozen=True)
class Sdk:
    """One language's programs, and the services they speak to."""

    toolchain: Toolchain
    services: Services

    async def run(self, case: str, request: pb.GenerateRequest | None = None, **fields: Any) -> Any:
        """The case's result. Fails with the program's own message when it fails."""
        given = {"target": self.services.target, "draft": self.services.draft} | fields
        if request is not None:
            given["request"] = json_format.MessageToDict(request)
        return json.loads(await self._output(*self.toolchain.conformance, case, given=json.dumps(given)))

    async def run_example(self) -> str:
        """What the example prints."""
        return await self._output(*self.toolchain.example, self.services.target)

    async def _output(self, *argv: str, given: str = "") -> str:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(given.encode()), CASE_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode == 0, err.decode()
        return out.decode()


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def services(model_folder: Path) -> AsyncIterator[Services]:
    """A draft and a target process on Unix sockets."""
    metrics = f"127.0.0.1:{free_port()}"
    with private_directory() as sockets:
        async with Stack(sockets) as stack:
            draft = await stack.start("draft", "draft_service")
            flags = ("--dtype", "float32", "--threads", "1", "--kv-tokens", "8192", "--metrics-listen", metrics)
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
    for argv in toolchain.build:
        toolchain.run(*argv)
    return toolchain


@pytest.fixture
def sdk(toolchain: Toolchain, services: Services) -> Sdk:
    return Sdk(toolchain, services)
