"""Compiles the kernels of `verification` for an H100 or H200, which takes no GPU, as they would be launched, and writes
what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys

import torch
from compiling import Compiling
from examples import is_full

from tree_kernels.verification import DeviceVerifier
from tree_kernels.verification import triton_backend as _triton_verification

KERNELS = ("peak_kernel", "score_kernel", "moment_kernel", "gain_kernel", "walk_kernel")
# The filter's, which take half a minute and depend on nothing but the vocabulary.
SKIPPED = ("mass_kernel", "filter_kernel")
VOCABULARY, ROWS = 5000, 16


def main() -> None:
    needed: dict[str, int] = {}
    own = {name: getattr(_triton_verification, name) for name in (*KERNELS, *SKIPPED)}
    for name, kernel in own.items():
        setattr(_triton_verification, name, Compiling(kernel, needed, skip=name in SKIPPED))
    try:
        warm_up()
    finally:
        for name, kernel in own.items():
            setattr(_triton_verification, name, kernel)
    json.dump(needed, sys.stdout)


def warm_up() -> None:
    verifier = DeviceVerifier("cpu", VOCABULARY, 4, ROWS, "triton")
    # With filters and without typical acceptance a walk is of parts that these have: filters are where it rejects,
    # typical acceptance is where it does not. Both together have the parts of typical acceptance alone.
    for filtered, typical in ((False, False), *([(False, True)] if is_full() else []), (True, True)):
        verifier.warm_up(torch.bfloat16, filtered=(filtered,), typical=(typical,))


if __name__ == "__main__":
    main()
