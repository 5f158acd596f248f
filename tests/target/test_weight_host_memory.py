"""Memory that new weights wait in: page-locked in pieces where the system allows it, and given back."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from waits import HUNG_SECONDS

from outrider.errors import InvalidField
from target_service.model.weights import host_memory
from target_service.model.weights.files import read_weights
from target_service.model.weights.host_memory import HostMemory, copy_in_pieces
from tree_models.slots import TensorSpec

GPU, CPU = torch.device("cuda"), torch.device("cpu")
PIECE = 4 * mmap.PAGESIZE


class Locks:
    """Stands in for CUDA's locks; refuses those beyond `allowed` pieces."""

    def __init__(self) -> None:
        self.allowed = 1_000
        self.held: dict[int, int] = {}
        self.ever: dict[int, int] = {}

    def lock(self, _device: torch.device, address: int, size: int) -> None:
        assert address % mmap.PAGESIZE == 0 and size <= PIECE
        assert all(address + size <= begin or begin + held <= address for begin, held in self.held.items())
        if len(self.held) == self.allowed:
            raise RuntimeError("CUDA error 2")
        self.held[address] = self.ever[address] = size

    def unlock(self, _device: torch.device, address: int) -> None:
        del self.held[address]


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    made = Locks()
    monkeypatch.setattr(host_memory, "PIECE", PIECE)
    monkeypatch.setattr(host_memory, "_page_lock", made.lock)
    monkeypatch.setattr(host_memory, "_page_unlock", made.unlock)
    return made


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HUNG_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tensors() -> dict[str, torch.Tensor]:
    """Small, large and odd ones, one of one value and one of none."""
    shapes: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (PIECE, 3), "c": (), "d": (0, 4), "e": (PIECE // 2 + 7,)}
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    return made | {"f": torch.randn(11).bfloat16(), "g": torch.randn(2 * PIECE + 1).half()}


def specs(of: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in of.items()}


def test_tensors_lie_in_locked_pieces(locks: Locks, tmp_path: Path) -> None:
    wanted = tensors()
    save_file(wanted, tmp_path / "model.safetensors")
    memory = HostMemory(GPU)
    found = read_weights(tmp_path, specs(wanted), memory)
    assert not locks.held
    memory.lock()
    assert memory.locked_bytes == sum(locks.held.values()) >= sum(tensor.nbytes for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
        begin, end = found[name].data_ptr(), found[name].data_ptr() + tensor.nbytes
        assert all(any(at <= byte < at + size for at, size in locks.held.items()) for byte in range(begin, end, 4096))
    memory.release()
    wait_for(lambda: not memory.locked_bytes)
    assert not locks.held
    # There is nothing more to give.
    memory.release()


@pytest.mark.parametrize("allowed", [0, 2])
def test_what_cannot_be_locked_stays_pageable(
    locks: Locks, allowed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tensors()
    save_file(wanted, tmp_path / "model.safetensors")
    locks.allowed = allowed
    memory = HostMemory(GPU)
    found = read_weights(tmp_path, specs(wanted), memory)
    with caplog.at_level("WARNING"):
        memory.lock()
    assert len(locks.held) == allowed and memory.locked_bytes == allowed * PIECE
    assert "not page-locked" in caplog.text
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    memory.release()
    wait_for(lambda: not locks.held)


@pytest.mark.usefixtures("locks")
def test_memory_goes_back_to_the_system() -> None:
    memory = HostMemory(GPU)
    memory.reserve([3 * PIECE])
    tensor = memory.allocate((3 * PIECE,), torch.uint8)
    tensor.fill_(7)
    memory.lock()
    memory.release()
    wait_for(lambda: not memory.locked_bytes)
    # Pages that were given back read as zeros.
    assert not tensor.any()


def test_memory_of_a_cpu_locks_nothing(locks: Locks, tmp_path: Path) -> None:
    wanted = tensors()
    save_file(wanted, tmp_path / "model.safetensors")
    memory = HostMemory(CPU)
    found = read_weights(tmp_path, specs(wanted), memory)
    memory.lock()
    memory.release()
    assert not locks.ever
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_weights_that_do_not_fit_are_never_locked(locks: Locks, tmp_path: Path) -> None:
    wanted = tensors()
    wanted["e"][5] = float("inf")
    save_file(wanted, tmp_path / "model.safetensors")
    with pytest.raises(InvalidField, match="not finite"):
        read_weights(tmp_path, specs(wanted), HostMemory(GPU))
    assert not locks.ever


def test_no_memory_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", none)
    with pytest.raises(MemoryError, match="640 bytes"):
        HostMemory(GPU).reserve([600])


@pytest.mark.usefixtures("locks")
def test_copies_end_where_pieces_do(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def noting(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        copied.append((source.data_ptr(), source.nbytes))
        return copy(into, source)

    memory = HostMemory(GPU)
    memory.reserve([100, 5 * PIECE])
    memory.allocate((50,), torch.bfloat16)
    source = memory.allocate((5, PIECE // 2), torch.bfloat16)
    source.copy_(torch.randn(source.shape))
    # Rows of a larger tensor, as joined layers have them.
    joint = torch.zeros(9, PIECE // 2, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "copy_", noting)
    copy_in_pieces(joint[2:7], source)
    assert torch.equal(joint[2:7], source) and not joint[:2].any() and not joint[7:].any()
    assert sum(size for _, size in copied) == source.nbytes and len(copied) == 6
    assert all(at // PIECE == (at + size - 1) // PIECE for at, size in copied)


def test_memory_that_lies_in_another_order() -> None:
    memory, source = torch.zeros(7, 5).t(), torch.randn(5, 7)
    copy_in_pieces(memory, source)
    assert torch.equal(memory, source)
