"""Compiles kernels for an H100 or H200, which takes no GPU, as they would be launched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from examples import is_full
from pairs import covering
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

_TYPES = {torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}


class Compiling:
    """Stands where a kernel does, and compiles it for the arguments that it would be launched with."""

    def __init__(self, kernel: Any, needed: dict[str, int], *, skip: bool = False) -> None:
        """`needed` gets bytes of shared memory of one program; with `skip` nothing is compiled."""
        self.kernel = kernel
        self.needed = needed
        self.skip = skip

    def __getitem__(self, grid: tuple[int, ...]) -> Compiling:
        return self

    def __call__(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        if self.skip:
            return
        names = self.kernel.arg_names
        signature = dict.fromkeys(names, "constexpr")
        for name, argument in zip(names, arguments, strict=False):
            if argument is None:
                constants[name] = None
            else:
                signature[name] = _TYPES[argument.dtype] if isinstance(argument, torch.Tensor) else "i32"
        assert constants.keys() == {name for name, type_name in signature.items() if type_name == "constexpr"}
        source = ASTSource(self.kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        found = compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages}
        )
        name = f"{self.kernel.__name__}, {num_warps} warps, {sorted(constants.items(), key=str)}"
        self.needed[name] = int(found.metadata.shared)


def few(found: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Of kernels to compile, each (name, kernel, .., constants, options), those that together have every kernel with
    each value of a constant that is no length; all of them in `make test-full`."""
    everything = list(found)
    if is_full():
        return everything
    kept = covering([_parts(kernel.__name__, constants, options) for _, kernel, *_, constants, options in everything])
    return [everything[place] for place in sorted(kept)]


def _parts(kernel: str, constants: dict[str, Any], options: Any) -> set[tuple[Any, ...]]:
    stages = options.get("num_stages") if isinstance(options, dict) else None
    chosen = {
        (kernel, name, value)
        for name, value in constants.items()
        if isinstance(value, bool | str) or name.startswith("BLOCK") or name == "AHEAD"
    }
    return chosen | {(kernel,), (kernel, "num_stages", stages)}
