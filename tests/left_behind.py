"""What holds for the whole process is behind each file of tests as it was before it, so that no file's verdict depends
on those that ran before: a `main` that tests call prepares the whole process, as it should."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest

# Without the alarm, which limits the time of each test.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_put_back = pytest.StashKey[list[Callable[[], object]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    module = item.getparent(pytest.Module)
    if module is not None and _put_back not in module.stash:
        module.stash[_put_back] = list(_as_now())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    yield
    module = item.getparent(pytest.Module)
    if module is None or (nextitem is not None and nextitem.getparent(pytest.Module) is module):
        return
    for each in module.stash[_put_back]:
        each()
    # Cycles of this file: the collector looks seldom, and services that end let it look at all libraries again.
    gc.collect()
    gc.freeze()


def _as_now() -> Generator[Callable[[], object], None, None]:
    """What puts each thing back as it is now."""
    environment, folder, executable = dict(os.environ), os.getcwd(), sys.executable
    yield lambda: _set_environment(environment)
    yield lambda: os.chdir(folder)
    yield lambda: setattr(sys, "executable", executable)
    rounds, interval = gc.get_threshold(), sys.getswitchinterval()
    yield lambda: gc.set_threshold(*rounds)
    yield gc.enable
    yield lambda: sys.setswitchinterval(interval)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    yield lambda: [signal.signal(number, handler) for number, handler in handlers.items()]
    root, said = logging.root, list(logging.root.handlers)
    level, disabled = root.level, root.manager.disable
    yield lambda: (root.setLevel(level), setattr(root, "handlers", said), logging.disable(disabled))
    if torch := sys.modules.get("torch"):
        for read, write in (
            (torch.get_default_dtype, torch.set_default_dtype),
            (torch.get_num_threads, torch.set_num_threads),
            (torch.is_grad_enabled, torch.set_grad_enabled),
            (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        ):
            yield _writing(write, read())


def _writing(write: Callable[[Any], object], value: Any) -> Callable[[], object]:
    return lambda: write(value)


def _set_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
