"""A head by the kernels of few rows computes what its plain layers do."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from eagle_drafting import COUPLED, GREEDY, SETTINGS, make_drafter, opened, same_tree, sequence_of, states_of, text
from eagle_heads import HIDDEN, VOCABULARY, fuse, make_head
from static_drafting import StaticDrafting, static_kv  # noqa: F401
from torch import Tensor

from draft_service.eagle.config import EagleConfig
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.paged_cache import DraftCache
from tree_kernels.attention import AttentionBatch, AttentionPlan
from tree_models.fused import preparing
from tree_models.fused.preparing import LayerOptions, prepare_layers
from tree_models.layers.paged import PagedPass

KINDS: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True, "o_bias": True},
    "two layers": {"num_layers": 2, "qkv_bias": True},
    "yarn": {"rope": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}, "max_positions": 64},
    "eagle-1": {"kind": "eagle", "num_features": 1, "feature_layers": (12,)},
    "normed heads": {"qk_norm": True},
    "biased mlp": {"mlp_bias": True},
}
ROWS = 5

pytestmark = pytest.mark.usefixtures("static_kv")


class _OwnSlot:
    """Attention of every row to itself alone, in a way that shows queries, keys and values."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots

    def run(self, _plan: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float, _variant: Any) -> Tensor:
        group = query.shape[1] // keys.shape[2]
        slots = self._slots.long()
        key, value = (pool.flatten(0, 1)[slots].repeat_interleave(group, dim=1) for pool in (keys, values))
        return 2 * scale * query * key + value


def outputs(head: EagleHead) -> list[Tensor]:
    """What a head makes of the same rows: outputs, logits, and the keys and values that it stores, with the output and
    without."""
    weight = head.embedding
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(ROWS, head.config.hidden_size, generator=generator).to(weight.device, weight.dtype)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator, dtype=torch.int32).to(weight.device)
    positions = torch.tensor([0, 3, 4, 4, 40], dtype=torch.int32, device=weight.device)
    slots = torch.tensor([6, 1, 0, 7, 9], dtype=torch.int32, device=weight.device)
    cache = DraftCache(3, 4, HeadNetwork(head))
    for pool in (*cache.keys, *cache.values):
        pool.zero_()
    plan = AttentionPlan(AttentionBatch((0, ROWS), (0,), ((0, 1, 2),), 4, (None,)))
    output = head(tokens, features, positions, PagedPass(_OwnSlot(slots), plan, slots, cache))
    read = DraftCache(3, 4, HeadNetwork(head))
    for pool in (*read.keys, *read.values):
        pool.zero_()
    head.read_rows(tokens, features, positions, PagedPass(_OwnSlot(slots), plan, slots, read))
    kept = [*cache.keys, *cache.values, *read.keys, *read.values]
    return [output.carried, output.lm_input, head.logits(output.lm_input), *kept]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rows_that_are_read_have_the_keys_of_those_with_output(kind: dict[str, Any], fused: bool) -> None:
    head = make_head(head_dim=16, **kind)
    if fused:
        fuse(head)
    caches = outputs(head)[3:]
    half = len(caches) // 2
    for found, expected in zip(caches[half:], caches[:half], strict=True):
        assert found.any() and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [ROWS, ROWS - 1], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_forms_compute_what_plain_layers_do(kind: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_ROWS", most)
    head = make_head(head_dim=16, **kind)
    expected = outputs(head)
    assert fuse(head) == len(head.layers)
    for found, other in zip(outputs(head), expected, strict=True):
        assert torch.allclose(found, other, rtol=1e-4, atol=1e-5)


def states_for(head: EagleHead) -> Tensor:
    """Captured states [ROWS, F * W]."""
    weight = head.embedding
    states = torch.randn(ROWS, head.projection.input_width, generator=torch.Generator().manual_seed(7))
    return states.to(weight.device, weight.dtype)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_features_by_launches_are_those_of_plain_layers(kind: dict[str, Any]) -> None:
    head = make_head(head_dim=16, **kind)
    states = states_for(head)
    expected = head.project(states)
    for int8 in (False, True):
        fuse(head, int8=int8)
        found = head.project(states)
        near = int8 and head.projection.fc is not None
        assert near == (not torch.allclose(found, expected))
        assert (found - expected).norm() <= 0.01 * expected.norm()
        torch.testing.assert_close(head.project(states[None]), expected[None])


def test_a_cpu_and_fp32_keep_the_plain_layers() -> None:
    head = make_head(head_dim=16)
    head.prepare(int8=True)
    assert head.forms == [None]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_int8_weights_are_near(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows alone, and the head's own weights stay what they are."""
    head = make_head(head_dim=16, **kind)
    untouched, expected = deepcopy(head.weights()), outputs(head)
    assert fuse(head, int8=True) == len(head.layers)
    differences = [
        float((found - other).norm() / other.norm()) for found, other in zip(outputs(head), expected, strict=True)
    ]
    # EAGLE-1 fuses embedding and feature with its own weights, from which keys and values of one layer come.
    assert all(difference <= 0.03 for difference in differences) and all(differences[:3])
    assert all(torch.equal(weight, untouched[name]) for name, weight in head.weights().items())
    monkeypatch.setattr(preparing, "MAX_ROWS", ROWS - 1)
    fuse(head, int8=True)
    for found, other in zip(outputs(head), expected, strict=True):
        assert torch.allclose(found, other, rtol=1e-4, atol=1e-5)


def test_weights_of_an_odd_width_stay_as_they_are() -> None:
    """int8 weights hold two numbers in a word; a head with others still loads and computes what it did."""
    head = make_head(head_dim=16, intermediate_size=23)
    expected = outputs(head)
    fuse(head, int8=True)
    for found, other in zip(outputs(head), expected, strict=True):
        assert 0 < (found - other).norm() <= 0.03 * other.norm()
    odd = make_head(head_dim=16, hidden_size=HIDDEN - 1, target_hidden_size=HIDDEN - 1)
    rows = torch.randn(ROWS, HIDDEN - 1, generator=torch.Generator().manual_seed(1))
    expected_logits = odd.logits(rows)
    fuse(odd, int8=True)
    torch.testing.assert_close(odd.logits(rows), expected_logits)


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
def test_whole_trees_of_a_fused_head(mode: Any) -> None:
    head = make_head(head_dim=16, num_layers=2)
    config = EagleConfig(**SETTINGS)
    drafters = [make_drafter(head), make_drafter(head)]
    fused = deepcopy(head)
    fuse(fused)
    drafters[1]._drafting = StaticDrafting(HeadNetwork(fused), config)
    trees = []
    for drafter in drafters:
        sequences = [opened(drafter, sequence_of(text(5 + i, i), mode), states_of(head, 5 + i, i)) for i in range(3)]
        trees.append(drafter.propose(sequences))
    for expected, found in zip(*trees, strict=True):
        same_tree(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("weights", ["own", "int8", "many rows"])
def test_kernels_compute_what_plain_layers_do_on_a_gpu(
    kind: dict[str, Any], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(head_dim=16, **kind).cuda().bfloat16()
    states = states_for(head)
    expected = [*outputs(head), head.project(states)]
    if weights == "many rows":
        monkeypatch.setattr(preparing, "MAX_ROWS", ROWS - 1)
    options = LayerOptions(compiled=False, int8=weights == "int8")
    assert prepare_layers(head, head.norm, head.lm_head, options) == len(head.layers)
    head.prepare_input(int8=options.int8)
    for found, other in zip([*outputs(head), head.project(states)], expected, strict=True):
        assert (found - other).float().norm() <= (0.05 if weights == "int8" else 0.03) * other.float().norm()
