"""Processes of ranks that are stopped from outside."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import msgspec
import psutil
from waits import HUNG_SECONDS

from target_service.config import TargetConfig

# Loads the model of a configuration, and serves it until it is ended.
_LOADING = """
import logging, signal, sys
import msgspec
from target_service.config import TargetConfig
from target_service.model.ranks.leading import load_ranks
logging.basicConfig()
loaded = load_ranks(msgspec.json.decode(sys.argv[1], type=TargetConfig))
print("serving", flush=True)
signal.pause()
"""


def end_by_a_rank_that_hangs(config: TargetConfig) -> None:
    """The second rank of two stops, between passes: the first one finds out, and ends both."""
    # Long enough for a rank that runs to answer on a busy machine.
    of_test = msgspec.json.encode(replace(config, heartbeat_seconds=10.0)).decode()
    command = [sys.executable, "-c", _LOADING, of_test]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as leading:
        try:
            assert leading.stdout is not None and leading.stdout.readline() == "serving\n"
            ranks = [
                one
                for one in psutil.Process(leading.pid).children(recursive=True)
                if "target_service.model.ranks" in one.cmdline()
            ]
            (follower,) = ranks
            follower.suspend()
            _, said = leading.communicate(timeout=HUNG_SECONDS)
        finally:
            leading.kill()
    assert leading.returncode == 1
    assert "rank 1 has not answered for 10 s: the model is not whole any more" in said
    psutil.wait_procs([follower], HUNG_SECONDS)
    assert not follower.is_running()
