"""Processes that compile kernels at the same time."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Sequence

# The module that a process runs: `python -P -m CHILD`.
CHILD = "tree_kernels.ahead.child"


class CompilerProcesses:
    """Compiles entries of `collecting.collecting`, each by the first process that is free."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        """Start so many processes of a command that runs `CHILD`. They see no GPU."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
            )
            for _ in range(count)
        ]
        self._entries: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submitted = self._done = 0
        self._running = count
        self.failures: list[str] = []
        for process in self._processes:
            threading.Thread(target=self._feed, args=(process,), name="compilers", daemon=True).start()

    def submit(self, entry: str) -> None:
        """Compile this. Any thread."""
        with self._changed:
            self._submitted += 1
        self._entries.put(entry)

    def wait(self, seconds: float) -> bool:
        """Wait until all is compiled that was submitted, for at most so long, and no longer than a process is left.
        Returns whether all of it was tried."""
        with self._changed:
            self._changed.wait_for(lambda: self._done == self._submitted or not self._running, seconds)
            return self._done == self._submitted

    def close(self) -> None:
        """End the processes."""
        for _ in self._processes:
            self._entries.put(None)
        # Not SIGTERM, which a process inherits to ignore where its parent does. Files of Triton's cache are whole.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _feed(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            while (entry := self._entries.get()) is not None:
                process.stdin.write(entry + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    # It has ended, and what it had is compiled where it is launched.
                    self._finish("a process that compiles has ended")
                    return
                self._finish(answer.strip())
        except OSError as error:
            self._finish(f"a process that compiles cannot be reached: {error}")
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _finish(self, failure: str) -> None:
        with self._changed:
            self._done += 1
            if failure:
                self.failures.append(failure)
            self._changed.notify_all()
