"""Runs code whose kernels are not launched, and collects what their launches would compile."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tree_kernels.compiled_layers import eagerly

_ATEN = torch.ops.aten
# What makes tensors that kernels fill.
_UNFILLED = {
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}


class _Zeroed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what no kernel fills now: PyTorch's own operations may read it, some of them as indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _UNFILLED else made


# A draft in the target's process may be loaded at the same time.
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def collecting(put: Callable[[str], object]) -> Iterator[None]:
    """While the block runs, launches of this thread launch nothing, and `put` gets what each would compile that was
    not compiled yet, once: JSON, see `child.compile_entry`. Another thread waits for its end. PyTorch's own operations
    run, on zeros where a kernel would have written; layers that `torch.compile` compiles run as they are written."""
    owner, seen = threading.get_ident(), set[str]()
    _one_at_a_time.acquire()
    usual_run, usual_hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        # To warm up is to compile without a launch.
        ours = threading.get_ident() == owner
        return usual_run(self, *arguments, grid=grid, warmup=warmup or ours, **named)

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        if threading.get_ident() != owner:
            return False
        target = driver.active.get_current_target()
        entry = {
            "module": fn.module,
            "name": fn.jit_function.fn.__qualname__,
            "cache_key": fn.jit_function.cache_key,
            "target": [target.backend, target.arch, target.warp_size],
            "specialization": json.loads(compile["specialization_data"]),
        }
        text = json.dumps(entry)
        if text not in seen:
            seen.add(text)
            put(text)
        # Not to be compiled here.
        return True

    JITFunction.run = run
    knobs.runtime.jit_cache_hook = note
    try:
        with eagerly(), _Zeroed():  # type: ignore[no-untyped-call]
            yield
    finally:
        JITFunction.run = usual_run
        knobs.runtime.jit_cache_hook = usual_hook
        _one_at_a_time.release()
