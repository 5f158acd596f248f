"""Followers as processes: started for every device but the first, watched while they train, ended with the leader."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from draft_service.training.parallel.group import Group, GroupLost

# Between looks at whether a process lives. Chosen, not measured: nobody notices it beside a training of minutes.
_POLL_SECONDS = 0.2
# After a follower has ended: until the leader has noticed by itself. A device that waits for the dead one's gradients
# may never come back, and a thread that waits for that device cannot be woken. Chosen, not measured: a validation that
# is under way should end and be saved.
_GRACE_SECONDS = 60.0
# For a process to end that was asked to, and for the end of one to be seen after its connection broke. Chosen, not
# measured: both take well below a second on an idle machine.
_END_SECONDS = 20.0


class FollowerFailed(Exception):
    """A process that trained on another device has ended before its time, or is out of reach. It has said why."""


class Followers:
    """The processes of a run's followers.

    Attributes:
        group: the leader's place among them.
    """

    def __init__(self, group: Group, devices: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.group = group
        self._devices = devices
        self._processes = processes

    def check(self) -> None:
        """Raise `FollowerFailed` if one has ended."""
        for device, process in zip(self._devices, self._processes, strict=True):
            status = process.poll()
            if status is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise FollowerFailed(f"the process that trained on {device} {how}")

    def explain(self, error: GroupLost) -> FollowerFailed:
        """What a lost group comes from: whoever has ended, as soon as that is seen."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            try:
                self.check()
            except FollowerFailed as found:
                return found
            time.sleep(_POLL_SECONDS)
        return FollowerFailed(f"the devices have lost each other: {error}")

    def end(self, seconds: float) -> None:
        """Wait for so long, then end them."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            # It holds nothing that is not the leader's too, and may wait for a device for ever.
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def watch(self, over: threading.Event) -> None:
        """Until `over`: end this process when a follower has ended and nothing came of it for `_GRACE_SECONDS`."""
        while not over.wait(_POLL_SECONDS):
            try:
                self.check()
            except FollowerFailed as error:
                if over.wait(_GRACE_SECONDS):
                    return
                sys.stderr.write(f"error: {error}\n")
                sys.stderr.flush()
                self.end(0.0)
                os._exit(1)


@contextlib.contextmanager
def followers(module: str, settings: str, devices: Sequence[str]) -> Iterator[Followers]:
    """One process for each of `devices` but the first: `python -m module SETTINGS RANK STORE`, for the block's time.

    At its end they are dismissed, and ended at once where the block fails. They end by themselves when this process
    does, in whatever way: `end_with_leader`.

    Raises:
        FollowerFailed: in place of a `GroupLost` that the block raises.
    """
    environment = one_of(len(devices))
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        store = Path(folder) / "store"
        group = Group(store, 0, len(devices))
        processes = [
            # A group of its own: Ctrl-C is for the leader, who ends them.
            subprocess.Popen(
                [sys.executable, "-m", module, settings, str(rank), str(store)],
                stdin=subprocess.PIPE,
                env=environment,
                process_group=0,
            )
            for rank in range(1, len(devices))
        ]
        started, time_to_end = Followers(group, devices[1:], processes), 0.0
        watching = threading.Thread(target=started.watch, args=(over,), name="followers", daemon=True)
        watching.start()
        try:
            yield started
            over.set()
            group.dismiss()
            time_to_end = _END_SECONDS
            # While they leave it too: NCCL closes a group together.
            group.leave()
        except GroupLost as error:
            raise started.explain(error) from error
        finally:
            over.set()
            watching.join()
            started.end(time_to_end)
            group.leave()


def one_of(processes: int) -> dict[str, str]:
    """The environment of one of several processes that share the cores. Each would start a pool of compilers and of
    threads for all of them otherwise."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads} | dict(os.environ)


def end_with_leader() -> None:
    """In a follower: end this process when the leader's has ended, which closes the pipe that is our stdin."""

    def wait() -> None:
        # Not over `sys.stdin`, whose lock Python's end would wait for.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, name="leader", daemon=True).start()


def wait_for_the_end() -> None:
    """In a follower whose group is lost: let the leader find who has ended first, and end this one."""
    time.sleep(_GRACE_SECONDS + _END_SECONDS)
