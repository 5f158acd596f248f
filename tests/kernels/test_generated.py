"""Shaped logits and log-probabilities of generated tokens: definitions by hand, and the kernels against them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work
from random_generated import MAX_ROWS, MAX_SEQUENCES, random_generated

from tree_kernels.logit_shaping import MOST_ENTRIES, DeviceShaper, Shaping, mask_row, pack_shaping, shape_row
from tree_kernels.logit_shaping.layout import unpack_shaping
from tree_kernels.logprobs import DeviceLogprobs, read_logprobs

WORKER = "generated_worker.py"


def check(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["changed"] > 1000 and found["listed"] > 300


def test_the_kernels_do_what_the_definitions_say() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


def test_the_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton")
    needed = compiled("generated_compiling_worker.py")
    assert len(needed) == 5 and max(needed.values()) < 227 << 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_do_what_the_definitions_say_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))


def test_a_row_is_shaped_in_the_documented_order() -> None:
    shaping = Shaping(
        2, presence=0.5, frequency=0.25, repetition=2.0, biases={1: 1.0, 4: -3.0}, min_tokens=4, held=(5,)
    )
    # The prompt has 0 and 1; 1 and 2 were generated, 2 twice.
    text = torch.tensor([0, 1, 1, 2, 2])
    found = shape_row(torch.tensor([4.0, 3.0, -2.0, 1.0, 1.0, 9.0]), shaping, text)
    assert found.tolist() == [2.0, (3 + 1) / 2 - 0.75, -4.0 - 1.0, 1.0, -2.0, -torch.inf]
    assert shape_row(torch.ones(6), shaping, torch.tensor([0, 1, 3, 3, 3, 3]))[5] == 1.0, "enough was generated"


def test_what_shapes_a_sequence_is_packed_and_unpacked() -> None:
    shaping = Shaping(7, 0.5, -0.25, 1.1, {3: 2.0, 9: -100.0}, 5, (2, 9))
    assert unpack_shaping(pack_shaping(shaping)) == shaping
    with pytest.raises(ValueError, match="1152 tokens"):
        pack_shaping(Shaping(1, biases=dict.fromkeys(range(MOST_ENTRIES + 1), 1.0)))


def test_every_row_of_a_tree_counts_its_own_path() -> None:
    shaped = 0
    for seed in range(8):
        step = random_generated(seed, 30, 4)
        shaper = DeviceShaper(torch.device("cpu"), 30, MAX_SEQUENCES, MAX_ROWS)
        for b, shaping in enumerate(step.shapings):
            shaper.place(b, pack_shaping(shaping))
        words, mask_rows = step.masks
        shaper.mask_room[: len(words)] = words
        shaper.mask(len(words), mask_rows)
        out = shaper.shape(step.logits, step.token_ids, step.parents, step.parameters, step.in_pages)
        for one, shaping, text in zip(step.asked, step.shapings, step.texts, strict=True):
            for row in range(one.rows):
                at, path = row, list[int]()
                while at:
                    path.insert(0, int(step.token_ids[one.first_row + at]))
                    at = at - 1 if one.is_chain else int(step.parents[one.first_row + at])
                logits = step.logits[one.first_row + row, :30]
                if one.shaping:
                    mask = int(mask_rows[one.first_row + row])
                    shaped_row = shape_row(logits, shaping, torch.tensor(text + path), holds=mask >= 0)
                    logits = mask_row(shaped_row, torch.from_numpy(words)[abs(mask) - 1]) if mask else shaped_row
                torch.testing.assert_close(out[one.first_row + row], logits)
                shaped += one.shaping > 0
    assert shaped > 10


def test_a_mask_leaves_what_is_no_number() -> None:
    words = torch.tensor([0b1011, -(2**31)], dtype=torch.int32)
    logits = torch.tensor([1.0, 2.0, torch.nan, 3.0] + [torch.inf] + [4.0] * 58 + [5.0])
    found = mask_row(logits, words).tolist()
    assert found[:2] == [1.0, 2.0] and found[3:5] == [3.0, torch.inf] and found[2] != found[2]
    assert found[63] == 5.0 and set(found[5:63]) == {-torch.inf}


def test_log_probabilities_are_those_of_the_path() -> None:
    logprobs, listed = DeviceLogprobs(torch.device("cpu"), 30, MAX_SEQUENCES, MAX_ROWS), 0
    for seed in range(6):
        step = random_generated(seed, 30, 4)
        logprobs.gather(step.logits, step.token_ids, step.parameters, step.verdicts)
        for b, one in enumerate(step.asked):
            count = int(step.verdicts.accepted_counts[b])
            if not (one.rows and one.logprobs):
                continue
            path = [0, *step.verdicts.accepted_rows[one.first_row : one.first_row + count].tolist()]
            tokens = [int(step.token_ids[one.first_row + row]) for row in path[1:]]
            tokens.append(int(step.verdicts.next_tokens[b]))
            rows = logprobs.found[one.first_row : one.first_row + len(path)].numpy()
            for row, token, (own, entries) in zip(path, tokens, read_logprobs(rows, one.logprobs - 1), strict=True):
                expected = torch.log_softmax(step.logits[one.first_row + row, :30], 0)
                assert own == pytest.approx(float(expected[token]), abs=1e-5)
                order = torch.sort(expected, descending=True, stable=True).indices[: one.logprobs - 1].tolist()
                assert [each for each, _ in entries] == order
                listed += len(entries)
    assert listed > 20
