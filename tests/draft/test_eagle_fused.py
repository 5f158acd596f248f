"""A head by the kernels of few rows computes what its modules do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_drafting import COUPLED, GREEDY, SETTINGS, make_drafter, opened, same_tree, sequence_of, states_of, text
from eagle_heads import HIDDEN, VOCABULARY, make_head
from static_drafting import StaticDrafting, static_kv  # noqa: F401
from torch import Tensor

from draft_service.eagle import fused_head
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.fused_head import FusedHead, can_be_fused, fused
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.cuda_graphs.attention import StaticAttend
from draft_service.neural.paged_cache import DraftCache
from tree_kernels.linear import Norm, RowLinears, ScaledRows, many_row_linears, row_linears

FUSED: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True, "o_bias": True},
    "two layers": {"num_layers": 2, "qkv_bias": True},
    "yarn": {"rope": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}, "max_positions": 64},
}
OTHERS: dict[str, dict[str, Any]] = {
    "eagle-1": {"kind": "eagle", "num_features": 1, "feature_layers": (12,)},
    "normed heads": {"qk_norm": True},
    "biased mlp": {"mlp_bias": True},
    "odd heads": {"head_dim": 8},
}
ROWS = 5

pytestmark = pytest.mark.usefixtures("static_kv")


def own_slot(slots: Tensor) -> Any:
    """Attention of every row to itself alone, in a way that shows queries, keys and values."""

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = query.shape[1] // keys.shape[2]
        key, value = (pool.flatten(0, 1)[slots.long()].repeat_interleave(group, dim=1) for pool in (keys, values))
        return 0.5 * query * key + value

    return run


def both(head: EagleHead, own: FusedHead) -> list[list[Tensor]]:
    """What the modules, and what the kernels make of the same rows: outputs, and the keys and values they store."""
    weight = head.embed_tokens.weight
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(ROWS, HIDDEN, generator=generator).to(weight.device, weight.dtype)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator, dtype=torch.int32).to(weight.device)
    positions = torch.tensor([0, 3, 4, 4, 40], dtype=torch.int32, device=weight.device)
    slots = torch.tensor([6, 1, 0, 7, 9], dtype=torch.int32, device=weight.device)
    found = []
    for forward in (head, own.forward):
        cache = DraftCache(3, 4, HeadNetwork(head))
        for pool in (*cache.keys, *cache.values):
            pool.zero_()
        output = forward(tokens, features, positions, StaticAttend(cache, slots, own_slot(slots)))
        found.append([output.carried, output.lm_input, *cache.keys, *cache.values])
    return found


@pytest.mark.parametrize("kind", FUSED.values(), ids=FUSED)
def test_kernels_compute_what_modules_do(kind: dict[str, Any]) -> None:
    head = make_head(head_dim=16, **kind)
    assert can_be_fused(head)
    for expected, other in zip(*both(head, FusedHead(head, RowLinears(), WholeNorms())), strict=True):
        assert torch.allclose(other, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_other_heads_are_left_alone(kind: dict[str, Any]) -> None:
    assert not can_be_fused(make_head(**({"head_dim": 16} | kind)))


def test_a_cpu_and_fp32_keep_the_modules() -> None:
    assert fused(make_head(head_dim=16), int8=True) is None
    assert fused(make_head(head_dim=16).bfloat16(), int8=False) is None


class Refusing(RowLinears):
    def rotary_linear(self, *_: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError("asked for a product")


class WholeNorms(RowLinears):
    """As those that multiply many rows."""

    def scale_rows(self, hidden: Tensor, norm: Norm) -> ScaledRows:
        return ScaledRows(self.norm_rows(hidden, norm), None, norm.epsilon)

    def norm_rows(self, hidden: Tensor, norm: Norm) -> Tensor:
        return RowLinears().norm_rows(hidden, norm)


@pytest.mark.parametrize("kind", FUSED.values(), ids=FUSED)
def test_many_rows_have_linears_and_norms_of_their_own(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(head_dim=16, **kind)
    own = FusedHead(head, Refusing(), WholeNorms())
    monkeypatch.setattr(fused_head, "MAX_ROWS", ROWS - 1)
    for expected, other in zip(*both(head, own), strict=True):
        assert torch.allclose(other, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FUSED.values(), ids=FUSED)
def test_int8_weights_are_near(kind: dict[str, Any]) -> None:
    """Of few rows alone, and the head's own weights stay what they are."""
    head, untouched = make_head(head_dim=16, **kind), make_head(head_dim=16, **kind)
    own = FusedHead(head, RowLinears(), WholeNorms(), int8=True)
    for expected, other in zip(*both(head, own), strict=True):
        assert 0 < (other - expected).norm() <= 0.03 * expected.norm()
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, found = head.logits(rows), own.logits(rows)
    assert 0 < (found - expected).norm() <= 0.03 * expected.norm()
    many = torch.cat([rows] * fused_head.MAX_ROWS)
    assert torch.equal(own.logits(many), head.logits(many))
    for name, weight in untouched.state_dict().items():
        assert torch.equal(head.state_dict()[name], weight), name


def test_weights_of_an_odd_width_stay_as_they_are() -> None:
    """int8 weights hold two numbers in a word; a head with others still loads and computes what it did."""
    head = make_head(head_dim=16, intermediate_size=23)
    own = FusedHead(head, RowLinears(), WholeNorms(), int8=True)
    for expected, other in zip(*both(head, own), strict=True):
        assert 0 < (other - expected).norm() <= 0.03 * expected.norm()
    odd = make_head(head_dim=16, hidden_size=HIDDEN - 1, target_hidden_size=HIDDEN - 1)
    rows = torch.randn(ROWS, HIDDEN - 1, generator=torch.Generator().manual_seed(1))
    assert torch.equal(FusedHead(odd, RowLinears(), WholeNorms(), int8=True).logits(rows), odd.logits(rows))


def test_joined_weights_stay_the_heads_own() -> None:
    head, untouched = make_head(head_dim=16, qkv_bias=True), make_head(head_dim=16, qkv_bias=True)
    FusedHead(head, RowLinears(), WholeNorms())
    for name, weight in untouched.state_dict().items():
        assert torch.equal(head.state_dict()[name], weight), name


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
def test_whole_trees_of_a_fused_head(mode: Any) -> None:
    head = make_head(head_dim=16, num_layers=2)
    config = EagleConfig(**SETTINGS)
    drafters = [make_drafter(head), make_drafter(head)]
    network = HeadNetwork(head)
    network._fused = FusedHead(head, RowLinears(), WholeNorms())
    drafters[1]._drafting = StaticDrafting(network, config)
    trees = []
    for drafter in drafters:
        sequences = [opened(drafter, sequence_of(text(5 + i, i), mode), states_of(head, 5 + i, i)) for i in range(3)]
        trees.append(drafter.propose(sequences))
    for expected, found in zip(*trees, strict=True):
        same_tree(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("weights", ["own", "int8", "many rows"])
def test_kernels_compute_what_modules_do_on_a_gpu(
    kind: dict[str, Any], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(head_dim=16, **kind).cuda().bfloat16()
    device = head.embed_tokens.weight.device
    if weights == "many rows":
        monkeypatch.setattr(fused_head, "MAX_ROWS", ROWS - 1)
    own = FusedHead(head, row_linears(device), many_row_linears(device), int8=weights == "int8")
    for expected, other in zip(*both(head, own), strict=True):
        assert (other - expected).float().norm() <= (0.05 if weights == "int8" else 0.03) * expected.float().norm()
