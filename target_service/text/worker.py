"""The text process: `python -m target_service.text.worker FD`, started by `processes.TextProcess`.

It loads the tokenizer once, and forks a worker for each socket that it is sent. A worker has a limit of memory, and of
processor time for each job, which the kernel enforces: neither a regular expression in a tokenizer nor a loop in a
template can be ended in any other way. All end with their sockets.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from tokenizers import Tokenizer

from outrider.processes.framing import first_body
from target_service.text.chat_template import NotContinued, RenderedTooLong, TemplateFailed
from target_service.text.jobs import (
    EncodeChat,
    Encoded,
    EncodeText,
    Failed,
    Job,
    Message,
    Tokenizing,
    pack,
    receive,
    unpack,
)
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

# Processor seconds of a job: some for any, and more for each byte. Twenty times what a large vocabulary takes on a slow
# machine (0.2 µs a byte). Chosen.
SECONDS, SECONDS_PER_BYTE = 1.0, 4e-6


def main(descriptor: int) -> int:
    """Load, and fork workers until the socket closes."""
    for name in (signal.SIGINT, signal.SIGTERM):
        # The serving process ends this one; a terminal's Ctrl-C goes to both.
        signal.signal(name, signal.SIG_IGN)
    # Workers are reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        # Nothing is read beyond it: what follows comes with sockets.
        first = unpack(body) if (body := first_body(control)) else None
        if not isinstance(first, Tokenizing):
            return 1
        encoder = _encoder(first)
        # What is shared with workers stays shared: the collector would write to all of it.
        gc.collect()
        gc.freeze()
        while True:
            data, sockets, *_ = socket.recv_fds(control, 1, 1)
            if not data:
                return 0
            for worker in sockets:
                if os.fork() == 0:
                    control.close()
                    with socket.socket(fileno=worker) as connection:
                        _work(connection, encoder)
                    os._exit(0)
                os.close(worker)


def _encoder(first: Tokenizing) -> PromptEncoder:
    tokenizer = ModelTokenizer(
        Tokenizer.from_str(first.backend),
        chat_template=first.chat_template,
        special_tokens=first.special_tokens,
        split_special=first.split_special,
    )
    return PromptEncoder(tokenizer)


def _work(connection: socket.socket, encoder: PromptEncoder) -> None:
    """Answer jobs until the socket closes."""
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for job in receive(connection):
        assert isinstance(job, Job)
        signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_BYTE * _size(job))
        try:
            answer: Message = Encoded(_encode(encoder, job))
        except TemplateFailed as failure:
            answer = Failed(str(failure), continuing=isinstance(failure, NotContinued))
        except RenderedTooLong:
            answer = Failed("")
        except MemoryError:
            answer = Failed("takes too much memory")
        # A tokenizer's file may make its library raise anything; its text may quote the prompt.
        except Exception as error:
            answer = Failed(f"cannot be tokenised ({type(error).__name__})")
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            connection.sendall(pack(answer))
        except OSError:
            return


def _encode(encoder: PromptEncoder, job: Job) -> list[int]:
    if isinstance(job, EncodeText):
        return encoder.text(job.text, job.special, begin=job.begin)
    return encoder.chat(
        job.turns,
        job.special,
        job.most,
        ending=job.ending,
        arguments=job.arguments,
        tools=job.tools,
        owner=job.owner,
    )


def _size(job: Job) -> int:
    if isinstance(job, EncodeChat):
        given = len(str(job.arguments)) + len(str(job.tools))
        return given + sum(len(str(value)) for turn in job.turns for value in turn.values())
    return len(job.text)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = Path("/proc/self/statm")
    if own.exists():
        # Beyond what a worker has once the tokenizer is loaded. A megabyte of text takes some 60 MB. Chosen.
        most = int(own.read_text().split()[0]) * resource.getpagesize() + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
