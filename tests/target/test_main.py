"""`python -m target_service` from its flags to its exit status, with a tiny model from disk."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from forked import Child
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waits import HUNG_SECONDS
from warm_python import shared_python

from benchmarks.drafters.random_trees import RANDOM
from outrider.runtime import (
    GOMP_SPINCOUNT,
    GRPC_EXPERIMENTS,
    ONEDNN_CACHES,
    prepare_grpc,
    prepare_onednn,
    prepare_openmp,
)
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc
from target_service.__main__ import main


@pytest.fixture(scope="module")
def model_folder(tiny_model: Any, byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


class TestSettings:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--no-such-flag"], "--no-such-flag"),
            (["--max-run", "3"], "--max-run"),
            (["--max-running", "many"], "--max-running: 'many' is not a whole number"),
            (["--max-running", "0"], "--max-running: must be at least 1"),
            (["--dtype", "int8"], "'int8' is not one of float32, bfloat16, float16"),
            (["--page-size", "7"], "--page-size: 7 is not one of 1, 16, 64"),
            (["--max-draft-nodes", "256"], "--max-draft-nodes: must be at most 255"),
            (["--lookup-tokens", "16", "--device", "cuda"], "--lookup-tokens: must be at most 15"),
            (["--lookup-tokens", "7"], "--lookup-tokens: needs captured steps on a GPU"),
            (["--heartbeat-seconds", "0"], "--heartbeat-seconds: must be above 0"),
            (["--draft-wait-ms", "nan"], "--draft-wait-ms: 'nan' is not a number"),
            (["--trace-ratio", "2"], "--trace-ratio: must be at most 1"),
            (["--memory-share", "0"], "--memory-share: must be above 0"),
            (["--capture-seconds", "-1"], "--capture-seconds: must be at least 0"),
            (["--max-running", "2000"], "--max-running: must be at most 1024"),
            (["--tls-certificate", "cert.pem"], "needs its key"),
            (["--auth-tokens", "/absent"], "/absent"),
            (["--draft-token", "/absent"], "/absent: No such file"),
            (["--draft-tls-certificate", "c"], "--draft-tls-certificate needs --draft-tls-ca"),
            (["--config", "/absent"], "/absent"),
        ],
        ids=lambda value: "_".join(value) if isinstance(value, list) else None,
    )
    def test_wrong_flag(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""

    def test_wrong_key_in_the_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "outrider.toml"
        path.write_text("[target]\nmax_runing = 3\n")
        with pytest.raises(SystemExit) as caught:
            main(["--config", str(path)])
        assert caught.value.code == 2
        assert "max_runing" in capsys.readouterr().err

    def test_wrong_variable(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("OUTRIDER_TARGET_PAGESIZE", "16")
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 2
        assert "OUTRIDER_TARGET_PAGESIZE" in capsys.readouterr().err

    def test_help_names_every_setting_and_its_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--help"])
        assert caught.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for expected in ("--config FILE", "--listen", "(default: 127.0.0.1:50051)", "OUTRIDER_CONFIG", "exit status"):
            assert expected in text

    def test_model_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--model", str(tmp_path), "--listen", "127.0.0.1:0"])
        assert caught.value.code == 1
        assert f"cannot serve {tmp_path}" in capsys.readouterr().err

    def test_a_head_that_is_not_there(self, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        head = ["--draft-head", "./absent"]
        with pytest.raises(SystemExit) as caught:
            main(["--model", str(model_folder), "--listen", "127.0.0.1:0", "--kv-tokens", "64", *head])
        assert caught.value.code == 2
        assert "error: --draft-head: ./absent: no such folder" in capsys.readouterr().err

    def test_weights_that_were_cut_short(
        self, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = shutil.copytree(model_folder, tmp_path / "cut")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
        assert "model.safetensors is no safetensors file, or not a whole one" in self.refusal(folder, capsys)

    def test_a_folder_without_a_tokenizer(
        self, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = shutil.copytree(model_folder, tmp_path / "mute", ignore=shutil.ignore_patterns("*token*"))
        assert "it has no tokenizer (tokenizer.json or tokenizer.model)" in self.refusal(folder, capsys)

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"), "GGUF files are not read"),
            (
                lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
                "only pickled weights",
            ),
            (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "a LoRA adapter alone"),
            (lambda folder: (folder / "quantize_config.json").write_text('{"bits": 4}'), "quantised weights (GPTQ"),
            (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON object"),
        ],
        ids=["gguf", "pickled", "adapter", "quantised", "no object"],
    )
    def test_what_is_no_model_is_named(
        self,
        made: Callable[[Path], object],
        said: str,
        model_folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        folder = shutil.copytree(model_folder, tmp_path / "other")
        made(folder)
        assert said in self.refusal(folder, capsys)

    @pytest.mark.parametrize(
        ("name", "said"), [("llama3.2:1b", "only names of Ollama have a colon"), ("absent.gguf", "GGUF files are not")]
    )
    def test_what_is_no_name_of_a_model(self, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert said in self.refusal(Path(name), capsys)

    def refusal(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        """The line that says why the model is not served."""
        with pytest.raises(SystemExit) as caught:
            main(["--model", str(folder), "--listen", "127.0.0.1:0", "--kv-tokens", "64"])
        assert caught.value.code == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "cannot serve" in line]
        return line


class TestPoller:
    def test_grpc_is_imported_after_its_environment_is_set(self) -> None:
        """gRPC reads its switches as it is imported, so the entry point must not pull it in."""
        check = "import sys, target_service.__main__; sys.exit('grpc' in sys.modules or 'torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

    def test_operator_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        unset: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", unset)
        prepare_grpc()
        assert unset == {"GRPC_EXPERIMENTS": GRPC_EXPERIMENTS, "GRPC_ENABLE_FORK_SUPPORT": "0"}
        chosen = {"GRPC_EXPERIMENTS": "", "GRPC_ENABLE_FORK_SUPPORT": "1"}
        monkeypatch.setattr(os, "environ", chosen)
        prepare_grpc()
        assert chosen == {"GRPC_EXPERIMENTS": "", "GRPC_ENABLE_FORK_SUPPORT": "1"}


class TestOpenMp:
    def test_services_bound_the_spinning_of_threads_before_torch_is_imported(self) -> None:
        check = (
            "import os, sys, draft_service.__main__ as entry, draft_service.service as service\n"
            "service.run_service = lambda _: 'torch' in sys.modules\n"
            "assert not entry.main(); print(os.environ['GOMP_SPINCOUNT'])"
        )
        clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, env=clean)
        assert done.stdout.strip() == GOMP_SPINCOUNT

    @pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
    def test_operator_wins(self, chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        environment = dict(chosen)
        monkeypatch.setattr(os, "environ", environment)
        prepare_openmp()
        assert environment == chosen


class TestOneDnn:
    def test_services_bound_what_is_kept_before_torch_is_imported(self) -> None:
        check = (
            "import os, sys, draft_service.__main__ as entry, draft_service.service as service\n"
            "service.run_service = lambda _: 'torch' in sys.modules\n"
            "assert not entry.main(); print(*(os.environ[name] for name in sys.argv[1:]))"
        )
        clean = {name: value for name, value in os.environ.items() if name not in ONEDNN_CACHES}
        command = [sys.executable, "-c", check, *ONEDNN_CACHES]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
        assert done.stdout.split() == list(ONEDNN_CACHES.values())

    def test_operator_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        chosen = dict.fromkeys(ONEDNN_CACHES, "7")
        monkeypatch.setattr(os, "environ", chosen)
        prepare_onednn()
        assert set(chosen.values()) == {"7"}


# Read by every Python process that starts with it on its path.
UNINSTALLED = """
import importlib.metadata
everything = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **which: everything(**which) if "outrider" not in str(which) else ()
"""


@dataclass
class Process:
    """A target service in its own process, and what it logged so far."""

    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)

    async def wait_for(self, pattern: str) -> re.Match[str]:
        """The first log line, old or new, that matches."""
        seen = 0
        while True:
            for line in self.log[seen:]:
                if (match := re.search(pattern, line)) is not None:
                    return match
            seen = len(self.log)
            assert self.process.stderr is not None
            line = (await self.process.stderr.readline()).decode()
            assert line, "".join(self.log)
            self.log.append(line)

    async def ended(self) -> int:
        assert self.process.stderr is not None
        self.log.extend((await self.process.stderr.read()).decode().splitlines())
        return await self.process.wait()


@asynccontextmanager
async def started(model: Path, *flags: str, python: str | Path = "") -> AsyncIterator[tuple[Process, str]]:
    """A ready service and its address; forked, where no Python is given."""
    command = [
        python or shared_python("services") / "python",
        "-m",
        "target_service",
        "--model",
        str(model),
        "--dtype",
        "float32",
    ]
    command += ["--listen", "127.0.0.1:0", "--kv-tokens", "4096", "--threads", "1", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    running = Process(process)
    try:
        async with asyncio.timeout(HUNG_SECONDS):
            ready = await running.wait_for(r"ready: \S+ on (\S+)")
        yield running, ready[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class TestProcess:
    async def test_a_drafter_in_process_needs_no_installation(
        self, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A checkout on the path has no entry points, and the engine's process of a GPU target is no other."""
        (tmp_path / "sitecustomize.py").write_text(UNINSTALLED)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        settings = tmp_path / "outrider.toml"
        settings.write_text("[drafter]\nrandom_nodes = 3\n")
        flags = ("--engine-process", "own", "--draft", f"inprocess:{RANDOM}", "--config", str(settings))
        async with (
            started(model_folder, *flags, python=sys.executable) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            async with asyncio.timeout(HUNG_SECONDS):
                while not (info := await stub.GetTargetInfo(pb.GetTargetInfoRequest())).drafter:
                    await asyncio.sleep(0.05)
            assert info.drafter == "random"

    @pytest.mark.values
    @pytest.mark.parametrize("engine", ["own", "shared"])
    @pytest.mark.parametrize(
        ("draft", "settings", "message"),
        [
            ("nothing", {}, "no drafter is called 'nothing'; there are"),
            ("trie", {"OUTRIDER_TRIE_COLOUR": "red"}, "OUTRIDER_TRIE_COLOUR: no such setting"),
            ("eagle", {"OUTRIDER_EAGLE_HEAD": "/nowhere/head"}, "/nowhere/head"),
            ("merged", {"OUTRIDER_EAGLE_HEAD": "/nowhere/head"}, "/nowhere/head"),
            ("eagle", {"OUTRIDER_EAGLE_DEVICE": "cuda:77"}, "cuda:77"),
        ],
    )
    def test_a_drafter_in_process_is_refused_before_the_model_is_loaded(
        self, tmp_path: Path, engine: str, draft: str, settings: dict[str, str], message: str
    ) -> None:
        """Of a model that is not there nothing is said."""
        flags = ["--model", "/nowhere/model", "--listen", "127.0.0.1:0", "--engine-process", engine]
        log = tmp_path / "log"
        child = Child("target_service", [*flags, "--draft", f"inprocess:{draft}"], log, environment=settings)
        child.start()
        status = child.wait(HUNG_SECONDS)
        (line,) = [line for line in log.read_text().splitlines() if "INFO" not in line]
        assert status == 2 and line.startswith("outrider target: error: --draft: ") and message in line

    async def test_serves_then_drains_on_sigterm(self, model_folder: Path) -> None:
        flags = ("--served-model-name", "tiny", "--metrics-listen", "127.0.0.1:0")
        async with started(model_folder, *flags) as (running, address):
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = target_pb2_grpc.TargetServiceStub(channel)
                health = health_pb2_grpc.HealthStub(channel)
                info = await stub.GetTargetInfo(pb.GetTargetInfoRequest())
                assert (info.model, info.max_context, info.drafter) == ("tiny", 512, "")
                assert (info.device, info.device_name, info.torch_version) == ("cpu", "", torch.__version__)
                assert not info.speculating and "--draft" in info.speculation_reason
                request = pb.GenerateRequest(text="open sesame", sampling={"max_tokens": 400, "ignore_eos": True})
                call = stub.Generate(request)
                for _ in range(3):
                    await call.read()
                running.process.send_signal(signal.SIGTERM)
                await running.wait_for("draining")
                answer = await health.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Generate(request).read()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                while (response := await call.read()) is not grpc.aio.EOF:
                    last = response
                assert last.finished.usage.completion_tokens == 400
            assert await asyncio.wait_for(running.ended(), HUNG_SECONDS) == 0
        log = "".join(running.log)
        assert "sesame" not in log
        assert running.process.stdout is not None
        assert await running.process.stdout.read() == b""

    async def test_port_in_use(self, model_folder: Path) -> None:
        with socket.socket() as other:
            # It would share the port with one that shares.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"
            second = await asyncio.create_subprocess_exec(
                *(shared_python("services") / "python", "-m", "target_service"),
                *("--model", str(model_folder), "--listen", address),
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"OUTRIDER_TARGET_KV_TOKENS": "256", "OUTRIDER_TARGET_THREADS": "1"},
            )
            _, error = await asyncio.wait_for(second.communicate(), HUNG_SECONDS)
        assert second.returncode == 2
        assert f"cannot listen on {address}" in error.decode()
