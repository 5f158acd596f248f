"""This process's children, by what stands on their command lines.

Other tests leave children that live as long as the test process, such as multiprocessing's resource tracker: a test
that starts a process must look for its own.
"""

from __future__ import annotations

import psutil


def living_children(argument: str) -> list[psutil.Process]:
    """Children with an argument that contains `argument`, but for those that have ended and wait to be reaped."""
    return [child for child in psutil.Process().children() if _has(child, argument)]


def _has(child: psutil.Process, argument: str) -> bool:
    try:
        return any(argument in given for given in child.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False
