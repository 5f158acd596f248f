"""Follower processes: started for every device but the first, watched while they train, ended with the leader."""

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
from outrider.processes.python import module_command

# Between checks that processes are alive. Chosen, not measured: short beside a training of minutes.
_POLL_SECONDS = 0.2
# From the end of a follower until this process exits, unless the leader notices by itself. A device that waits for the
# dead one's gradients may never return, and a thread that waits for that device cannot be interrupted. Chosen, not
# measured: a validation in progress should end and be saved.
_GRACE_SECONDS = 60.0
# For a process to exit, and for its exit to be visible after its connection broke. Chosen, not measured: both take well
# below a second on an idle machine.
_END_SECONDS = 20.0


class FollowerFailed(Exception):
    """A process that trained on another device has ended early, or cannot be reached. It has reported why."""


class Followers:
    """The processes of a run's followers, and the leader's membership in their `group`."""

    def __init__(self, group: Group, devices: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.group, self._devices, self._processes = group, devices, processes

    def check(self) -> None:
        """Raise `FollowerFailed` if a process has ended."""
        for device, process in zip(self._devices, self._processes, strict=True):
            status = process.poll()
            if status is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise FollowerFailed(f"the process that trained on {device} {how}")

    def explain(self, error: GroupLost) -> FollowerFailed:
        """The cause of a lost group: the process that has ended, as soon as that is visible."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            try:
                self.check()
            except FollowerFailed as found:
                return found
            time.sleep(_POLL_SECONDS)
        return FollowerFailed(f"the devices have lost each other: {error}")

    def end(self, seconds: float) -> None:
        """Wait this long for the processes to exit, then kill them."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            # Safe, since the leader has the same state; needed, since it may wait for a device for ever.
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def watch(self, over: threading.Event) -> None:
        """Until `over` is set: exit when a follower has ended and the leader has not noticed for `_GRACE_SECONDS`."""
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
    """Run one process for each of `devices` but the first during the block: `python -m module follow SETTINGS RANK
    STORE`. At the end of the block they are dismissed; if it fails, they are killed. They also exit when this process
    does, see `end_with_leader`. Raises `FollowerFailed` in place of a `GroupLost` of the block."""
    environment = shared_cores(len(devices))
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        store = Path(folder) / "store"
        group = Group(store, 0, len(devices))
        processes = [
            # In its own process group: Ctrl-C reaches the leader alone, which ends the followers.
            subprocess.Popen(
                module_command(module, "follow", settings, str(rank), str(store)),
                stdin=subprocess.PIPE,
                env=environment,
                process_group=0,
            )
            for rank in range(1, len(devices))
        ]
        started, seconds_to_end = Followers(group, devices[1:], processes), 0.0
        watching = threading.Thread(target=started.watch, args=(over,), name="followers", daemon=True)
        watching.start()
        try:
            yield started
            over.set()
            group.dismiss()
            seconds_to_end = _END_SECONDS
            # Before the followers are waited for: NCCL closes a group collectively.
            group.leave()
        except GroupLost as error:
            raise started.explain(error) from error
        finally:
            over.set()
            watching.join()
            started.end(seconds_to_end)
            group.leave()


def shared_cores(processes: int) -> dict[str, str]:
    """The environment of one of several processes: by default each would start threads and compilers for all cores."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads} | dict(os.environ)


def end_with_leader() -> None:
    """In a follower: exit when the leader has ended, which closes the pipe to this process's stdin."""

    def wait() -> None:
        # Not `sys.stdin`, whose lock the interpreter would wait for at exit.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, name="leader", daemon=True).start()


def wait_for_the_end() -> None:
    """In a follower whose group is lost: stay alive until the leader has found which process ended first."""
    time.sleep(_GRACE_SECONDS + _END_SECONDS)
