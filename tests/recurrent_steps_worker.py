"""Runs steps of a model with recurrent layers as captured ones run, but for the graph: padded, through the buffer that
stays where it is, by the Triton kernels in their interpreter. Writes errors against plain steps as JSON."""

from __future__ import annotations

import json
import sys

import numpy
import torch
from conftest import make_tiny
from recurrent_models import RECURRENT
from torch import Tensor

from benchmarks.shared.loaded_models import runner_for
from target_service.model.cuda_graphs.sizes import Bucket
from target_service.model.cuda_graphs.step_buffer import StepBuffer
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.attention.triton_backend import TritonAttention
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.recurrence import RecurrentPass, TreeRecurrence
from tree_kernels.triton_paging import write_rows
from tree_models.layers import paged
from tree_models.layers.paged import PagedPass

PAGE_SIZE = 16
PAGES = ((5, 2, 9), (7, 1, 4))
STATES = (2, 1)
# Node 3 is a grandchild by way of 1; 2 and 5 are siblings of 1.
TREE = (0, 0, 0, 1, 3, 0, 2)
# Accepted of it: nodes 1, 3 and 4.
PATH = (1, 3, 4)
LAST_POSITION = 511
NAMES = ("lfm2, biases", "qwen3_next, dense", "zaya")


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
    places = tuple(range(len(tokens)))
    return ForwardInput(tuple(tokens), tuple(positions), tuple(slots), attention, places, state_slots=STATES)


class Padded:
    """A runner whose steps fill a buffer for more rows and sequences than they have."""

    def __init__(self, runner: ModelRunner) -> None:
        backend = TritonAttention(torch.device("cpu"), TritonSettings(processors=3))
        self._attention = TreeAttention("torch")
        self._attention._implementation = backend
        self._recurrence = TreeRecurrence("triton")
        self._runner = runner
        device = torch.device("cpu")
        self._buffer = StepBuffer(Bucket(32, 4), backend, device, PAGE_SIZE, 3, (4, 32), recurrent=True)

    @torch.inference_mode()
    def forward(self, step: ForwardInput) -> Tensor:
        buffer, runner, states = self._buffer, self._runner, self._runner.cache.recurrent
        assert states is not None
        buffer.load(step, LAST_POSITION, numpy.zeros(buffer.parameters.numel(), numpy.int32))
        buffer.plan.clear_schedules()
        plan = self._recurrence.capturable.plan_on_device(buffer.plan.batch, buffer.recurrent_tensors, states)
        recurrent = RecurrentPass(self._recurrence, plan, states)
        context = PagedPass(self._attention, buffer.plan, buffer.slots, runner.cache, recurrent)
        logits = runner.network(buffer.token_ids.long(), buffer.positions, context)
        return logits[: len(step.token_ids)]


def accept(runner: ModelRunner, root: int) -> None:
    """Move the accepted path of the first sequence behind its root."""
    moves = [(root + row, root + place) for place, row in enumerate(PATH, start=1)]
    sources, targets = zip(*moves, strict=True)
    assert runner.cache.recurrent is not None
    runner.cache.recurrent.move_nodes(STATES[0], sources, targets)
    slots = [[PAGES[0][key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE for key in keys] for keys in (sources, targets)]
    runner.move_rows(*slots)


def main() -> None:
    found = {}
    for name in NAMES:
        model_type, settings = RECURRENT[name]
        model = make_tiny(model_type, **settings)
        sizes = {"num_pages": 12, "page_size": PAGE_SIZE, "state_slots": 3, "largest_tree": 8}
        plain, padded = (runner_for(model, None, **sizes) for _ in range(2))
        steps = [
            step_of((19, 6), (0, 0), (None, None)),
            step_of((7, 3), (19, 6), (TREE, (0, 0, 1))),
            step_of((1, 7), (23, 7), (None, TREE)),
        ]
        buffer, errors = Padded(padded), []
        kept = paged.write_kv
        for number, step in enumerate(steps):
            expected = plain.forward(step).clone()
            # As on a GPU: rows without a slot write nothing.
            paged.write_kv = write_rows
            got = buffer.forward(step).clone()
            paged.write_kv = kept
            errors.append(float((got - expected).norm() / expected.norm()))
            if number == 1:
                accept(plain, 19)
                accept(padded, 19)
        found[name] = errors
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
