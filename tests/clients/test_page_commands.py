"""Every command of the pages, run as it stands but for its addresses, models, sizes and files.

`make test` runs blocks that together have every command with every drafter and mode, and `make test-full` all. That
their flags are the commands' own is what `test_pages.py` tells of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from conftest import make_tiny
from grpc_health.v1 import health_pb2, health_pb2_grpc
from medusa_heads import make_heads
from mtp_modules import module_weights
from page_commands import ROOT, Block, blocks, not_commands, programs
from pairs import covering
from safetensors.torch import load_file, save_file
from taught_heads import HIDDEN, KINDS, LAYERS, MTP, new_head
from teaching_model import VOCABULARY, chat_tokenizer
from waits import HUNG_SECONDS
from warm_python import shared_python

from draft_service.eagle.checkpoint import save_head
from draft_service.medusa.checkpoint import save_heads
from outrider.errors import OutriderError
from outrider.ports import free_port
from outrider_client import ServiceUnreachable, SyncClient

# What is not run here, by how it begins, and why. A command that is neither here nor run fails.
NOT_RUN = {
    r"(OUTRIDER_\S+ |COMPOSE_\S+ )*docker ": "needs a Docker engine; tests/stack/test_compose.py runs the stack",
    r"(OUTRIDER_\S+ |COMPOSE_\S+ )*make up": "needs a Docker engine; tests/stack/test_up.py, and test_compose.py there",
    "kubectl ": "needs a cluster; tests/stack/test_kubernetes.py renders and validates what is applied",
    "make (?!up)": "starts tests, lint and measurements; .ci/run and tests/clients/test_demo.py have those of a CPU",
    "pip install": "installs, from a package index; tests/install/test_roles.py installs each role",
    "go |npm ": "needs the toolchains; tests/sdk/test_sources.py runs what the pages of TypeScript and Go show",
    "vllm ": "needs vLLM and GPUs; tests/proposer/test_readme.py runs the page's program over a stand-in",
    r"OPENAI_\S+ .*aider |python -m sglang|lm_eval ": "others' programs, tried by hand; "
    "tests/sdk/test_other_clients.py runs what the page shows",
    "buf |grpcurl ": "tests/clients/test_protocol.py runs them",
    "curl ": "tests/gateway/test_docs.py runs them",
    r"python -P$|outrider up --model \.$": "how processes start, and what that keeps out; "
    "tests/protos/test_python_commands.py",
    "ss |nvidia-smi": "shows what a machine has, and is no part of Outrider",
    r"python -m benchmarks\.serving\.wrong_prediction": "asks for the processor's time of what it starts, "
    "which is a stand-in here; tests/benchmarks/test_wrong_prediction.py",
    r"python -m chaos\.": "takes minutes; make test-chaos runs it",
    "python -m benchmarks.<folder>": "stands for every script; test_every_benchmark_says_how_it_is_run asks each",
    r"python -m benchmarks\.(kernels\.(tree_attention|verification|latent_attention|latent_writing)|engine\.steps)": ""
    "needs a GPU",
    r"python -m benchmarks\.widened\.run": "needs a model of 8B cost; tests/benchmarks/test_widened.py runs a tiny one",
    r"outrider bench .*,transformers": "spawns a process, which the stand-in for python cannot; run by hand",
    r"outrider draft --drafter assistant": "is refused; tests/draft/test_assistant.py has it",
    r"outrider up .*--drafter assistant": "needs a Gemma 4 and its assistant; tests/e2e/test_assistant.py makes both",
    r"outrider up --drafter (eagle|mtp)|outrider target .* '?inpass:": "need a GPU; tests/target/test_in_pass.py has "
    "their passes, and tests/clients/test_shared_gpu.py what `outrider up` sets",
    r"outrider bench .*,lookup": "needs a GPU, on which a target looks up by itself",
    r"outrider draft --drafter yours|outrider target --draft inprocess:yours|outrider bench .*,yours": "stands for a "
    "drafter that the reader has written; those of tests/draft/test_named_class.py are run",
}
# Of blocks with these `make test` runs none, since other tests run the commands.
RUN_ELSEWHERE = {
    "outrider tune": "e2e/test_tune.py",
    "outrider train-head": "e2e/test_train_head.py",
    r"outrider bench .*(--draft-placement|--profile|merged)": "clients/test_bench.py",
    r"bigram:BigramDrafter": "draft/test_named_class.py",
    r"python -m benchmarks\.": "benchmarks",
}

# What stands in blocks like those of commands, and is none: the page, and its first line.
NO_COMMANDS = {
    ("docs/architecture.md", "host    schedule  wait for drafts"): "a drawing",
    ("docs/architecture.md", "RUN_AHEAD"): "a drawing",
    ("docs/fleet.md", "serve deploy"): "a command of Ray, which `make test-ray` needs",
    ("docs/observability.md", "outrider.v1.TargetService/Generate"): "spans of a trace",
    ("docs/observability.md", "request call=Generate"): "lines of a log",
    ("docs/protocol.md", "p > min(epsilon, delta * exp(-H))"): "a formula",
    ("docs/tenants.md", "0c6e4a6b1f3d45a08a4f acme"): "a file of tokens and limits",
}
# Pages with programs, and the test that runs them; its text names the page.
PROGRAMS = {
    "python": {
        "clients/README.md": "clients/test_examples.py",
        "clients/outrider_vllm/README.md": "proposer/test_readme.py",
        "docs/coming_from.md": "sdk/test_other_clients.py",
        "docs/drafters.md": "draft/test_named_class.py",
        "docs/gateway.md": "gateway/test_docs.py",
        "docs/predicted_outputs.md": "clients/test_page_commands.py",
        "docs/protocol.md": "clients/test_protocol.py",
        "kernels/README.md": "kernels/test_readme.py",
    },
    "go": {"clients/go/README.md": "sdk/test_sources.py"},
    "ts": {"clients/typescript/README.md": "sdk/test_sources.py"},
    "js": {"docs/coming_from.md": "sdk/test_other_clients.py", "docs/gateway.md": "sdk/test_openai_npm.py"},
    "html": {"docs/gateway.md": "gateway/test_cross_origin.py"},
    "toml": {"docs/tuning.md": "clients/test_pages.py"},
}


# What is another word in each place: an expression, and what stands for it there. In this order.
RULES = {
    # A sentence may leave open what is chosen by the reader.
    r" \.{2,3}$": "",
    r" \[(--service liveness)\]": r" \1",
    r"--json$": "--json figures.json",
    r"(draft_quality)$": r"\1 traces.jsonl --drafter prompt_lookup --rows 8",
    r"(weight_exchange)$": r"\1 --model {model} --weights {model} --dtype float32 --max-tokens 64 --updates 1",
    r"(host\.executors) .*": r"\1 --model {model} --tokens 8 --repeats 1",
    r"(serving\.door)$": r"\1 --streams 4 --tokens 100 --rounds 1 --steps 2",
    r"(serving\.gateway)$": r"\1 --rounds 2 --requests 4 --streams 4 --tokens 4 --steps 1",
    r"(serving\.predicted_outputs)$": r"\1 --model {model} --dtype float32 --threads 1"
    " --drafters none --rounds 2 --every 20 --max-tokens 32",
    r"(acceptance .*)": r"\1 --model {model} --dtype float32 --limit 1 --temperatures 0 --drafters eagle_chain,merged",
    r"^(outrider bench(?!.*--prompts).*)": r"\1 --prompts prompts.jsonl",
    r"^(outrider bench.*--target)(?= --)": r"\1 {target}",
    r"^(outrider train-head(?!.*--model).*)": r"\1 --model {model}",
    r"^(outrider train-head(?!.*--out).*)": r"\1 --out head",
    r"^(outrider corpus add .*)": r"\1 --model {model}",
    r"^(outrider corpus .*)": r"\1 --draft {draft}",
    r"(cpu_kernels .*)": r"\1 --calls 2",
    # Addresses.
    r"a:50051,b:50051": "{shared}",
    # One by two names.
    r"a:50052,b:50052": "{draft},localhost:{draft_port}",
    r"(?<=dns:///)targets:50051": "{target}",
    r"(draft-host|HOST|127\.0\.0\.1|0\.0\.0\.0):(50052|PORT)": "{draft}",
    r"(127\.0\.0\.1|0\.0\.0\.0):50051|\bADDRESS\b": "{target}",
    r"127\.0\.0\.1:8000": "{http}",
    r"--http 8000": "--http {http}",
    # A processor in place of GPUs.
    r"--device cuda\b": "--device cpu",
    r" --cuda-graphs": "",
    # Models and heads.
    r"yuhuili/[\w.-]+": "{published}",
    r"\bHEAD\b|(?<=--head )smollm2-135m-instruct|(?<=--init )smollm2-135m-instruct": "{eagle}",
    r"(meta-llama|Qwen)/[\w.-]+|smollm2-135m-instruct|\bMODEL\b|(?<=pull )NAME": "{model}",
    r"(?<=head )FOLDER": "{medusa}",
    # Files.
    r"\bFILE\.\.": "prices.py",
    r"\bNAME\b": "notes",
    r"\bTOKENS\b": "tokens",
    r"(?<= )/checkpoints": "{folder}",
    r"benchmarks/prompts\.jsonl": "prompts.jsonl",
    r"docs/(observability|gateway)\.md": r"\1.md",
    r"tests/page_tables\.py": f"{ROOT}/tests/page_tables.py",
    # Sizes.
    r"--max-tokens \d\d\d?\b(?<!32)": "--max-tokens 8",
    r"--concurrency 1,\d+": "--concurrency 1,2",
    r"--writers \d+": "--writers 1",
    # Starting takes most, as below.
    r"^(outrider tune.*) --minutes \d+": r"\1 --minutes 0.05",
    r"--minutes \d+\b(?!\.)": "--minutes 30",
    r"--writing-share [\d.]+": "--writing-share 0.8",
    r"--tokens \d+M": "--tokens 600",
}
# Settings of the services and commands that no command of a page says otherwise: a tiny model, one thread.
SETTINGS = {
    "OUTRIDER_TARGET_DTYPE": "float32",
    "OUTRIDER_TARGET_THREADS": "1",
    "OUTRIDER_TARGET_MODEL": "{model}",
    # Else every start measures what rows cost.
    "OUTRIDER_TARGET_ROW_BUDGET": "all",
    "OUTRIDER_TARGET_DRAFT_HEAD": "{eagle}",
    "OUTRIDER_TARGET_LISTEN": "{target}",
    "OUTRIDER_DRAFT_LISTEN": "{draft}",
    "OUTRIDER_GATEWAY_LISTEN": "{http}",
    "OUTRIDER_GATEWAY_TARGET": "{target}",
    "OUTRIDER_CLIENT_TARGET": "{target}",
    "OUTRIDER_UP_PORT": "{target_port}",
    "OUTRIDER_UP_MODEL": "{model}",
    "OUTRIDER_BENCH_MODEL": "{model}",
    "OUTRIDER_BENCH_DTYPE": "float32",
    "OUTRIDER_TUNE_MODEL": "{model}",
    # Of which services take most to start; tests/e2e/test_tune.py has time for candidates.
    "OUTRIDER_TUNE_MINUTES": "0.05",
    "OUTRIDER_TUNE_MAX_TOKENS": "8",
    "OUTRIDER_EAGLE_HEAD": "{eagle}",
    "OUTRIDER_EAGLE_DTYPE": "float32",
    "OUTRIDER_MEDUSA_DTYPE": "float32",
    "OUTRIDER_MTP_DTYPE": "float32",
    "OUTRIDER_TRAINING_DTYPE": "float32",
    "OUTRIDER_TRAINING_TOKENS": "600",
    "OUTRIDER_TRAINING_MAX_LENGTH": "96",
    "OUTRIDER_TRAINING_MAX_PROMPT": "32",
    "OUTRIDER_TRAINING_BATCH_TOKENS": "512",
    "OUTRIDER_TRAINING_VOCABULARY": "200",
    "OUTRIDER_TRAINING_VALIDATION": "4",
    "OUTRIDER_TRAINING_EPOCHS": "1",
    # Tokens and epochs end it sooner, on a machine of any speed.
    "OUTRIDER_TRAINING_MINUTES": "30",
    "OUTRIDER_TRAINING_WRITING_SHARE": "0.8",
}
PROMPTS = [{"id": name, "task": "a", "turns": [f"Say {name}."]} for name in ("a", "b")]
# Verbs and modules of commands that serve until they are ended, and where they listen.
SERVICES = {
    "up": ("target", "draft", "http"),
    "target": ("target",),
    "draft": ("draft",),
    "draft_service": ("draft",),
    "gateway": ("http",),
}


class Place:
    """Where the commands of one block run: a folder with the files that they name, ports, and the services of it."""

    def __init__(
        self, folder: Path, programs: Path, words: Mapping[str, str], addresses: Mapping[str, str] | None = None
    ) -> None:
        """`addresses` are of services that run already."""
        self.folder = folder
        free = {name: f"127.0.0.1:{free_port()}" for name in ("target", "draft", "http")}
        self.addresses = {**free, **(addresses or {})}
        self.words = {"shared": self.addresses["target"], **words, **self.addresses, "folder": str(folder)}
        self.words |= {f"{name}_port": self.addresses[name].rpartition(":")[2] for name in ("target", "draft")}
        paths = os.pathsep.join(filter(None, [str(folder), *sys.path]))
        self._environment = {
            **os.environ,
            **{name: value.format_map(self.words) for name, value in SETTINGS.items()},
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        self._services: list[tuple[Sequence[str], subprocess.Popen[bytes], Path]] = []

    def adapted(self, command: str) -> str:
        """The command with this place's addresses, models, sizes and files."""
        for pattern, replacement in RULES.items():
            command = re.sub(pattern, replacement.format_map(self.words), command)
        return command

    def run(self, command: str, given: str = "") -> str:
        """What a command that ends writes."""
        done = subprocess.run(
            ["bash", "-c", self.adapted(command)],
            cwd=self.folder,
            env=self._environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=HUNG_SECONDS,
        )
        assert done.returncode == 0, (self.adapted(command), done.stdout, done.stderr, *self.logs())
        assert "Traceback" not in done.stderr
        return done.stdout

    def serve(self, command: str, kind: str) -> None:
        """Start a service in place of those that listen where it will, and wait until it can be used."""
        self.end(*SERVICES[kind])
        log = self.folder / f"{kind}-{len(list(self.folder.glob('*.log')))}.log"
        with log.open("wb") as file:
            # The shell's place is taken, so that signals reach the command.
            words = re.sub(r"(outrider|python) ", r"exec \1 ", self.adapted(command), count=1)
            started = subprocess.Popen(
                ["bash", "-c", words], cwd=self.folder, env=self._environment, stdout=file, stderr=file
            )
        self._services.append((SERVICES[kind], started, log))
        deadline = time.monotonic() + HUNG_SECONDS
        while not self._ready(kind, command):
            assert started.poll() is None and time.monotonic() < deadline, (self.adapted(command), log.read_text())
            time.sleep(0.05)

    def _ready(self, kind: str, command: str) -> bool:
        """Whether it serves, and where there is a draft, whether the target has found it."""
        listens = SERVICES[kind]
        with contextlib.suppress(httpx.TransportError, ServiceUnreachable, OutriderError, grpc.RpcError):
            if kind == "gateway" or " --http" in command:
                address = f"http://{self.addresses['http']}/health/ready"
                if httpx.get(address).status_code != 200:
                    return False
            if "target" not in listens:
                return kind == "gateway" or self._serving("draft")
            with SyncClient.connect(self.addresses["target"], token=self.token) as client:
                drafts = "--draft " in command or (kind == "up" and "--drafter none" not in command)
                return client.serving() and (not drafts or bool(client.info().drafter))
        return False

    def _serving(self, name: str) -> bool:
        with grpc.insecure_channel(self.addresses[name]) as channel:
            asked = health_pb2.HealthCheckRequest(service="readiness")
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=HUNG_SECONDS)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def token(self) -> str:
        return "sixteen-letters!" if "auth-tokens" in self.words.get("block", "") else ""

    def end(self, *names: str) -> None:
        """End services of these names, or all, the last first. What they logged must be free of surprises."""
        for each in reversed(self._services):
            where, process, log = each
            if names and not set(names) & set(where):
                continue
            self._services.remove(each)
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(HUNG_SECONDS)
            finally:
                process.kill()
            assert status == 0 and "Traceback" not in log.read_text(), (status, log.read_text())

    def kill(self) -> None:
        for _, process, _ in self._services:
            process.kill()
            process.wait()

    def logs(self) -> list[str]:
        return [log.read_text()[-2000:] for _, _, log in self._services]


