"""Services of two ranks, of which one is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waits import HUNG_SECONDS, ever_longer, wait_until
from warm_python import started_by

from outrider.errors import EngineDead
from outrider.processes.python import module_command
from outrider.sampling import SamplingParams
from outrider_client import SyncClient


def end_by_a_rank_that_hangs(folder: Path, tmp_path: Path, *flags: str) -> None:
    """Its second rank stops within an answer: the service says which has not answered for a heartbeat."""
    heartbeats = ever_longer()
    # Hardly any machine answers all of its pings in time.
    next(heartbeats)
    for seconds in heartbeats:
        every = (*flags, "--heartbeat-seconds", str(seconds))
        said = end_by_a_lost_rank(folder, tmp_path, psutil.Process.suspend, *every)
        if said is not None:
            assert f"rank 1 has not answered for {seconds:.0f} s: the model is not whole any more" in said
            return
    raise AssertionError("no heartbeat was long enough for a rank that runs")


def end_by_a_lost_rank(folder: Path, tmp_path: Path, lose: Callable[[psutil.Process], None], *flags: str) -> str | None:
    """What a service of the model in `folder` has logged, whose second rank is lost within an answer: its client gets
    an error, it ends with status 1, and leaves no process behind. None where it ended before that."""
    address, log = f"unix:{tmp_path}/target.sock", tmp_path / "target.log"
    flags = ("--listen", address, "--model", str(folder), "--tensor-parallel", "2", "--row-budget", "all", *flags)
    command = (*module_command("target_service"), *flags)
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as service:
        try:
            children = _without_second_rank(service, address, lose)
            status = service.wait(HUNG_SECONDS)
        finally:
            service.kill()
    if children is None:
        return None
    assert status == 1
    psutil.wait_procs(children, HUNG_SECONDS)
    assert not any(child.is_running() for child in children)
    return log.read_text()


def _without_second_rank(
    service: subprocess.Popen[bytes], address: str, lose: Callable[[psutil.Process], None]
) -> list[psutil.Process] | None:
    """The processes of a service that has lost one; None where it ended before."""
    with SyncClient.connect(address) as client:
        wait_until(lambda: service.poll() is not None or _serving(client))
        try:
            started = started_by(psutil.Process(service.pid))
            children = [one.process for one in started]
            (follower,) = (one.process for one in started if "target_service.model.ranks" in one.words)
            for rank in children:
                listening = [one.laddr.ip for one in rank.net_connections("inet") if one.status == "LISTEN"]
                assert set(listening) <= {"127.0.0.1"}, "ranks are reached from this host alone"
            answer = iter(client.generate(token_ids=[5, 6], sampling=SamplingParams(max_tokens=200, ignore_eos=True)))
            next(answer)
            lose(follower)
        except (EngineDead, ConnectionError, ValueError, psutil.Error):
            assert service.wait(HUNG_SECONDS) == 1
            return None
        with pytest.raises(EngineDead, match="the engine has failed"):
            list(answer)
    return children


def _serving(client: SyncClient) -> bool:
    try:
        return client.serving()
    except ConnectionError:
        return False
