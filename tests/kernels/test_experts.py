"""Mixtures of experts against their definition: interpreted on a CPU here, compiled on a GPU under `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from tree_kernels.experts import Chosen, ExpertWeights, Routing, RowExperts, row_experts
from tree_kernels.experts.torch_backend import GroupedExperts
from tree_kernels.linear import Activation, ActivationKind, Norm, RowLinears, ScaledRows

pytest.importorskip("triton")
from tree_kernels.experts.triton_backend import TritonExperts
from tree_kernels.experts.triton_tiling import MAX_PAIRS, choose_expert_tilings, rows_of_a_block

WORKER = "experts_worker.py"
CPU = torch.device("cpu")


def check(found: dict[str, Any], fp32: float = 2e-6) -> None:
    """fp32 agrees to rounding, half precision to its own; experts are the same but for near ties in half precision."""
    wrong = {}
    for name, errors in found["errors"].items():
        tolerance = 1.5e-2 if name.startswith("bf16") else 2e-3 if name.startswith("half") else fp32
        # Written so that NaN fails.
        wrong |= {f"{name}: {each}": error for each, error in errors.items() if not error <= tolerance}
    assert not wrong
    assert found["empty"]["mixed"][0] == found["empty"]["experts"][0] == 0


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return work(WORKER, **INTERPRETED)


def test_every_case_equals_the_definition(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["errors"]) > 10
    check(interpreted)


def test_no_row_depends_on_how_many_there_are(interpreted: dict[str, Any]) -> None:
    assert interpreted["changed"] == {"own tiling": []}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_case_holds_on_a_gpu() -> None:
    found = work(WORKER, TRITON_INTERPRET="0")
    check(found, 5e-6)
    assert len(found["changed"]) > 2
    assert not any(found["changed"].values())


def test_the_kernels_compile_for_a_gpu() -> None:
    """A program has 227 KB of shared memory."""
    needed = compiled("experts_compiling_worker.py")
    assert len(needed) > 8 and max(needed.values()) < 227 << 10


def random_block(kind: type[nn.Module], config: Any) -> Any:
    torch.manual_seed(0)
    block: Any = kind(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    return block.eval()


@pytest.mark.parametrize("experts", [RowExperts(), GroupedExperts()], ids=["definition", "grouped"])
@pytest.mark.parametrize("renormalised", [False, True])
def test_the_definition_is_qwens_block(experts: RowExperts, renormalised: bool) -> None:
    sizes = {"hidden_size": 24, "moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 3}
    config = AutoConfig.for_model("qwen3_moe", **sizes, norm_topk_prob=renormalised)
    block = random_block(qwen.Qwen3MoeSparseMoeBlock, config)
    hidden, residual = torch.randn(9, 24), torch.randn(9, 24)
    rows = ScaledRows(hidden, None, 1e-6)
    with torch.inference_mode():
        expected = block(hidden[None])[0]
        chosen = experts.route(rows, block.gate.weight, None, Routing(3, renormalised=renormalised))
        weights = ExpertWeights(block.experts.gate_up_proj, block.experts.down_proj)
        torch.testing.assert_close(experts.mix(rows, chosen, weights)[0], expected)
        norm = Norm(torch.rand(24), 1e-6)
        found, scaled = experts.mix(rows, chosen, weights, residual, norm, 0.5)
    torch.testing.assert_close(found, residual + 0.5 * expected)
    assert scaled is not None
    torch.testing.assert_close(scaled.rows * scaled.scale, RowLinears().norm_rows(found, norm))


def test_groups_are_chosen_as_in_deepseeks_block() -> None:
    sizes = {"hidden_size": 24, "moe_intermediate_size": 16, "n_routed_experts": 16, "num_experts_per_tok": 3}
    sizes |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    config = AutoConfig.for_model("deepseek_v3", **sizes, routed_scaling_factor=2.5, norm_topk_prob=True)
    block = random_block(deepseek.DeepseekV3MoE, config)
    hidden = torch.randn(9, 24)
    rows = ScaledRows(hidden, None, 1e-6)
    routing = Routing(
        3, "sigmoid", least_sum=1e-20, groups=4, top_groups=2, group_score="top2", scaling=2.5
    )  # fmt: skip
    with torch.inference_mode():
        expected = block(hidden[None])[0]
        chosen = RowExperts().route(rows, block.gate.weight, block.gate.e_score_correction_bias, routing)
        weights = ExpertWeights(block.experts.gate_up_proj, block.experts.down_proj)
        found = RowExperts().mix(rows, chosen, weights, block.shared_experts(hidden))[0]
    torch.testing.assert_close(found, expected)


def test_grouped_products_round_as_the_rows_do() -> None:
    torch.manual_seed(0)
    weights = ExpertWeights(
        torch.randn(6, 32, 24), torch.randn(6, 24, 16), Activation(ActivationKind.GELU_TANH)
    )  # fmt: skip
    chosen = Chosen(torch.stack([torch.randperm(6)[:2] for _ in range(40)]).to(torch.int32), torch.rand(40, 2))
    norm, hidden = Norm(torch.rand(24), 1e-6), torch.randn(40, 24)
    rows = RowLinears().scale_rows(hidden, norm)
    expected, _ = RowExperts().mix(rows, chosen, weights)
    torch.testing.assert_close(GroupedExperts().mix(rows, chosen, weights)[0], expected, rtol=1e-4, atol=1e-4)
    half = replace(weights, gate_up=weights.gate_up.bfloat16(), down=weights.down.bfloat16())
    found, _ = GroupedExperts().mix(replace(rows, rows=rows.rows.bfloat16()), chosen, half)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.02 * expected.norm()
    none = RowLinears().scale_rows(hidden[:0], norm)
    empty = Chosen(chosen.experts[:0], chosen.weights[:0])
    assert GroupedExperts().mix(none, empty, weights)[0].shape == (0, 24)


BACKENDS = RowExperts(), GroupedExperts(), TritonExperts(CPU)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_what_does_not_fit_is_refused(backend: RowExperts) -> None:
    rows, router = ScaledRows(torch.zeros(3, 24), None, 1e-6), torch.zeros(6, 24)
    for message, given in (
        (r"expected rows \[R, 20\]", (rows, torch.zeros(6, 20), None, Routing(2))),
        ("in fp32", (rows, router.half(), None, Routing(2))),
        (r"expected correction \[6\]", (rows, router, torch.zeros(5), Routing(2))),
        ("groups to divide 6", (rows, router, None, Routing(2, groups=4))),
        ("to hold 3", (rows, router, None, Routing(3, groups=3))),
    ):
        with pytest.raises(ValueError, match=message):
            backend.route(*given)
    weights = ExpertWeights(torch.zeros(6, 32, 24), torch.zeros(6, 24, 16))
    chosen = Chosen(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    for message, mixed in (
        ("gate_up .E, 2 . I, H.", (rows, chosen, replace(weights, down=torch.zeros(6, 24, 15)))),
        ("of one dtype", (rows, chosen, replace(weights, down=weights.down.half()))),
        ("contiguous", (rows, chosen, replace(weights, down=torch.zeros(6, 16, 24).transpose(1, 2)))),
        (r"expected rows \[R, 24\]", (replace(rows, rows=torch.zeros(3, 20)), chosen, weights)),
        ("one dtype", (replace(rows, rows=torch.zeros(3, 24).half()), chosen, weights)),
        (r"expected experts and weights \[3, k\]", (rows, replace(chosen, weights=torch.zeros(3, 1)), weights)),
    ):
        with pytest.raises(ValueError, match=message):
            backend.mix(*mixed)


def test_a_routing_that_means_nothing_is_refused() -> None:
    for made in ({"top_k": 0}, {"top_k": 2, "groups": 2, "top_groups": 3}):
        with pytest.raises(ValueError, match="expected top_k"):
            Routing(**made)


def test_of_equal_scores_the_lowest_expert_is_chosen() -> None:
    router = torch.zeros(6, 24)
    chosen = row_experts(CPU).route(ScaledRows(torch.ones(2, 24), None, 1e-6), router, None, Routing(3))
    assert chosen.experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(chosen.weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 1000])
@pytest.mark.parametrize("shape", [(8, 128, 2048, 768), (2, 8, 4096, 14336), (8, 64, 2048, 1024)], ids=str)
def test_blocks_hold_the_rows_of_an_expert(rows: int, shape: tuple[int, int, int, int]) -> None:
    tilings = choose_expert_tilings(rows, *shape)
    for tiling in (tilings.gated, tilings.down):
        assert tiling.block_rows == max(16, rows_of_a_block(rows, *shape[:2]))
        assert min(rows * shape[0] / shape[1], rows, 64) <= tiling.block_rows <= 64
        assert (tiling.block_rows + tiling.block_outputs) * tiling.block_inner * 2 * tiling.stages <= 227_000
        # A program of few pairs has as many threads.
        assert 32 * tiling.warps >= MAX_PAIRS
    assert choose_expert_tilings(rows, *shape, invariant=True) == choose_expert_tilings(1, *shape, invariant=True)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_blocks_divide_the_widths_of_experts(rows: int) -> None:
    tilings = choose_expert_tilings(rows, 4, 32, 2880, 2880)
    assert 2880 % tilings.gated.block_inner == 2880 % tilings.down.block_inner == 0
