"""The programs of docs/coming_from.md, with the clients that they are about, before the real services."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from scripted_service import byte_tokenizer
from sdk.tool_clients import PROGRAMS
from sdk.toolchains import BUILD
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from outrider_client.local.stack import Stack, private_directory
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.server import GatewayServer

# The first test waits for pip and npm.
pytestmark = [pytest.mark.sdk, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

PAGE = (Path(__file__).parents[2] / "docs/coming_from.md").read_text()
SOURCE = Path(__file__).with_name("other_clients")
INSTALLED = BUILD / "other_clients"
PYTHON = INSTALLED / "venv" / "bin"
# What a program of the page is called after: the heading above it.
HEADINGS = {
    "openai of Python": "python", "litellm": "python", "LangChain": "python", "Vercel AI SDK": "js",
    "Pydantic AI": "python", "anthropic of Python": "python",
}  # fmt: skip

# Of all programs.
SETTINGS = {"PYTHONDONTWRITEBYTECODE": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONIOENCODING": "utf-8"}


def section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[0]


def block(heading: str, language: str) -> str:
    """The program below a heading of the page."""
    (program,) = re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)
    return str(program)


@pytest.fixture(scope="session")
def installed() -> Path:
    """A folder with the clients, installed again only where their versions have changed."""
    wanted = "".join((SOURCE / name).read_text() for name in ("requirements.txt", "package-lock.json"))
    stamp = INSTALLED / "stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(INSTALLED, ignore_errors=True)
        shutil.copytree(SOURCE, INSTALLED)
        venv.create(INSTALLED / "venv")
        pip = (sys.executable, "-m", "pip", "--python", str(PYTHON / "python"), "--disable-pip-version-check")
        # What programs import they compile, and it is kept.
        _run(*pip, "install", "--quiet", "--no-compile", "-r", "requirements.txt")
        _run("npm", "ci", "--ignore-scripts")
        stamp.write_text(wanted)
    return INSTALLED


def _run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=INSTALLED, capture_output=True, text=True, timeout=800, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(argv)}\n{done.stdout}{done.stderr}", pytrace=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(services: Any) -> AsyncIterator[GatewayServer]:
    config = GatewayConfig(target=services.target, listen="127.0.0.1:0", drain_seconds=2.0)
    async with GatewayServer(config, AccessOptions()) as server:
        yield server


@pytest.fixture
def here(gateway: GatewayServer, model_folder: Path) -> Any:
    """A text of the page for this gateway and its model, by the short name that works too."""
    return lambda text: text.replace("127.0.0.1:8000", gateway.address).replace(
        "smollm2-135m-instruct", model_folder.name
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def calling(
    tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Callable[[str], str]]:
    """A text of the page for a gateway before random weights that know tools, and write any text."""
    folder, tokenizer = tmp_path_factory.mktemp("calling") / "calling", byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
        '{# <tool_call> "arguments" #}'
    )
    tiny_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with private_directory() as sockets:
        async with Stack(sockets) as stack:
            flags = ("--model", str(folder), "--dtype", "float32", "--threads", "1")
            target = await stack.start("target", "target_service", *flags)
            config = GatewayConfig(target=target, listen="127.0.0.1:0", drain_seconds=2.0)
            async with GatewayServer(config, AccessOptions()) as server:
                yield lambda text: re.sub(
                    "NAME|smollm2-135m-instruct", "calling", text.replace("127.0.0.1:8000", server.address)
                )


async def _said(*argv: str | Path, **environment: str) -> str:
    """What a program prints. Fails with its complaints."""
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=INSTALLED, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **SETTINGS, **environment},
    )  # fmt: skip
    try:
        out, complaints = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, complaints.decode()
    return out.decode()


@pytest.mark.parametrize(("heading", "language"), HEADINGS.items())
async def test_the_pages_programs(installed: Path, here: Any, calling: Any, heading: str, language: str) -> None:
    program = (calling if heading == "Pydantic AI" else here)(block(heading, language))
    if language == "js":
        said = await _said("node", "--input-type=module", "--eval", program)
    else:
        said = await _said(installed / "venv/bin/python", "-c", program)
    assert said.endswith("\n")


@pytest.mark.parametrize("client", PROGRAMS)
async def test_forced_calls(installed: Path, calling: Any, client: str) -> None:
    program = calling(PROGRAMS[client])
    if client == "vercel":
        said = await _said("node", "--input-type=module", "--eval", program)
    else:
        said = await _said(installed / "venv/bin/python", "-c", program)
    lines = [json.loads(line) for line in said.splitlines()]
    assert len(lines) == (1 if client == "pydantic-ai" else 2)
    assert all(line["kind"] in ("whole", "real") for line in lines)


async def test_llm(installed: Path, here: Any, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(here(block("llm", "yaml")))
    words = ("-m", "outrider", "hi", "-s", "be brief", "-o", "max_tokens", "8", "-o", "seed", "3")
    environment = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "unused"}
    said = [await _said(installed / "venv/bin/llm", *words, *more, **environment) for more in ((), ("--no-stream",))]
    assert said[0].strip() and said[0] == said[1]


async def test_the_page_names_the_versions() -> None:
    """Of what is installed here; the others were tried by hand."""
    pins = dict(line.split("==") for line in (SOURCE / "requirements.txt").read_text().split())
    pins |= json.loads((SOURCE / "package.json").read_text())["dependencies"]
    for name, version in pins.items():
        name, short = name.partition("[")[0], ".".join(version.split(".")[:2])
        assert re.search(rf"^## .*\b{re.escape(short)}\b", PAGE, re.MULTILINE), f"{name} {short}"
    assert sys.version_info >= (3, 11)
