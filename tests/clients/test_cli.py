"""The command line: help, wrong usage, settings from three places, and commands against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waits import HUNG_SECONDS

from outrider.errors import Loading
from outrider.settings import DRAFTERS, SECTIONS
from outrider.v1 import target_pb2
from outrider_client.cli import main
from outrider_client.terminal.waiting import until_loaded


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["bench", "--help"], ["corpus", "add", "--help"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "usage: outrider" in capsys.readouterr().out


def test_help_names_every_table_of_the_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    # One of a drafter stands for all of them.
    assert [name for name in SECTIONS - {*DRAFTERS, "drafter"} | {"trie"} if f"[{name}]" not in said] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["up", "--prot", "1"], "no such flag or argument: --prot 1"),
        (["up", "--port", "many"], "--port: 'many' is not a whole number"),
        (["up", "--port", "0"], "--port: must be at least 1"),
        (["up", "--target-flags", "'"], "No closing quotation"),
        (["up", "--gateway-flags=--x"], "--gateway-flags are for a gateway, which only --http starts"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--mode", "guess"], "'guess' is not one of auto, greedy"),
        (["generate", "x", "--raw", "--system", "y"], "--raw leaves out"),
        (["generate", "x", "--tls-certificate", "a.pem"], "needs its key"),
        (["generate", "x", "--tls-ca", "absent.pem"], "absent.pem: no such file"),
        (["generate", "x", "--config", "absent.toml"], "absent.toml"),
        (["generate", "x", "--target", "localhost"], "'localhost' is not HOST:PORT or unix:PATH: it has no port"),
        (["chat", "--target", "grpc://a:1"], "leave out grpc:// and write a:1"),
        (["health", "--draft", "https://a:1"], "leave out https:// and write a:1 with TLS"),
        (["bench", "--prompts", "absent.jsonl", "--target", "a"], "--target: 'a' is not HOST:PORT"),
        (["bench"], "--prompts is needed"),
        (["bench", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["bench", "--prompts", "x", "--json", "/dev/null/x.json"], "/dev/null/x.json"),
        (["bench", "--target-flags", "'"], "No closing quotation"),
        (["corpus"], "required: ACTION"),
        (["weights"], "required: ACTION"),
        (["weights", "update"], "either --folder or files are needed"),
        (["weights", "update", "a.safetensors", "--folder", "b"], "either --folder or files are needed"),
        (["weights", "update", "--folder", "b", "--running", "stop"], "invalid choice: 'stop'"),
        (["corpus", "delete"], "required: NAME"),
        (["corpus", "add", "a.txt", "--to", "b"], "no such flag or argument: --to b"),
        (["demo", "--max-tokens", "0"], "--max-tokens: must be at least 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    # What is wrong stands first, and not below a screen of flags.
    assert said in err.splitlines()[0] and "usage:" not in err


def test_unknown_key_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text("[generate]\nmax_toknes = 3\n")
    with pytest.raises(SystemExit) as ended:
        main(["generate", "x", "--config", str(path)])
    assert ended.value.code == 2
    assert "has no setting 'max_toknes'" in capsys.readouterr().err


async def test_generate_streams_text(running: Any, outrider: Any) -> None:
    status, out, err = await outrider("generate", "count", "--target", running.address, "--max-tokens", "4")
    assert (status, out) == (0, "one two three four\n")
    assert "4 tokens in 2 steps" in err
    assert running.target.requests[0][0].chat.messages[0].content == "count"


async def test_generate_waits_for_a_target_that_loads(running: Any, outrider: Any) -> None:
    running.target.loads = 2
    status, out, err = await outrider("generate", "hello", "--target", running.address, "--max-tokens", "3")
    assert (status, out, running.target.loads) == (0, "one two three\n", 0), err
    assert err.startswith("the target is loading its model; Ctrl-C ends the wait ...\n")


async def test_a_wait_for_loading_tells_calls_what_is_left_of_it() -> None:
    """A call that thinks it has all of the time pauses past the end before it tries again."""
    given: list[float] = []

    class Loads:
        async def info(self, timeout: float) -> None:
            given.append(timeout)
            raise Loading("loads")

    client: Any = Loads()
    with pytest.raises(Loading):
        await until_loaded(client, Console(quiet=True), 1.5)
    assert len(given) == 2
    assert given[0] == 1.5 and given[1] <= 0.5


async def test_generate_waits_no_longer_than_it_is_told(running: Any, outrider: Any) -> None:
    running.target.loads = 1_000
    status, out, err = await outrider("generate", "hello", "--target", running.address, "--timeout", "0.5")
    assert (status, out) == (1, "") and "error: the model is being loaded (LOADING)" in err


async def test_settings_from_flag_environment_and_file(running: Any, outrider: Any, tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text(f'[client]\ntarget = "{running.address}"\n[generate]\nmax_tokens = 5\ntop_k = 7\nseed = 3\n')
    environment = {"OUTRIDER_CONFIG": str(path), "OUTRIDER_GENERATE_MAX_TOKENS": "2", "OUTRIDER_GENERATE_TOP_K": "8"}
    status, _, err = await outrider("generate", "-", "--max-tokens", "1", stdin="count", environment=environment)
    assert status == 0, err
    sampling = running.target.requests[0][0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (1, 8, 3)


async def test_generate_as_json(running: Any, outrider: Any) -> None:
    words = ["--raw", "--json", "--max-tokens", "8", "--no-speculation", "--stop", "x", "--stop", "y"]
    status, out, _ = await outrider("generate", "count", "--target", running.address, *words)
    document = json.loads(out)
    assert status == 0
    assert document["token_ids"] == list(range(8))
    assert (document["finish_reason"], document["mean_accepted_length"]) == ("length", 1.0)
    request = running.target.requests[0][0]
    assert (request.text, list(request.sampling.stop), request.speculation.enabled) == ("count", ["x", "y"], False)


async def test_generate_by_typical_acceptance(running: Any, outrider: Any) -> None:
    words = ["generate", "count", "--target", running.address, "--mode", "typical", "--typical-epsilon", "0.25"]
    status, _, error = await outrider(*words)
    assert status == 0
    assert "not lossless: 2 tokens the model would not draw" in error
    asked = running.target.requests[0][0].speculation
    assert (asked.typical.epsilon, asked.typical.delta) == (0.25, 0.3)


async def test_generate_says_that_nothing_was_drafted(running: Any, outrider: Any) -> None:
    words = ["generate", "count", "--target", running.address, "--max-tokens", "3", "--corpus", "nosuch"]
    _, _, err = await outrider(*words)
    assert "draft service" not in err
    running.target.draft_refused = "UNKNOWN_CORPUS"
    status, out, err = await outrider(*words)
    assert (status, out) == (0, "one two three\n")
    line = "the draft service refused to draft: UNKNOWN_CORPUS (--corpus nosuch)"
    assert err.splitlines()[-1] == line
    _, out, err = await outrider(*words, "--json")
    assert (json.loads(out)["draft_refused"], err) == ("UNKNOWN_CORPUS", f"{line}\n")
    running.target.draft_refused = "POSITION_OUT_OF_RANGE"
    _, _, err = await outrider(*words)
    assert err.splitlines()[-1] == "the draft service refused to draft: POSITION_OUT_OF_RANGE"


async def test_chat_says_that_nothing_was_drafted(running: Any, outrider: Any) -> None:
    running.target.draft_refused = "UNKNOWN_CORPUS"
    words = ["chat", "--target", running.address, "--max-tokens", "3", "--corpus", "nosuch"]
    _, _, err = await outrider(*words, stdin="count\n/plain\ncount\n")
    assert err == "the draft service refused to draft: UNKNOWN_CORPUS (--corpus nosuch)\n"


async def test_weights_of_a_folder_and_of_files(running: Any, outrider: Any, tmp_path: Path) -> None:
    words = ["weights", "update", "--target", running.address]
    status, out, err = await outrider(*words, "--folder", "step-7", "--running", "abort")
    assert status == 0, err
    assert out == (
        "model version 2: 290 tensors, 269.0 MB; read in 2.000 s, paused for 0.100 s; 3 requests ended, 4 read again\n"
    )
    (begin,) = running.target.updates[0]
    assert (begin.begin.folder, begin.begin.running) == ("step-7", target_pb2.RUNNING_REQUESTS_ABORT)
    contents = [b"a" * 2**21, b"bc"]
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    status, _, err = await outrider(*words, *map(str, paths))
    assert status == 0, err
    first, *pieces = running.target.updates[1]
    assert list(first.begin.files.sizes) == [2**21, 2]
    assert b"".join(piece.data for piece in pieces) == b"".join(contents)
    status, _, err = await outrider(*words, str(tmp_path / "absent.safetensors"))
    assert status == 1 and "absent.safetensors" in err and "Traceback" not in err
    status, _, err = await outrider(*words, "--folder", "refused")
    assert status == 1 and "PERMISSION_DENIED" in err


async def test_generate_with_a_prediction(running: Any, outrider: Any, tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("one two three")
    words = ["generate", "count", "--target", running.address, "--prediction", str(path)]
    status, _, err = await outrider(*words)
    assert status == 0, err
    assert running.target.requests[0][0].prediction.text == "one two three"
    status, _, err = await outrider(*words[:-1], str(tmp_path / "missing.txt"))
    assert status == 1 and "missing.txt" in err and "Traceback" not in err


async def test_errors_are_for_people(running: Any, outrider: Any, unused_tcp_port: int) -> None:
    status, out, err = await outrider("generate", "x", "--target", f"127.0.0.1:{unused_tcp_port}")
    assert (status, out) == (1, "")
    assert "cannot reach" in err and "outrider up" in err and "Traceback" not in err
    status, _, err = await outrider("generate", "x", "--target", running.address, "--tenant", "no spaces")
    assert status == 1 and "INVALID_FIELD" in err and "Traceback" not in err


async def test_errors_come_with_the_facts_that_were_sent_along(running: Any, outrider: Any) -> None:
    running.target.refuses = {"x"}
    status, _, err = await outrider("generate", "x", "--target", running.address)
    assert status == 1 and err.endswith("error: the queue is full (QUOTA_EXCEEDED: limit 8, waiting 9)\n")
    status, out, _ = await outrider("chat", "--target", running.address, stdin="x\n")
    assert status == 0 and "error: the queue is full (QUOTA_EXCEEDED: limit 8, waiting 9)\n" in out


@pytest.mark.parametrize("served", ["target", "draft"])
async def test_a_service_of_the_other_kind_is_told(served: str, start_only: Any, outrider: Any) -> None:
    address = await start_only(served)
    commands = {
        "target": [["corpus", "list", "--draft"]],
        "draft": [["generate", "x", "--target"], ["info", "--target"]],
    }
    other = "draft" if served == "target" else "target"
    for words in commands[served]:
        status, out, err = await outrider(*words, address)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"error: what answers at --{other} is no {other} service") and "INTERNAL" not in err


@pytest.mark.parametrize("command", ["up", "tune", "draft"])
async def test_help_names_the_drafters(command: str, outrider: Any) -> None:
    status, out, _ = await outrider(command, "--help")
    assert status == 0 and f"{', '.join(DRAFTERS)}, or MODULE:CLASS" in " ".join(out.split())


async def test_help_of_pull_says_what_it_takes(outrider: Any) -> None:
    for verb in ("pull", "path"):
        _, out, _ = await outrider("model", verb, "--help")
        assert "a hub id (ORG/NAME or ORG/NAME@REVISION), or a folder" in " ".join(out.split())


async def test_up_on_a_taken_port(running: Any, outrider: Any) -> None:
    status, _, err = await outrider("up", "--port", running.address.rpartition(":")[2])
    assert status == 1 and "cannot listen on" in err and "--port takes another" in err


@pytest.mark.parametrize("serving", [True, False], ids=["serving", "not-serving"])
async def test_health(running: Any, outrider: Any, serving: bool) -> None:
    running.server.health.set_serving(serving)
    expected = (0, " SERVING") if serving else (1, " NOT_SERVING")
    for flag in ("--target", "--draft"):
        status, out, _ = await outrider("health", flag, running.address)
        assert status == expected[0] and f"{running.address}{expected[1]}" in out


async def test_health_of_a_process_that_loads(running: Any, outrider: Any) -> None:
    running.server.health.set_serving(False)
    for flag in ("--target", "--draft"):
        status, out, _ = await outrider("health", "--live", flag, running.address)
        assert (status, out) == (0, f"{running.address} SERVING  alive, not ready\n")
    running.server.health.set_serving(True)
    status, out, _ = await outrider("health", "--live", "--target", running.address)
    assert (status, out) == (0, f"{running.address} SERVING  alive\n")
    running.server.health.set_live(False)
    assert (await outrider("health", "--live", "--target", running.address))[0] == 1


@pytest.mark.parametrize(("asked", "there"), [("target", "draft"), ("draft", "target")])
async def test_health_of_a_service_of_the_other_kind(start_only: Any, outrider: Any, asked: str, there: str) -> None:
    address = await start_only(there)
    status, out, _ = await outrider("health", f"--{asked}", address)
    assert status == 1 and f"{address} NOT_FOUND  what answers at --{asked} is no {asked} service" in out
    assert "INTERNAL" not in out


async def test_health_of_nobody(outrider: Any, unused_tcp_port: int) -> None:
    status, out, _ = await outrider("health", "--target", f"127.0.0.1:{unused_tcp_port}")
    assert status == 1 and "UNREACHABLE" in out


async def test_info_says_what_runs_and_why_it_speculates(running: Any, outrider: Any) -> None:
    running.target.more_info = {
        "torch_version": "2.9",
        "triton_version": "3.5",
        "device": "cuda:0",
        "device_name": "A GPU [large]",
        "captured_step_sizes": 25,
        "capturable_step_sizes": 26,
        "kv_token_bytes": 46_080,
        "draft": "draft-host:50052",
        "speculation_reason": "the draft at draft-host:50052 is not connected",
    }
    status, out, err = await outrider("info", "--target", running.address)
    assert status == 0, err
    said = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert said == {
        "target": running.address,
        "versions": "outrider 0, torch 2.9, triton 3.5",
        "model": "scripted, float32, vocabulary 8",
        "device": "cuda:0, A GPU [large]",
        "steps": "25 of 26 sizes of steps are captured",
        "context": "512 tokens a sequence, 4096 in the KV cache, 46,080 bytes each",
        "drafter": "trie, up to 63 drafted rows a sequence and step",
        "draft": "draft-host:50052, not connected",
        "speculation": "off: the draft at draft-host:50052 is not connected",
    }
    running.target.more_info |= {"speculating": True, "draft_connected": True, "capturable_step_sizes": 0}
    _, out, _ = await outrider("info", "--target", running.address)
    assert "draft-host:50052, connected" in out and "on: the draft" in out and "run eagerly" in out


async def test_info_of_a_target_that_says_less(running: Any, outrider: Any) -> None:
    _, out, _ = await outrider("info", "--target", running.address)
    assert [line.split()[0] for line in out.splitlines()] == ["target", "versions", "model", "context", "drafter"]


async def test_info_of_nobody(outrider: Any, unused_tcp_port: int) -> None:
    status, out, err = await outrider("info", "--target", f"127.0.0.1:{unused_tcp_port}")
    assert (status, out) == (1, "") and "cannot reach" in err


async def test_chat(running: Any, outrider: Any) -> None:
    lines = "count\n/plain\nagain\n/reset\nonce more\n/what\n/quit\n"
    status, out, err = await outrider("chat", "--target", running.address, "--max-tokens", "3", stdin=lines)
    assert status == 0, err
    assert out.count("one two three") == 3 and "3 tokens in 1 steps" in out and "drafts are off" in out
    requests = [request for request, _, _ in running.target.requests]
    assert [len(request.chat.messages) for request in requests] == [1, 3, 1]
    assert requests[1].chat.messages[1].content == "one two three"
    assert not requests[1].speculation.enabled


async def test_a_draft_that_is_not_there_is_told_how_to_have(outrider: Any, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    status, _, err = await outrider("corpus", "list", "--draft", address)
    assert status == 1 and "Connection refused" in err and f"outrider up --draft-listen {address}" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "hello", "--max-nodes", "-1"], "--max-nodes: must be at least 0"),
        (
            ["generate", "hello", "--tls-key", "key.pem"],
            "a client certificate needs its key, and a key its certificate",
        ),
        (["bench", "--prompts", "none.jsonl", "--repeats", "0"], "--repeats: must be at least 1"),
    ],
)
async def test_options_that_cannot_be_meant(outrider: Any, words: list[str], message: str) -> None:
    status, _, err = await outrider(*words)
    assert status == 2 and message in err and "Traceback" not in err


async def test_timeout_is_the_deadline_of_every_command(running: Any, outrider: Any) -> None:
    for words in (["info"], ["health"], ["generate", "hello"]):
        status, _, err = await outrider(*words, "--target", running.address, "--timeout", "25")
        assert status == 0, err
    given = [seconds for seconds in running.target.deadlines if seconds is not None]
    # Health's own call for the model keeps the one for short calls.
    assert len(given) == 4 and sum(11 < seconds < 26 for seconds in given) == 3


async def test_ctrl_c_ends_the_reading_of_documents_at_once(running: Any, tmp_path: Path) -> None:
    """Of a file that never ends, say."""
    path = tmp_path / "documents.jsonl"
    os.mkfifo(path)
    command = [sys.executable, "-m", "outrider_client.cli", "corpus", "add", str(path), "--draft", running.address]
    # Where the tests run behind a shell, Ctrl-C may be ignored, and so by what they start.
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, heeded)
    # Opened once the command reads.
    with await asyncio.to_thread(path.open, "w"):
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), HUNG_SECONDS) == 130


async def test_corpus_of_token_ids(running: Any, outrider: Any, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('[1, 2, 3]\n\n{"token_ids": [4, 5]}\n')
    words = ["corpus", "add", str(path), "--draft", running.address, "--tenant", "acme", "--corpus", "docs"]
    status, out, err = await outrider(*words)
    assert (status, out) == (0, "added 5 tokens; the trie has 10 nodes\n"), err
    assert running.draft.taught == [("acme", "docs", 5)]


async def test_corpora_are_listed_and_deleted(running: Any, outrider: Any) -> None:
    access = ["--draft", running.address, "--tenant", "acme"]
    status, out, err = await outrider("corpus", "list", *access)
    assert (status, out) == (0, "") and "there are no corpora" in err
    running.draft.taught += [("acme", "", 3), ("acme", "docs", 5), ("other", "[b]notes", 7), ("other", "", 9)]
    status, out, _ = await outrider("corpus", "list", *access)
    rows = [line.split() for line in out.splitlines()]
    assert status == 0 and rows == [
        ["NAME", "OWNER", "TOKENS", "DOCUMENTS", "NODES", "MEMORY", "KIND"],
        ["-", "acme", "3", "1", "6", "1.0", "MB", "own"],
        ["docs", "acme", "5", "1", "10", "1.0", "MB", "shared"],
        ["[b]notes", "other", "7", "1", "14", "1.0", "MB", "shared"],
    ]
    status, out, _ = await outrider("corpus", "delete", "docs", *access)
    assert (status, out) == (0, "deleted docs: 5 tokens, 10 nodes\n")
    status, _, err = await outrider("corpus", "delete", "docs", *access)
    assert status == 1 and "UNKNOWN_CORPUS" in err
    assert ("acme", "docs", 5) not in running.draft.taught


@pytest.mark.parametrize("line", ["{", '"text"', "[1.5]", '{"token_ids": [-1]}', "[true]"])
def test_wrong_corpus_line(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(f"[1]\n{line}\n")
    with pytest.raises(SystemExit) as ended:
        main(["corpus", "add", str(path)])
    assert ended.value.code == 2
    assert f"{path}:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target", "--help"], "--max-running"),
        (["draft", "--help"], "--drafter"),
        (["model"], "pull"),
        (["train-head", "--help"], "--tokens"),
    ],
    ids=["target", "draft", "model", "train-head"],
)
async def test_flags_of_services_are_theirs(outrider: Any, words: Sequence[str], said: str) -> None:
    _, out, err = await outrider(*words)
    assert said in out + err


async def test_weights_that_cannot_be_sent(running: Any, outrider: Any, tmp_path: Any, unused_tcp_port: int) -> None:
    absent = tmp_path / "absent.safetensors"
    status, _, err = await outrider("weights", "update", str(absent), "--target", running.address)
    assert (status, err) == (1, f"error: {absent}: No such file or directory\n")
    present = tmp_path / "present.safetensors"
    present.touch()
    status, _, err = await outrider("weights", "update", str(present), "--target", f"127.0.0.1:{unused_tcp_port}")
    assert status == 1 and "cannot reach" in err and "Is it running? `outrider up`" in err
