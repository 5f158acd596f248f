"""What a graph shall replay asks the device for nothing and takes nothing from the host, or capturing it would fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured import Captured
from conftest import make_tiny
from eagle_drafting import COUPLED, GREEDY, SETTINGS, make_drafter, opened, sequence_of, states_of, text
from eagle_heads import KINDS, MODULES, fuse, make_head, make_module
from static_drafting import StaticDrafting, StaticTorch
from torch import Tensor

from draft_service.causal_lm.drafter import ModelConfig, ModelDrafter
from draft_service.drafters.base import DraftSequence
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.head_drafter import HeadNetwork
from tree_kernels.attention.triton_backend import TritonAttention, TritonPlan
from tree_kernels.experts import RowExperts
from tree_kernels.linear import layers as linear
from tree_models.layers import paged


class NoAttention(StaticTorch):
    """What Triton would do in two launches."""

    def run(
        self,
        plan: Any,  # noqa: ARG002
        query: Tensor,
        key_cache: Tensor,  # noqa: ARG002
        value_cache: Tensor,
        scale: float,
        variant: Any = None,  # noqa: ARG002
    ) -> Tensor:
        return (query + scale)[..., : value_cache.shape[-1]]


class CapturedDrafting(StaticDrafting):
    def _capturable(self) -> TritonAttention:
        return NoAttention()

    def _capture(self, run: Callable[[], Any], plan: TritonPlan) -> Callable[[], Any]:
        # The first time, tables are made.
        run()
        replay = super()._capture(run, plan)

        def captured() -> Any:
            with Captured() as mode:
                output = replay()
            assert mode.launches > 10
            return output

        return captured


def write_nothing(*_: Tensor) -> None:
    """One launch, that knows rows without a slot."""


@pytest.mark.parametrize("fused", [False, True], ids=["modules", "kernels"])
@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", [KINDS["eagle-3"], KINDS["two layers"]], ids=["one layer", "two layers"])
def test_trees_and_commits_can_be_captured(
    kind: dict[str, Any], mode: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "write_kv", write_nothing)
    monkeypatch.setattr(linear, "write_kv", write_nothing)
    head = make_head(head_dim=16, **kind)
    drafter, config = make_drafter(head), EagleConfig(**SETTINGS)
    if fused:
        fuse(head)
    drafting = drafter._drafting = CapturedDrafting(HeadNetwork(head), config)
    for count in (1, 3):
        sequences = [opened(drafter, sequence_of(text(6, i), mode), states_of(head, 6, i)) for i in range(count)]
        assert all(tree.drafted for tree in drafter.propose(sequences))
    assert len(drafting._trees) == 2 and len(drafting._passes) == 2


@pytest.mark.parametrize("changes", MODULES.values(), ids=MODULES)
def test_an_mtp_module_can_be_captured(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "write_kv", write_nothing)
    head = make_module(**changes)
    if "mlp" in changes:
        # What a GPU computes without asking the host.
        head.layers[0].mlp.op = RowExperts()  # type: ignore[union-attr]
    drafter, config = make_drafter(head), EagleConfig(**SETTINGS)
    drafting = drafter._drafting = CapturedDrafting(HeadNetwork(head), config)
    assert drafter.propose([opened(drafter, sequence_of(text(6)), states_of(head, 6))])[0].drafted
    assert len(drafting._trees) == 1 and len(drafting._passes) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_language_models_can_be_captured(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(family).save_pretrained(tmp_path)
    config = ModelConfig(draft_model=str(tmp_path), dtype="float32", kv_tokens=512, page_size=8)
    drafter = ModelDrafter(config)
    drafter.start()
    monkeypatch.setattr(paged, "write_kv", write_nothing)
    assert drafter._drafting is not None
    drafting = drafter._drafting = CapturedDrafting(drafter._drafting.network, config)
    sequence = DraftSequence(1, text(6), 1, drafter.vocabulary_size)
    drafter.open(sequence)
    assert drafter.propose([sequence])[0].drafted
    assert len(drafting._trees) == 1 and len(drafting._passes) == 1


def test_a_rehearsal_runs_what_is_captured_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it compiles all that warming up will capture, and the drafter is as it was."""
    sizes: list[Any] = []

    class Rehearsed(StaticDrafting):
        def _capture(self, run: Callable[[], Any], plan: TritonPlan) -> Callable[[], Any]:
            # A graph's key is its first caller's; rehearsed and captured passes are told apart by what is kept.
            sizes.append((plan.batch.rows, plan.batch.sequences))
            return super()._capture(run, plan)

    monkeypatch.setattr(paged, "write_kv", write_nothing)
    head = make_head(head_dim=16)
    drafter, config = make_drafter(head), EagleConfig(**{**SETTINGS, "captured_sequences": 4})
    drafter._config = config
    drafting = drafter._drafting = Rehearsed(HeadNetwork(head), config)
    free = drafting.cache.free_pages
    with monkeypatch.context() as patched:
        # Of REJECTION requests, whose results it would read, nothing.
        patched.setattr(type(drafter), "propose", lambda *_: pytest.fail("read results"))
        for rehearsal in drafter._rehearsals():
            rehearsal()
    rehearsed, sizes[:] = set(sizes), []
    assert not drafting._passes and not drafting._trees and drafting.cache.free_pages == free
    drafter._warm_up()
    assert rehearsed <= set(sizes) and {size for size, _ in drafting._trees} == {1, 2, 4}
    # What only levels of REJECTION requests run is compiled when it is captured.
    assert len(rehearsed) >= len(drafting._trees) and len(set(sizes) - rehearsed) <= len(drafting._passes)