@pytest.fixture(scope="module")
def warm() -> Path:
    return shared_python("services")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny model, the same with two MTP modules, and of heads for it. None has learnt anything."""
    folder = tmp_path_factory.mktemp("models")
    model = folder / "model"
    # The prompts of the benchmarks have some thousand bytes.
    tiny = make_tiny(vocab_size=VOCABULARY, max_position_embeddings=8192)
    tiny.save_pretrained(model)
    chat_tokenizer().save_pretrained(model)
    with_modules = Path(shutil.copytree(model, folder / "mtp")) / "model.safetensors"
    modules = [new_head(tiny, MTP | {"feature_layers": (LAYERS,)}, seed) for seed in (5, 6)]
    weights = load_file(with_modules) | module_weights("mimo", modules, LAYERS)
    save_file(weights, with_modules, metadata={"format": "pt"})
    for name, target in (("eagle", str(model)), ("published", "")):
        save_head(new_head(tiny, KINDS["eagle-3.1"] | {"target": target}), folder / name)
    shape = {"target_hidden_size": HIDDEN, "vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY}
    save_heads(make_heads(**shape, target=str(model), target_layers=LAYERS), folder / "medusa")
    return {name: str(folder / name) for name in ("model", "mtp", "eagle", "published", "medusa")}


@pytest.fixture(scope="module")
def pair(warm: Path, words: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of a draft and a target for commands whose block starts none."""
    place = Place(tmp_path_factory.mktemp("pair"), warm, words)
    try:
        place.serve("outrider draft --drafter trie", "draft")
        place.serve(f"outrider target --draft {place.addresses['draft']}", "target")
        yield {name: place.addresses[name] for name in ("target", "draft")}
        place.end()
    finally:
        place.kill()


