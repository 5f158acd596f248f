"""Captured layers of many rows, by cuBLAS with kernels between, against the model's own code on one GPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from conftest import make_tiny
from engine_harness import make_runner
from torch import Tensor
from transformers import PreTrainedModel

from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# Of an 8B Llama's heads and proportions, so wide that gate and up of up to 128 rows are read by tensor maps.
SIZES = {
    "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
PAGE_SIZE, PREFIX, SEQUENCES = 16, 40, 8
# The last is more than what is captured.
ROWS = (65, 96, 128, 129, 200, 256, 300, 512, 700)


def half_model() -> PreTrainedModel:
    model: PreTrainedModel = make_tiny("qwen2", **SIZES).to(torch.bfloat16)
    return model


def own_runner(model: PreTrainedModel) -> ModelRunner:
    """With the same random keys and values for every model."""
    runner = make_runner(model.cuda(), kv_tokens=4096, attention="triton")
    for index, cache in enumerate(runner.cache.keys + runner.cache.values):
        drawn = torch.randn(cache.shape, generator=torch.Generator().manual_seed(index))
        cache.copy_(drawn.to(torch.bfloat16))
    return runner


def captured(*, many: bool) -> ModelRunner:
    from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
    from tree_models.fused.preparing import LayerOptions

    options = CaptureOptions(512, 16, layers=LayerOptions(compiled=False, many=many))
    return CapturedRunner(own_runner(half_model()), options)


@pytest.fixture(scope="module")
def runners() -> Iterator[tuple[ModelRunner, ModelRunner, ModelRunner]]:
    """In fp32 as it is, in bf16 by its own code, and in bf16 by cuBLAS with kernels between."""
    yield own_runner(copy.deepcopy(half_model()).float()), captured(many=False), captured(many=True)
    torch.cuda.empty_cache()


def batch_of(rows: int) -> ForwardInput:
    """Random trees of as even a size as can be behind `PREFIX` tokens each."""
    rng = random.Random(rows)
    free = list(range(4096 // PAGE_SIZE))
    rng.shuffle(free)
    each, more = divmod(rows, SEQUENCES)
    counts = [each + (index < more) for index in range(SEQUENCES)]
    starts, pages, slots, positions, trees = [0], [], [], [], []
    for count in counts:
        own = tuple(free.pop() for _ in range(-(-(PREFIX + count) // PAGE_SIZE)))
        starts.append(starts[-1] + count)
        pages.append(own)
        trees.append(tuple(rng.randrange(max(1, row)) for row in range(count)))
        slots += [own[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(PREFIX, PREFIX + count)]
        positions += list(range(PREFIX, PREFIX + count))
    attention = AttentionBatch(tuple(starts), (PREFIX,) * SEQUENCES, tuple(pages), PAGE_SIZE, tuple(trees))
    tokens = tuple(rng.randrange(SIZES["vocab_size"]) for _ in slots)
    return ForwardInput(tokens, tuple(positions), tuple(slots), attention, tuple(range(rows)))


def after(runner: ModelRunner, batch: ForwardInput) -> tuple[Tensor, Tensor]:
    """Logits [R, V], and [caches, slots, heads * width] what the caches hold behind them, both fp32. Caches are then as
    they were."""
    caches = runner.cache.keys + runner.cache.values
    before = [cache.clone() for cache in caches]
    logits = runner.forward(batch).float()
    held = torch.stack([cache.float().flatten(0, 1).flatten(1) for cache in caches])
    for cache, old in zip(caches, before, strict=True):
        cache.copy_(old)
    return logits, held


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_layers_of_many_rows_take_cublas(runners: tuple[ModelRunner, ModelRunner, ModelRunner]) -> None:
    from tree_kernels.linear.cublas_backend import CublasLinears
    from tree_models.layers.decoder import Decoder

    _, own, many = runners
    assert isinstance(many.network, Decoder) and all(many.network.forms)
    assert isinstance(own.network, Decoder) and all(own.network.forms)
    for form in filter(None, many.network.forms):
        assert isinstance(form.linears.of(65), CublasLinears)
    for form in filter(None, own.network.forms):
        assert form.linears.of(64) is not None and form.linears.of(65) is None


@pytest.mark.parametrize("rows", ROWS)
def test_captured_layers_compute_what_the_models_own_code_does(
    runners: tuple[ModelRunner, ModelRunner, ModelRunner], rows: int
) -> None:
    batch = batch_of(rows)
    exact, own, many = (after(runner, batch) for runner in runners)
    written = torch.tensor(batch.slots, device="cuda")
    for index in range(2):
        expected, old, new = exact[index], own[index], many[index]
        if index == 1:
            expected, old, new = (held[:, written] for held in (expected, old, new))
        # Written so that NaN fails. Fewer of our sums are rounded than of its own code's.
        assert error(new, expected) <= 1.2 * error(old, expected) + 1e-4 and error(old, expected) < 0.1
        assert error(new, old) < 0.1
    # Rows that fill up a captured step are written nowhere.
    untouched = torch.ones(exact[1].shape[1], dtype=torch.bool, device="cuda")
    untouched[written] = False
    assert torch.equal(many[1][:, untouched], exact[1][:, untouched])
