"""Runs text jobs in processes of their own, which end where a job takes too long or too much memory."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import weakref
from collections.abc import Sequence

from outrider.processes.children import exit_status, start_child
from outrider.processes.python import module_command
from target_service.text.jobs import Encoded, Failed, Job, Tokenizing, pack, receive
from target_service.text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)


class TextRefused(Exception):
    """A text that cannot be encoded; the message has the reason, and nothing of the text. Empty for a conversation that
    is too long once the template is filled in. `continuing`: its last message cannot be continued."""

    def __init__(self, reason: str, *, continuing: bool = False) -> None:
        super().__init__(reason)
        self.continuing = continuing


class TextProcess:
    """Encodes texts for one model. Any thread may use it; a job takes its thread until it is done.

    The process is started by the first job. It ends when this object does.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, command: Sequence[str] = module_command("target_service.text.worker")
    ) -> None:
        self._tokenizer = tokenizer
        self._command = command
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._control: socket.socket | None = None
        self._end: weakref.finalize[..., TextProcess] | None = None

    def encode(self, job: Job) -> list[int]:
        """The token ids of a job. Raises `TextRefused`."""
        worker = self._worker()
        try:
            answer = _exchange(worker, job)
        except OSError:
            worker.close()
            raise TextRefused("takes the model's tokenizer or chat template too long, or too much memory") from None
        with self._lock:
            self._idle.append(worker)
        if isinstance(answer, Failed):
            raise TextRefused(answer.reason, continuing=answer.continuing)
        return answer.token_ids

    def close(self) -> None:
        """End the processes. A job that runs still ends by itself, or by its limit."""
        with self._lock:
            for worker in self._idle:
                worker.close()
            self._idle.clear()
            if self._end is not None:
                self._end()
            self._control = None

    def _worker(self) -> socket.socket:
        """A worker that is free, or another one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            for _ in range(2):
                control = self._control = self._control or self._started()
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(control, [b"w"], [theirs.fileno()])
                        return ours
                    except OSError:
                        # The process has ended: it is started once more.
                        ours.close()
                        if self._end is not None:
                            self._end()
                        self._control = None
        raise TextRefused("cannot be tokenised: the process for it has ended")

    def _started(self) -> socket.socket:
        """The socket of a process that loads the tokenizer."""
        tokenizer = self._tokenizer
        process, control = start_child(self._command, own_group=True)
        self._end = weakref.finalize(self, _ended, process, control, self._idle)
        with contextlib.suppress(OSError):
            control.sendall(
                pack(
                    Tokenizing(
                        tokenizer.backend.to_str(),
                        tokenizer.chat_template,
                        tokenizer.special_tokens,
                        tokenizer.split_special,
                    )
                )
            )
        return control


def _exchange(worker: socket.socket, job: Job) -> Encoded | Failed:
    """Send a job, and wait for its answer. Raises `OSError` where the worker ends first."""
    worker.sendall(pack(job))
    for answer in receive(worker):
        assert isinstance(answer, Encoded | Failed)
        return answer
    raise ConnectionError("the worker has ended")


def _ended(process: subprocess.Popen[bytes], control: socket.socket, idle: list[socket.socket]) -> None:
    for worker in idle:
        worker.close()
    control.close()
    status = exit_status(process)
    if status:
        logger.warning("the text process ended with status %d", status)
