"""How much of a GPU's memory the cache of keys and values takes, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from target_service.core.kv_cache import KVCache
from target_service.model.cuda_graphs import capturing
from tree_kernels.ahead import AheadCompiler

GB = 1 << 30


class Device:
    """Counts what is free of so many bytes."""

    def __init__(self, free: int, *, left_by_joining: int, step: int) -> None:
        self.free, self._kept, self._step = free, left_by_joining, step

    def empty_cache(self) -> None:
        """Give back what PyTorch keeps."""
        self.free, self._kept = self.free + self._kept, 0

    def capture(self) -> None:
        # As `torch.cuda.graph` does first.
        self.empty_cache()
        self.free -= self._step


class Captured:
    """A runner with one captured size, whose step takes what the device says."""

    device, scratch_bytes, node_table = torch.device("cpu"), 0, None

    def __init__(self, device: Device) -> None:
        self._device = device
        self.ahead = AheadCompiler((), 0)
        self.buckets: Sequence[int] = [1]
        self.cache = KVCache(4, 16, [(2, 8, 8)] * 2, torch.float32, torch.device("cpu"))

    def compile_ahead(self, *_: object) -> None:
        """Nothing has to be."""

    def capture(self, wanted: Sequence[int], **_: Any) -> int:
        self._device.capture()
        return len(wanted)

    def drop_captures(self) -> None:
        """Nothing is held."""

    def use_cache(self, cache: Any) -> None:
        self.cache = cache

    def free_memory(self) -> int:
        self._device.empty_cache()
        return self._device.free

    def keep_to_captured(self) -> None:
        """All are."""


@pytest.mark.parametrize("left_by_joining", [0, 5 * GB, 14 * GB])
def test_what_joining_layers_leaves_is_not_given_out_twice(
    monkeypatch: pytest.MonkeyPatch, left_by_joining: int
) -> None:
    """A GPU of 80 GB with a model of 14 ran out of memory at start."""
    device = Device(66 * GB - left_by_joining, left_by_joining=left_by_joining, step=1 * GB)
    given: list[float] = []

    def cache_of(small: KVCache, free: float, share: float) -> KVCache:
        given.append(free * share)
        return small

    monkeypatch.setattr(capturing, "_cache_of", cache_of)
    monkeypatch.setattr(capturing, "_capture_all", lambda *_: None)
    runner: Any = Captured(device)
    capturing.capture_steps(runner, seconds=1.0, memory_share=0.85)
    # 66 GB free, of which a captured step takes one that is set aside one and a half times.
    (size,) = given
    assert 0.85 * 62 * GB < size < 0.85 * 64 * GB
