"""Triton: the kernels that count a sequence's tokens and shape its logits, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.logit_shaping import layout
from tree_kernels.logit_shaping.layout import ShapingField
from tree_kernels.logit_shaping.types import StepToShape
from tree_kernels.verification.triton_rows import (
    FIRST_ROW,
    IS_CHAIN,
    ROWS,
    SHAPING,
    load_double,
    load_logits,
    record_of,
    sequence_of,
)

# Tokens of the vocabulary for a program, and tokens of a text at a time. Not measured.
_CHUNK, _TEXT = 2048, 1024
# In a count: the token occurs in the prompt. Outputs are shorter.
_IN_PROMPT = tl.constexpr(1 << 30)
_PLACE, _TOKENS, _BIASES, _HELD = map(tl.constexpr, (layout.PLACE, layout.TOKENS, layout.BIASES, layout.HELD))
_ENTRIES_BLOCK = tl.constexpr(triton.next_power_of_2(layout.MOST_ENTRIES))
_PROMPT_LENGTH, _MIN_TOKENS = tl.constexpr(int(ShapingField.PROMPT_LENGTH)), tl.constexpr(int(ShapingField.MIN_TOKENS))
_PENALISES, _ENTRIES = tl.constexpr(int(ShapingField.PENALISES)), tl.constexpr(int(ShapingField.ENTRIES))
_PRESENCE, _FREQUENCY = tl.constexpr(int(ShapingField.PRESENCE)), tl.constexpr(int(ShapingField.FREQUENCY))
_REPETITION = tl.constexpr(int(ShapingField.REPETITION))
_LARGEST = tl.constexpr(layout.LARGEST)
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _place_of(table, parameters, b):  # type: ignore[no-untyped-def]
    """A sequence's place in the table, and whether it has one that depends on the text."""
    record = record_of(parameters, b)
    number = tl.load(record + SHAPING)
    place = table + tl.maximum(number - 1, 0) * _PLACE
    return place, (number > 0) & (tl.load(record + ROWS) > 0) & (tl.load(place + _PENALISES) > 0)


@triton.jit
def _length_of(parameters, query_starts, prefix_lengths, b):  # type: ignore[no-untyped-def]
    """Tokens of a sequence's text, its tree's root included."""
    root = tl.load(record_of(parameters, b) + FIRST_ROW) - tl.load(query_starts + b)
    return tl.load(prefix_lengths + b) + root + 1