def files(folder: Path, words: Mapping[str, str]) -> None:
    """What commands of the pages read."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (folder / "prices.py").write_text("rate = 3\n")
    trace = {"id": "a", "task": "a", "prompt": [5, 6, 7, 8, 5], "output": [6, 7, 8, 9]}
    (folder / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    (folder / "tokens").write_text("sixteen-letters! acme operator\n")
    (folder / "operator.token").write_text("sixteen-letters!\n")
    torch.save({"0.1.weight": torch.zeros(2, 2)}, folder / "medusa_lm_head.pt")
    shutil.copytree(words["model"], folder / "step-700")
    for page in ("observability.md", "gateway.md"):
        (folder / page).write_text((ROOT / "docs" / page).read_text())
    [bigram] = [text for page, text in programs("python") if page == "docs/drafters.md"]
    (folder / "bigram.py").write_text(bigram)


def reason(command: str) -> str:
    """Why it is not run here; empty where it is."""
    found = [why for pattern, why in NOT_RUN.items() if re.match(pattern, command)]
    assert len(found) <= 1, command
    return found[0] if found else ""


def run_of(block: Block) -> list[str]:
    return [command for command in block.commands if not reason(command)]


def kind_of(command: str) -> str:
    """The verb of `outrider`, or the module of `python -m`."""
    found = re.search(r"(?:outrider|python -m) +([\w.-]+)", command)
    return found[1] if found else ""


def parts_of(command: str) -> set[str]:
    """What makes a command another: its verb with that one's own, and that with each drafter or mode."""
    kind = kind_of(command)
    own = re.search(rf"{kind} ([a-z]+)\b", command) if kind in ("corpus", "head", "model", "weights") else None
    verb = f"{kind} {own[1]}" if own else kind
    return {verb, *(f"{verb}, {name}" for name in re.findall(r"--(?:drafter|mode) (\w+)", command))}


