"""That heads behind passes guess at the rate that is asked for, and what is made of a wave."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_tiny
from engine_harness import engine_config, plain_each, request, run
from in_pass_heads import VOCABULARY, drafting_runner, eagle_heads
from rerun_graphs import ROWS, SEQUENCES, ReadBack, RerunRunner, without_gpu

from benchmarks.random_models.weights import SHIFT
from benchmarks.ranks.simulated_drafts import is_right, overwrite, simulated, target_config, wave_rates
from benchmarks.serving.figures import TimedAnswer
from draft_service.neural.cuda_graphs.pass_drafter import PassDrafter
from target_service.execution.device_executor import DeviceSteps
from target_service.model.cuda_graphs.capturing import capture_steps
from target_service.model.cuda_graphs.runner import CaptureOptions
from tree_kernels.growth import Children
from tree_kernels.node_table.layout import NODES
from tree_models.fused.preparing import LayerOptions

__all__ = ["without_gpu"]

CONFIG = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS // 2)


@pytest.mark.parametrize("breadth", [1, 4])
def test_so_many_first_children_are_right_and_no_other_is(breadth: int) -> None:
    parents = torch.arange(32000, dtype=torch.int32)
    children = Children(
        torch.zeros(32000, breadth, dtype=torch.int32), torch.zeros(32000, breadth, dtype=torch.float64)
    )
    overwrite(children, parents, 32000, 0.7)
    right = children.tokens == ((parents + SHIFT) % 32000)[:, None]
    # Three standard deviations.
    assert float(right[:, 0].float().mean()) == pytest.approx(0.7, abs=3 * (0.21 / 32000) ** 0.5)
    assert torch.equal(right[:, 0], is_right(parents, 0.7)) and not right[:, 1:].any()
    assert all(len(set(row)) == breadth for row in children.tokens[::97].tolist())
    assert children.scores[:, 0].eq(0.7).all() and children.scores.sum(1).le(1.0).all()


def paths_of(table: torch.Tensor) -> list[tuple[int, int]]:
    """Tokens of nodes of a tree in a node table, each with its parent's."""
    count = int(table[1])
    tokens, parents = (one[:count].tolist() for one in table[2:].view(5, NODES)[:2])
    return [(tokens[parents[place]], tokens[place]) for place in range(1, count)]


@pytest.mark.values
def test_trees_behind_passes_are_right_where_the_hash_says_so_and_change_no_token(without_gpu: None) -> None:
    del without_gpu
    heads, pairs = eagle_heads(make_tiny()), list[tuple[int, int]]()
    with simulated(0.6):
        runner = drafting_runner(heads, tokenizer=None, num_pages=96, page_size=4, end_token_ids=())
        drafter = runner.in_pass
        assert isinstance(drafter, PassDrafter)
        grow = drafter.grow

        def grow_and_note(sequences: int, step: Any, to: Any, *, coupled: bool) -> None:
            grow(sequences, step, to, coupled=coupled)
            bases = drafter.trees_for(sequences).tails.bases.tolist()
            slots = to.table_slots[: len(bases)].tolist()
            pairs.extend(
                pair for slot, base in zip(slots, bases, strict=True) if base for pair in paths_of(to.tables[slot])
            )

        drafter.grow = grow_and_note  # type: ignore[method-assign]
        runner.attention = ReadBack()
        runner.enable_device_row_selection(SEQUENCES, 0)
        options = CaptureOptions(ROWS, SEQUENCES, LayerOptions(compiled=False), hooked=drafter.layers, few_outputs=6)
        captured = RerunRunner(runner, options)
        capture_steps(captured, seconds=60.0, memory_share=0.0)
        steps = DeviceSteps(captured, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
        rng = random.Random(3)
        prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17)]
        requests = [request(prompt, 10) for prompt in prompts]
        with torch.inference_mode():
            outcomes = run(captured, requests, launch=steps, passes=1, config=CONFIG)
    assert [outcome.token_ids for outcome in outcomes] == plain_each(heads.model, requests)
    parents, right = (
        torch.tensor([one for one, _ in pairs]),
        [(one + SHIFT) % VOCABULARY == other for one, other in pairs],
    )
    guessed = is_right(parents, 0.6).tolist()
    assert any(right) and not any(is_one and not may for is_one, may in zip(right, guessed, strict=True))
    # Of parents whose first child is right most have it in the tree: others end there.
    with_it = {one for (one, _), is_one in zip(pairs, right, strict=True) if is_one}
    assert with_it == {one for (one, _), may in zip(pairs, guessed, strict=True) if may}


def test_a_wave_is_measured_while_all_generate() -> None:
    answers = [
        TimedAnswer(0.0, [1.0, 2.0, 3.0, 4.0], [1, 2, 2, 2]),
        TimedAnswer(0.0, [2.0, 3.0, 4.0, 5.0], [1, 1, 1, 1]),
    ]
    rates = wave_rates(answers, (50, 8))
    assert (rates["tokens_per_second"], rates["window_s"], rates["reading_s"]) == (3.0, 2.0, 2.0)
    assert rates["tokens_per_message"] == 1.5
    assert rates["whole_tokens_per_second"] == pytest.approx(16 / (1.0 + 16 / 3), abs=0.1)


def test_settings_of_a_target() -> None:
    options = SimpleNamespace(
        model="m", head="h", device="cuda", dtype="bfloat16", ranks=2, concurrency=[4, 8], prompt_tokens=100,
        max_tokens=28, target={"kv_tokens": 99},
    )  # fmt: skip
    config = target_config(options)
    assert config.draft == "inpass:eagle --head h" and config.drafts_in_passes and config.lookup_rows == 0
    assert (config.tensor_parallel, config.max_running, config.kv_tokens) == (2, 8, 99)
    options.head = ""
    assert not target_config(options).speculation
