"""Compiles the kernels of `node_table` for an H100 or H200, which takes no GPU, as they would be launched, and writes
what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import random_tables
import torch
from random_tables import CASES, Case, given_for, random_verdicts, seat, table_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tree_kernels.node_table import triton_backend as _triton_node_table

KERNELS = ("_begin_kernel", "_go_on_kernel", "lay_out_kernel", "keep_kernel", "take_kernel")
MAX_SEQUENCES = 256
TYPES = {torch.int32: "*i32"}


class Compiling:
    """Stands where a kernel does, and compiles it for the arguments that it would be launched with."""

    def __init__(self, kernel: Any, needed: dict[str, int]) -> None:
        """`needed` gets bytes of shared memory of one program."""
        self.kernel = kernel
        self.needed = needed

    def __getitem__(self, grid: tuple[int, ...]) -> Compiling:
        return self

    def __call__(self, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        names = self.kernel.arg_names
        signature = dict.fromkeys(names, "constexpr")
        for name, argument in zip(names, arguments, strict=False):
            signature[name] = TYPES[argument.dtype] if isinstance(argument, torch.Tensor) else "i32"
        assert constants.keys() == {name for name, type_name in signature.items() if type_name == "constexpr"}
        source = ASTSource(self.kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        name = f"{self.kernel.__name__}, {num_warps} warps, {sorted(constants.items())}"
        self.needed[name] = int(found.metadata.shared)


def launch(case: Case, needed: dict[str, int]) -> list[str]:
    """All that is launched around a pass, after warming up. What was not compiled by then."""
    given = given_for(case, 0)
    table, verdicts = table_for(case, given.tokens, "triton"), random_verdicts(given.step, 3, random.Random(0))
    table.warm_up(given.step)
    warmed = set(needed)
    seat(table, given.places, given.tables)
    table.begin(given.step, given.pending, given.moves)
    table.keep_accepted(given.step.token_ids, given.step.slots, given.step.parameters, verdicts)
    table.go_on(given.step, verdicts)
    table.report(given.step, verdicts)
    return sorted(needed.keys() - warmed)


def main() -> None:
    needed: dict[str, int] = {}
    for name in KERNELS:
        setattr(_triton_node_table, name, Compiling(getattr(_triton_node_table, name), needed))
    random_tables.MAX_SEQUENCES = MAX_SEQUENCES
    # One sequence and several, with and without lookup, and as many as run at once on a GPU.
    cases = (CASES[0], CASES[4], CASES[7], Case(16, [8] * MAX_SEQUENCES, 512, 40, 3))
    late = [name for case in cases for name in launch(case, needed)]
    json.dump({"needed": needed, "late": late}, sys.stdout)


if __name__ == "__main__":
    main()