@triton.jit
def _load_float(pointer):  # type: ignore[no-untyped-def]
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def clear_kernel(parameters, table, counts, vocabulary, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """counts [B, V] int32: zeros, of the sequences that are penalised."""
    b = tl.program_id(0)
    _, counted = _place_of(table, parameters, b)
    if counted:
        ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        tl.store(counts + b.to(tl.int64) * vocabulary + ids, tl.zeros([CHUNK], tl.int32), mask=ids < vocabulary)


@triton.jit
def count_kernel(  # type: ignore[no-untyped-def]
    parameters, table, query_starts, prefix_lengths, page_starts, page_table, tokens, counts, vocabulary,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts [B, V] int32: how often each token was generated, and `_IN_PROMPT` where the prompt has it."""
    b = tl.program_id(0)
    place, counted = _place_of(table, parameters, b)
    if counted:
        prompt = tl.load(place + _PROMPT_LENGTH)
        length = _length_of(parameters, query_starts, prefix_lengths, b)
        pages = page_table + tl.load(page_starts + b)
        own = counts + b.to(tl.int64) * vocabulary
        for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
            keys = start + tl.arange(0, BLOCK)
            page = tl.load(pages + keys // PAGE_SIZE, mask=keys < length, other=0)
            token = tl.load(tokens + page.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE, mask=keys < length, other=-1)
            there = (token >= 0) & (token < vocabulary)
            tl.atomic_add(own + token, 1, mask=there & (keys >= prompt), sem="relaxed")
            tl.atomic_or(own + token, _IN_PROMPT, mask=there & (keys < prompt), sem="relaxed")


@triton.jit
def _path_of(token_ids, parents, record, row, ids, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How often each of `ids` [CHUNK] is on a row's path below the root, and how long that is."""
    first = tl.load(record + FIRST_ROW)
    is_chain = tl.load(record + IS_CHAIN) > 0
    times = tl.zeros([CHUNK], tl.int32)
    at = row - first
    depth = at * 0
    # Bounded by the number of rows, so that a malformed tree cannot hang the device.
    while (at > 0) & (depth < row - first):
        times += (ids == tl.load(token_ids + first + at)).to(tl.int32)
        above = tl.load(parents + first + at)
        at = tl.where(is_chain, at - 1, above)
        depth += 1
    return times, depth


@triton.jit
def _entries_of(place, ids, start, holds, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The biases of `ids` [CHUNK], which begin with `start`, and which of them are held back, if any are."""
    bias = tl.zeros([CHUNK], tl.float32)
    held = tl.zeros([CHUNK], tl.int32)
    count = tl.load(place + _ENTRIES)
    if count > 0:
        entry = tl.arange(0, _ENTRIES_BLOCK)
        token = tl.load(place + _TOKENS + entry, mask=entry < count, other=_NONE)
        begin = tl.sum((token < start).to(tl.int32), 0)
        end = tl.sum((token < start + CHUNK).to(tl.int32), 0)
        for i in range(begin, end):
            here = ids == tl.load(place + _TOKENS + i)
            bias = tl.where(here, _load_float(place + _BIASES + i), bias)
            held = tl.where(here & holds, tl.load(place + _HELD + i), held)
    return bias, held > 0


@triton.jit(do_not_specialize=["sequences"])
def shape_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, token_ids, parents, parameters, sequences, table, query_starts, prefix_lengths, counts, masks,
    mask_rows, words, shaped, shaped_stride, vocabulary, CHUNK: tl.constexpr,
):  # fmt: skip
    """shaped [R, V] fp32; see `logit_shaping.reference`."""
    row = tl.program_id(0)
    b = sequence_of(parameters, row, sequences)
    if b >= 0:
        start = tl.program_id(1) * CHUNK
        ids = start + tl.arange(0, CHUNK)
        x = load_logits(logits, row, row_stride, ids, vocabulary)
        record = record_of(parameters, b)
        number = tl.load(record + SHAPING)
        if number > 0:
            place = table + (number - 1) * _PLACE
            times, depth = _path_of(token_ids, parents, record, row, ids, CHUNK)
            generated = _length_of(parameters, query_starts, prefix_lengths, b) + depth
            generated -= tl.load(place + _PROMPT_LENGTH)
            mask = tl.load(mask_rows + row)
            holds = (mask >= 0) & (generated < tl.load(place + _MIN_TOKENS))
            bias, held = _entries_of(place, ids, start, holds, CHUNK)
            x += bias
            if tl.load(place + _PENALISES) > 0:
                counted = tl.load(counts + b.to(tl.int64) * vocabulary + ids, mask=ids < vocabulary, other=0)
                in_prompt = counted >= _IN_PROMPT
                times += tl.where(in_prompt, counted - _IN_PROMPT, counted)
                repetition = load_double(place + _REPETITION)
                if repetition != 1.0:
                    wide = x.to(tl.float64)
                    scaled = tl.where(wide > 0.0, wide / repetition, wide * repetition)
                    # Whether a maximum is NaN where a number is, depends on the device.
                    bounded = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
                    scaled = tl.where(scaled == scaled, bounded, scaled).to(tl.float32)
                    x = tl.where(in_prompt | (times > 0), scaled, x)
                presence = _load_float(place + _PRESENCE).to(tl.float64)
                frequency = _load_float(place + _FREQUENCY).to(tl.float64)
                penalty = (presence + frequency * times.to(tl.float64)).to(tl.float32)
                x -= tl.where(times > 0, penalty, 0.0)
            x = tl.where(held, float("-inf"), x)
            if mask != 0:
                own = masks + (tl.abs(mask) - 1).to(tl.int64) * words + ids // 32
                allowed = (tl.load(own, mask=ids < vocabulary, other=0) >> (ids % 32)) & 1
                x = tl.where((allowed == 0) & (x < float("inf")), float("-inf"), x)
        tl.store(shaped + row.to(tl.int64) * shaped_stride + ids, x, mask=ids < vocabulary)


def shape(step: StepToShape, table: Tensor, vocabulary: int, max_sequences: int) -> Tensor:
    """See `DeviceShaper.shape`. Three launches; scratch is allocated by every call, so that captured graphs share it
    through their pool."""
    own, device = step.texts, step.logits.device
    rows, sequences, chunks = len(step.logits), len(own.prefix_lengths), triton.cdiv(vocabulary, _CHUNK)
    # Columns of what is written, so that rows begin at addresses that suit wide loads.
    columns = triton.cdiv(vocabulary, 64) * 64
    shaped = torch.empty(rows, columns, dtype=torch.float32, device=device)
    counts = torch.empty(sequences, vocabulary, dtype=torch.int32, device=device)
    clear_kernel[(sequences, chunks)](step.parameters, table, counts, vocabulary, CHUNK=_CHUNK, num_warps=4)
    # Programs that count one text. Not measured.
    count_kernel[(sequences, 16)](
        step.parameters, table, own.query_starts, own.prefix_lengths, own.page_starts, own.page_table, own.tokens,
        counts, vocabulary, PAGE_SIZE=own.page_size, BLOCK=_TEXT, num_warps=4,
    )  # fmt: skip
    shape_kernel[(rows, chunks)](
        step.logits, step.logits.stride(0), step.token_ids, step.parents, step.parameters, max_sequences, table,
        own.query_starts, own.prefix_lengths, counts, step.masks, step.mask_rows, step.masks.shape[1], shaped, columns,
        vocabulary, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    return shaped
