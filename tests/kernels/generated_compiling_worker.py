"""Compiles the kernels that shape logits and gather log-probabilities for an H100 or H200, which takes no GPU, as they
would be launched, and writes what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys

import torch
from compiling import Compiling
from random_generated import MAX_ROWS, MAX_SEQUENCES, random_generated

from tree_kernels.logit_shaping import DeviceShaper
from tree_kernels.logit_shaping import triton_backend as _shaping
from tree_kernels.logprobs import DeviceLogprobs
from tree_kernels.logprobs import triton_backend as _logprobs

KERNELS = {_shaping: ("clear_kernel", "count_kernel", "shape_kernel"), _logprobs: ("chunk_kernel", "row_kernel")}
VOCABULARY = 5000


def main() -> None:
    needed: dict[str, int] = {}
    own = [(module, name, getattr(module, name)) for module, names in KERNELS.items() for name in names]
    for module, name, kernel in own:
        setattr(module, name, Compiling(kernel, needed))
    try:
        step = random_generated(0, VOCABULARY, 16, torch.bfloat16)
        device = torch.device("cpu")
        shaper = DeviceShaper(device, VOCABULARY, MAX_SEQUENCES, MAX_ROWS, "triton")
        shaper.shape(step.logits, step.token_ids, step.parents, step.parameters, step.in_pages)
        logprobs = DeviceLogprobs(device, VOCABULARY, MAX_SEQUENCES, MAX_ROWS, "triton")
        logprobs.gather(step.logits, step.token_ids, step.parameters, step.verdicts)
    finally:
        for module, name, kernel in own:
            setattr(module, name, kernel)
    json.dump(needed, sys.stdout)


if __name__ == "__main__":
    main()
