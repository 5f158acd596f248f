"""Gluon's `warp_specialize`, with as many registers for every warp.

Triton 3.6 always sets registers for each kind of warps. ptxas then waits for every product of a warpgroup before the
next one ("serialized due to insufficient register resources"), although none of them spills: a seventh of the time of
attention on an H200 (`benchmarks/results/2026-11-29-h200-prompt-attention.md`). 3.9 sets them where it is asked to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

_MAY_LEAVE_REGISTERS = inspect.signature(gl.warp_specialize).parameters["worker_num_regs"].default is None


class _Instead:
    """An object of which some attributes are others."""

    def __init__(self, of: Any, **others: Any) -> None:
        self._of = of
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._of, name)


@builtin  # type: ignore[untyped-decorator, unused-ignore]
def warp_specialize(
    functions_and_args: Sequence[tuple[Callable[..., object], Any]],
    worker_num_warps: Sequence[Any],
    _semantic: Any = None,
    _generator: Any = None,
) -> object:
    """The first function runs in the kernel's own warps, each other one in so many warps beside them."""
    warps = [getattr(count, "value", count) for count in worker_num_warps]
    if _MAY_LEAVE_REGISTERS:
        return _semantic.warp_specialize(functions_and_args, warps, None, _generator)

    def create(*arguments: Any) -> _Instead:
        made = _semantic.builder.create_warp_specialize(*arguments)
        return _Instead(made, set_requested_registers=lambda _: None)

    builder = _Instead(_semantic.builder, create_warp_specialize=create)
    apart = _Instead(_semantic, builder=builder)
    return type(_semantic).warp_specialize(apart, functions_and_args, warps, warps, _generator)
