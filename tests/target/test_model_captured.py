"""Captured steps: which size a step takes, what it becomes on the device, and joined products. No GPU is needed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy
import pytest
import torch
from conftest import make_tiny

from benchmarks.shared.loaded_models import runner_for
from target_service.model.cuda_graphs.runner import CapturedRunner
from target_service.model.cuda_graphs.sizes import (
    Bucket,
    buckets_up_to,
    capacity,
    choose_bucket,
    padded,
    row_sizes,
    sequence_sizes,
)
from target_service.model.cuda_graphs.step_buffer import StepBuffer
from target_service.model.forward import ForwardInput
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.verification import RECORD, Mode, RowsToVerify, parameter_count
from tree_kernels.verification.records import pack_parameters, unpack_parameters

triton_attention = pytest.importorskip("tree_kernels.attention.triton_backend")

PAGE_SIZE = 4
# Sequences and rows that parameters are for.
VERIFIED = (1, 8)
BUCKETS = buckets_up_to(512, 64)


def step_of(rows: tuple[int, ...], *, seed: int = 0, chunks: tuple[int, ...] = (), last: int = 211) -> ForwardInput:
    """Random trees behind prefixes of random length; the sequences in `chunks` have a causal tail."""
    rng = random.Random(seed)
    starts, prefixes, pages, parents, slots, positions = [0], [], [], [], [], []
    free = list(range(400))
    rng.shuffle(free)
    for index, count in enumerate(rows):
        prefix = rng.randrange(20)
        own = tuple(free.pop() for _ in range(-(-(prefix + count) // PAGE_SIZE)))
        tree = tuple(rng.randrange(max(1, row)) for row in range(count))
        starts.append(starts[-1] + count)
        prefixes.append(prefix)
        pages.append(own)
        parents.append(None if index in chunks else tree)
        slots += [own[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(prefix, prefix + count)]
        positions += [prefix + row for row in range(count)]
    attention = AttentionBatch(tuple(starts), tuple(prefixes), tuple(pages), PAGE_SIZE, tuple(parents))
    tokens = tuple(rng.randrange(last) for _ in slots)
    return ForwardInput(tokens, tuple(positions), tuple(slots), attention, ())


def buffer_of(bucket: Bucket, pages_each: int = 80, verified: tuple[int, int] = VERIFIED) -> StepBuffer:
    settings = triton_attention.TritonSettings(processors=4)
    attention = triton_attention.TritonAttention(torch.device("cpu"), settings)
    return StepBuffer(bucket, attention, torch.device("cpu"), PAGE_SIZE, pages_each, verified)


def read_back(buffer: StepBuffer) -> AttentionBatch:
    """The step that a plan's tensors describe, by the rules of the kernels that read them."""
    plan = buffer.plan
    starts, page_starts = plan.query_starts.tolist(), plan.page_starts.tolist()
    causal, parents, table = plan.causal.tolist(), plan.parents.tolist(), plan.page_table.tolist()
    prefixes = plan.prefix_lengths.tolist()
    keys = [prefix + end - start for prefix, start, end in zip(prefixes, starts[:-1], starts[1:], strict=True)]
    return AttentionBatch(
        tuple(starts),
        tuple(prefixes),
        tuple(tuple(table[at : at + -(-count // PAGE_SIZE)]) for at, count in zip(page_starts, keys, strict=True)),
        PAGE_SIZE,
        tuple(
            None if flag else tuple(parents[start:end])
            for flag, start, end in zip(causal, starts[:-1], starts[1:], strict=True)
        ),
    )


@pytest.mark.parametrize("largest", [1, 2, 48, 64, 512])
def test_sizes_grow_to_the_largest(largest: int) -> None:
    rows, sequences = row_sizes(largest), sequence_sizes(largest, 256)
    assert rows[0] == sequences[0] == 1 and rows[-1] == sequences[-1] == largest
    assert all(low < high <= max(16, 2 * low) for low, high in pairwise(rows))
    assert all(low < high <= 4 * low for low, high in pairwise(sequences))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param((1,), Bucket(1, 1), id="decode"),
        pytest.param((1,) * 5, Bucket(16, 16), id="five-decode"),
        pytest.param((64,), Bucket(64, 1), id="tree"),
        pytest.param((60, 2), Bucket(64, 4), id="ragged"),
        pytest.param((200,), Bucket(256, 1), id="four-words"),
        pytest.param((250, 200), Bucket(512, 4), id="two-large-trees"),
        pytest.param((70,) + (1,) * 9, None, id="large-tree-among-many"),
        pytest.param((1,) * 65, None, id="too-many-sequences"),
        pytest.param((513,), None, id="too-many-rows"),
    ],
)
def test_a_step_takes_the_smallest_bucket_that_holds_it(rows: tuple[int, ...], expected: Bucket | None) -> None:
    assert choose_bucket(BUCKETS, step_of(rows, seed=1).attention) == expected


def test_every_bucket_holds_what_it_is_captured_with() -> None:
    for bucket in BUCKETS:
        batch = capacity(bucket, 16, 600)
        batch.check()
        assert (batch.rows, batch.sequences) == (bucket.rows, bucket.sequences)
        assert any(parents is not None for parents in batch.parents) == (bucket.largest_tree > 0)
        assert choose_bucket([bucket], batch) == bucket


STEPS = [
    pytest.param((1,), (), id="decode"),
    pytest.param((3, 1, 9), (), id="ragged"),
    pytest.param((5, 30, 2), (1,), id="chunk-between"),
    pytest.param((100,), (), id="four-words"),
    pytest.param((1,) * 33, (), id="many"),
]


@pytest.mark.parametrize(("rows", "chunks"), STEPS)
def test_the_buffer_says_the_step_and_nothing_of_the_one_before(rows: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    batch = step_of(rows, chunks=chunks)
    bucket = choose_bucket(BUCKETS, batch.attention)
    assert bucket is not None
    buffer = buffer_of(bucket)
    buffer.load(step_of(bucket.rows_each, seed=5), 511)
    buffer.load(batch, 511)
    count = len(batch.token_ids)
    assert read_back(buffer) == padded(batch.attention, bucket)
    for tensor, values in ((buffer.token_ids, batch.token_ids), (buffer.positions, batch.positions)):
        assert tuple(tensor[:count].tolist()) == values
    assert tuple(buffer.slots[:count].tolist()) == batch.slots
    # Nothing of a row that is not there is written or looked up.
    assert buffer.slots[count:].eq(-1).all() and not buffer.token_ids[count:].any()


def test_where_no_sequence_has_a_row_nothing_moves_on() -> None:
    """As when a size is captured, ahead of any step."""
    buffer = buffer_of(Bucket(4, 4), verified=(64, 512))
    buffer.advance_one_token(21)
    assert not buffer.integers.any()


@pytest.mark.parametrize("sequences", [1, 4, 33])
def test_a_step_moves_on_where_it_lies(sequences: int) -> None:
    """As if the step some passes later had been laid out and loaded."""
    first, passes = step_of((1,) * sequences), 6
    # Pages for all passes, in an order of their own.
    attention = first.attention
    more = [tuple(range(500 + 9 * place, 502 + 9 * place)) for place in range(sequences)]
    pages = tuple((*held, *extra) for held, extra in zip(attention.pages, more, strict=True))
    first = replace(first, attention=replace(attention, pages=pages))
    bucket = choose_bucket(BUCKETS, attention)
    assert bucket is not None
    buffer = buffer_of(bucket, verified=(64, 512))
    wanted = [RowsToVerify(place, 1, Mode.COUPLED, 7, 2**32 - 3 + place) for place in range(sequences)]
    buffer.load(first, 21, pack_parameters(wanted, 64, 512, 211))
    for _ in range(passes):
        buffer.advance_one_token(21)
    later = first.advanced_by(passes)
    assert read_back(buffer).prefix_lengths == padded(later.attention, bucket).prefix_lengths
    assert buffer.token_ids[:sequences].tolist() == list(later.token_ids)
    assert buffer.slots[:sequences].tolist() == list(later.slots) and buffer.slots[sequences:].eq(-1).all()
    assert buffer.positions[:sequences].tolist() == [min(position, 21) for position in later.positions]
    found = unpack_parameters(buffer.parameters.numpy(), 64)
    assert found[:sequences] == [one._replace(position=one.position + passes) for one in wanted]
    assert all(one.position == 0 for one in found[sequences:])


@pytest.mark.parametrize(("rows", "chunks"), STEPS)
def test_the_padded_plan_attends_as_the_step_does(rows: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    batch = step_of(rows, chunks=chunks, seed=3)
    bucket = choose_bucket(BUCKETS, batch.attention)
    assert bucket is not None
    buffer = buffer_of(bucket)
    buffer.load(batch, 511)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch.attention.rows, 4, 8, generator=generator)
    keys, values = (torch.randn(400, PAGE_SIZE, 2, 8, generator=generator) for _ in range(2))
    attention = TreeAttention("reference")
    expected = attention.run(attention.plan(batch.attention), query, keys, values, 0.35)
    assert torch.equal(attention.run(attention.plan(read_back(buffer)), query, keys, values, 0.35), expected)


def test_positions_end_where_the_tables_do() -> None:
    buffer = buffer_of(Bucket(16, 1))
    batch = step_of((9,), seed=2)
    buffer.load(batch, 3)
    assert buffer.positions.max() <= 3


def test_parameters_travel_with_the_step() -> None:
    buffer = buffer_of(Bucket(16, 1))
    parameters = numpy.arange(parameter_count(*VERIFIED), dtype=numpy.int32)
    batch = step_of((9,), seed=2)
    buffer.load(batch, 511, parameters)
    assert buffer.parameters.tolist() == parameters.tolist()
    # Whose rows they are, behind a record.
    assert buffer.step.owners.tolist() == list(range(RECORD, RECORD + 8))
    assert read_back(buffer) == padded(batch.attention, Bucket(16, 1))


def test_a_step_with_more_pages_than_the_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take"):
        buffer_of(Bucket(16, 1), pages_each=1).load(step_of((16,)), 511)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_other_attention_is_refused() -> None:
    runner = runner_for(make_tiny(), None, num_pages=4, page_size=PAGE_SIZE)
    with pytest.raises(ValueError, match="only the triton backend"):
        CapturedRunner(runner)
