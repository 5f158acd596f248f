"""Layers that `torch.compile` compiles, and what it leaves as it is. The compiler takes seconds to import,
which processes without such layers do not pay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

_F = TypeVar("_F", bound=Callable[..., Any])
# What each function of `uncompiled` calls: it as it is, or apart from the compiler once a layer was compiled.
_called: list[list[Callable[..., Any]]] = []
_compiles = False


def uncompiled(function: _F) -> _F:
    """A function that is not compiled as a part of a layer: as `torch.compiler.disable`, whose import it spares."""
    called: list[Callable[..., Any]] = [_apart(function) if _compiles else function]
    _called.append(called)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return called[0](*arguments, **named)

    return call  # type: ignore[return-value]


def compile_layer(layer: nn.Module, backend: str = "inductor") -> None:
    """Compile a layer for each size of its inputs, when it is first run with it, by a backend of `torch.compile`."""
    global _compiles
    if not _compiles:
        _compiles = True
        for called in _called:
            called[0] = _apart(called[0])
    layer.compile(backend=backend, dynamic=False)


def eagerly() -> AbstractContextManager[object]:
    """While the block runs, compiled layers run as they are written."""
    if not _compiles:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def recompiling(limit: int) -> AbstractContextManager[object]:
    """While the block runs, a layer may be compiled for so many sizes."""
    if not _compiles:
        return nullcontext()
    patch: AbstractContextManager[object] = torch._dynamo.config.patch(recompile_limit=limit)
    return patch


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept
