"""Starts a child process with a socket to it, receives from the other process, and ends the child."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence


def start_child(command: Sequence[str], *, own_group: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a command with the file descriptor of its socket as last argument; returns the process and our end. The
    child does not inherit our end, so it sees the socket closed when this process ends in any way. With `own_group` a
    terminal's Ctrl-C does not reach the child."""
    ours, theirs = socket.socketpair()
    with theirs:
        for end in (ours, theirs):
            # The socket's buffer for frames while their reader is busy. Chosen, not measured; the kernel may grant
            # less.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        descriptor = theirs.fileno()
        try:
            process = subprocess.Popen(
                [*command, str(descriptor)],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                process_group=0 if own_group else None,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def received(connection: socket.socket, most: int = 1 << 16, flags: int = 0) -> bytes:
    """At most so many bytes of the process at the other end, once there are some; none if it is gone."""
    try:
        return connection.recv(most, flags)
    except ConnectionError:
        return b""


def exit_status(process: subprocess.Popen[bytes]) -> int:
    """The status of a child whose socket is closed, which ends it. One that hangs is killed."""
    try:
        # For a process to end once its socket is closed.
        return process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
