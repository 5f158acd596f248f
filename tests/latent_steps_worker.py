"""Runs steps of a model with latent attention as captured ones run, but for the graph: padded, through the buffer that
stays where it is, by the Triton kernels in their interpreter. Writes errors against
plain steps as JSON."""

from __future__ import annotations

import json
import sys

import numpy
import torch
from latent_models import make_latent
from torch import Tensor

from benchmarks.shared.loaded_models import runner_for
from target_service.model.cuda_graphs.sizes import Bucket
from target_service.model.cuda_graphs.step_buffer import StepBuffer
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionBatch
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.latent_attention import LatentAttention
from tree_kernels.latent_attention.triton_backend import TritonLatentAttention
from tree_kernels.latent_attention.triton_writing import norm_rope_write_rows
from tree_models.layers import latent
from tree_models.layers.paged import PagedPass

PAGE_SIZE = 16
PAGES = ((5, 2, 9), (7, 1, 4))
# Node 3 is a grandchild by way of 1; 2 and 5 are siblings of 1.
TREE = (0, 0, 0, 1, 3, 0, 2)
LAST_POSITION = 511
NAMES = ("v2, yarn, query latents, groups", "v3")


def step_of(rows: tuple[int, int], starts: tuple[int, int], trees: tuple[tuple[int, ...] | None, ...]) -> ForwardInput:
    """Rows of two sequences behind so many keys of each."""
    tokens, positions, slots = [], [], []
    for b, (count, start) in enumerate(zip(rows, starts, strict=True)):
        for row in range(count):
            key = start + row
            tokens.append((17 * key + 31 * b + 7 * row + 3) % 211)
            positions.append(key)
            slots.append(PAGES[b][key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE)
    attention = AttentionBatch((0, rows[0], sum(rows)), starts, PAGES, PAGE_SIZE, trees)
    return ForwardInput(tuple(tokens), tuple(positions), tuple(slots), attention, tuple(range(len(tokens))))


class Padded:
    """A runner whose steps fill a buffer for more rows and sequences than they have."""

    def __init__(self, runner: ModelRunner) -> None:
        backend = TritonLatentAttention(torch.device("cpu"), TritonSettings(processors=3))
        attention = LatentAttention("torch")
        attention._implementation = backend
        runner.attention = attention
        self._runner = runner
        self._buffer = StepBuffer(Bucket(32, 4), backend, torch.device("cpu"), PAGE_SIZE, 3, (4, 32))

    @torch.inference_mode()
    def forward(self, step: ForwardInput) -> Tensor:
        buffer, runner = self._buffer, self._runner
        buffer.load(step, LAST_POSITION, numpy.zeros(buffer.parameters.numel(), numpy.int32))
        buffer.plan.clear_schedules()
        context = PagedPass(runner.attention, buffer.plan, buffer.slots, runner.cache)
        logits = runner.network(buffer.token_ids.long(), buffer.positions, context)
        return logits[: len(step.token_ids)]


def main() -> None:
    found = {}
    for name in NAMES:
        plain, padded = (runner_for(make_latent(name), None, num_pages=12, page_size=PAGE_SIZE) for _ in range(2))
        steps = [
            step_of((19, 6), (0, 0), (None, None)),
            step_of((7, 3), (19, 6), (TREE, (0, 0, 1))),
            step_of((1, 7), (20, 7), (None, TREE)),
        ]
        expected = [plain.forward(step).clone() for step in steps]
        # As on a GPU: rows without a slot write nothing.
        kept, latent.norm_rope_write = latent.norm_rope_write, norm_rope_write_rows
        buffer = Padded(padded)
        got = [buffer.forward(step).clone() for step in steps]
        latent.norm_rope_write = kept
        # What was said, and what was left in the cache.
        got.append(padded.cache.pools[0][0])
        expected.append(plain.cache.pools[0][0])
        found[name] = [float((mine - own).norm() / own.norm()) for mine, own in zip(got, expected, strict=True)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