def chosen(of: Sequence[Block]) -> list[Any]:
    """All of them, marked `full` where others have the same parts or other tests run them."""
    candidates = [block for block in of if not any(re.search(each, " ".join(run_of(block))) for each in RUN_ELSEWHERE)]
    parts = [set[str]().union(*map(parts_of, run_of(block))) for block in candidates]
    kept = {candidates[place] for place in covering(parts, [len(run_of(block)) for block in candidates])}
    return [pytest.param(block, marks=() if block in kept else pytest.mark.full) for block in of]


RUN = [block for block in blocks() if run_of(block)]


@pytest.mark.parametrize("block", chosen(RUN), ids=str)
def test_commands_of_a_page(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    warm, words = request.getfixturevalue("warm"), request.getfixturevalue("words")
    whole = " ".join(block.commands)
    if "--drafter mtp" in whole:
        words = {**words, "model": words["mtp"]}
    own = {where for command in block.commands for where in SERVICES.get(kind_of(command), ())}
    running = request.getfixturevalue("pair")
    beside = {name: address for name, address in running.items() if name not in own}
    place = Place(tmp_path, warm, {**words, "shared": running["target"], "block": whole}, beside)
    files(tmp_path, words)
    try:
        for command in run_of(block):
            kind = kind_of(command)
            if kind in SERVICES and "--help" not in command:
                place.serve(command, kind)
            else:
                place.run(command)
        place.end()
    finally:
        place.kill()


def test_every_address_has_a_rule(tmp_path: Path) -> None:
    """A service that waits for another machine ends only by its time."""
    place = Place(tmp_path, tmp_path, dict.fromkeys(("model", "mtp", "eagle", "published", "medusa"), "folder"))
    adapted = [place.adapted(command) for block in RUN for command in run_of(block)]
    hosts = {host for command in adapted for host in re.findall(r"([\w.-]+):\d{4,5}\b", command)}
    assert hosts == {"127.0.0.1", "localhost"}


def test_what_is_run_elsewhere_is_still_on_a_page() -> None:
    every = [" ".join(run_of(block)) for block in RUN]
    assert [pattern for pattern in RUN_ELSEWHERE if not any(re.search(pattern, each) for each in every)] == []
    tests = Path(__file__).parents[1]
    assert [where for where in RUN_ELSEWHERE.values() if not (tests / where).exists()] == []


def test_what_is_not_run_is_still_on_a_page() -> None:
    every = [command for block in blocks() for command in block.commands]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in every)] == []


