"""A process that works for this one, and the socket between the two."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

# What a socket holds of frames while their reader is busy: some of hidden states, or of reports. Chosen, not measured;
# the kernel may grant less.
_BUFFER_BYTES = 1 << 22


def start_child(command: Sequence[str], *, own_group: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a command with the number of its socket as last argument. Returns the process and our end, which is not
    inherited: the child sees it closed when this process ends, in whatever way.

    In a group of its own a terminal's Ctrl-C does not reach it.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [*command, str(descriptor)],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            process_group=0 if own_group else None,
        )
    return process, ours
