"""Weights are read by several threads at once, as many bytes as there is room for, and what fails ends the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tree_models.names import WeightNames
from tree_models.slots import in_place
from tree_models.weights import loading
from tree_models.weights.checkpoint import StoredTensor, TensorsInMemory, WeightsRefused
from tree_models.weights.separate_experts import SeparateExperts

NAMES = WeightNames(ignored=(), joining="")
SECONDS = 30.0
# Of gate, up and down of experts together: [E, 2 * I, H] and [E, H, I].
WHOLE = {"gate_up_proj": (6, 4, 2), "down_proj": (6, 2, 2)}


class Source:
    """Tensors [4] of their number, each of which `before` is called for when it is read."""

    def __init__(self, count: int, before: Callable[[str], object]) -> None:
        self.stored = {str(number): StoredTensor((4,), "F32") for number in range(count)}
        self._before = before

    def read(self, name: str) -> Tensor:
        self._before(name)
        return torch.full((4,), float(name))


def load(source: Source, readers: int) -> Tensor:
    """[tensors, 4], as they are read."""
    memory = torch.full((len(source.stored), 4), -1.0)
    slots = [in_place(name, memory[int(name)], Tensor.copy_) for name in source.stored]
    loading.load_slots(slots, source, NAMES, readers)
    return memory


def test_several_are_read_at_once() -> None:
    # Each of the four waits for the other three.
    together = threading.Barrier(4)
    assert torch.equal(load(Source(8, lambda _: together.wait(SECONDS)), 4)[:, 0], torch.arange(8.0))


def test_no_more_is_in_memory_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of two tensors.
    monkeypatch.setattr(loading, "_UNDER_WAY", 2 * 16)
    together, reading, most = threading.Barrier(2), set[str](), list[int]()

    def read(name: str) -> None:
        reading.add(name)
        most.append(len(reading))
        together.wait(SECONDS)
        reading.discard(name)

    load(Source(6, read), 4)
    assert max(most) == 2


def test_one_that_is_larger_than_the_room_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_UNDER_WAY", 8)
    assert torch.equal(load(Source(3, lambda _: None), 4)[:, 3], torch.arange(3.0))


def test_what_cannot_be_read_ends_the_rest() -> None:
    read = list[str]()

    def refuse(name: str) -> None:
        read.append(name)
        if name == "1":
            raise WeightsRefused("it changed")

    with pytest.raises(WeightsRefused, match="it changed"):
        load(Source(100, refuse), 1)
    assert read == ["0", "1"]


def test_a_tensor_of_all_experts_is_read_once_by_several_readers() -> None:
    read = list[str]()
    stored = {f"model.layers.0.mlp.experts.{name}": StoredTensor(shape, "F32") for name, shape in WHOLE.items()}

    class Experts:
        def __init__(self) -> None:
            self.stored = stored

        def read(self, name: str) -> Tensor:
            read.append(name)
            shape = stored[name].shape
            return torch.arange(float(torch.Size(shape).numel())).view(shape)

    apart = SeparateExperts(Experts())
    memory = {name: torch.empty(one.shape) for name, one in apart.stored.items()}
    slots = [in_place(name, tensor, Tensor.copy_) for name, tensor in memory.items()]
    loading.load_slots(slots, apart, NAMES, 4)
    assert sorted(read) == sorted(stored)
    assert torch.equal(memory["model.layers.0.mlp.experts.2.up_proj.weight"], torch.arange(20.0, 24.0).view(2, 2))


def test_experts_may_lie_by_columns() -> None:
    """As Qwen3-VL's, where their shapes say so."""
    rows = {"gate_up_proj": torch.randn(3, 8, 5), "down_proj": torch.randn(3, 5, 4)}
    columns = {name: tensor.transpose(1, 2).contiguous() for name, tensor in rows.items()}
    apart = [
        SeparateExperts(TensorsInMemory({f"mlp.experts.{name}": one for name, one in lying.items()}), hidden_size=5)
        for lying in (rows, columns)
    ]
    assert apart[0].stored == apart[1].stored and len(apart[0].stored) == 9
    for name in apart[0].stored:
        assert torch.equal(apart[0].read(name), apart[1].read(name))