def test_what_is_no_command_is_known() -> None:
    """A block that this test takes for no command may hold one of a program that it does not know."""
    unknown = [(page, line) for page, line in not_commands() if not known_for_none(page, line)]
    assert unknown == []


def known_for_none(page: str, line: str) -> bool:
    return any(page == known and line.startswith(first) for known, first in NO_COMMANDS)


@pytest.mark.parametrize("language", PROGRAMS)
def test_programs_of_pages_are_run(language: str) -> None:
    """By the test that is named here, which reads the page."""
    tests = Path(__file__).parents[1]
    assert {page for page, _ in programs(language)} == set(PROGRAMS[language])
    for page, test in PROGRAMS[language].items():
        text = (tests / test).read_text()
        assert page in text or f'"{Path(page).name}"' in text or '"README.md"' in text, test


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("docs/predicted_outputs.md", "source = 'rate = 3'"),
        ("docs/protocol.md", "client = Client.connect('127.0.0.1:50051')"),
    ],
)
def test_programs_that_are_parts(page: str, given: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What pages show of a coroutine, with what stands before it there."""
    [shown] = [
        text for where, text in programs("python") if where == page and re.search(r"^(async with|result =)", text, re.M)
    ]
    place = Place(tmp_path, request.getfixturevalue("warm"), request.getfixturevalue("words"))
    place.serve("outrider target --allow-lossy", "target")
    body = "from outrider_client import Client\nasync def main():\n" + "".join(
        f"    {line}\n" for line in f"{given}\n{shown}".splitlines()
    )
    program = f"import asyncio\n{body}asyncio.run(main())\n"
    (tmp_path / "program.py").write_text(program.replace("127.0.0.1:50051", place.addresses["target"]))
    try:
        assert place.run("python program.py").strip()
        place.end()
    finally:
        place.kill()


SCRIPTS = sorted(set(re.findall(r"`(\w+/\w+)\.py`", (ROOT / "benchmarks/README.md").read_text())))


def test_every_benchmark_says_how_it_is_run(warm: Path, words: dict[str, str], tmp_path: Path) -> None:
    """As benchmarks/README.md says: each script that it names explains itself."""
    place = Place(tmp_path, warm, words)
    assert len(SCRIPTS) > 30
    asked = [f"benchmarks.{script.replace('/', '.')}" for script in SCRIPTS]
    # In one process, which has much to import.
    (tmp_path / "ask.py").write_text(
        "import contextlib, runpy, sys\n"
        f"for name in {asked}:\n"
        "    print('\\f' + name)\n"
        "    sys.argv = [name, '--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_module(name, run_name='__main__', alter_sys=True)\n"
    )
    _, *said = place.run("python ask.py").split("\f")
    assert [each.split()[0] for each in said] == asked
    for each in said:
        assert "usage:" in each, each
