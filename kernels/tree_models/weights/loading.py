"""Fills a decoder's slots from a checkpoint, strictly: what does not fit is refused before any tensor is read."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tree_models.names import WeightNames
from tree_models.slots import TensorSpec, WeightSlot, specs_of
from tree_models.weights.checkpoint import FLOATS, Stored, TensorSource, WeightsRefused, some

# Bytes of weights in host memory at once; one slot that has more is read alone. Chosen: four embeddings of an 8B model.
_UNDER_WAY = 4 << 30


def readers_for(device: torch.device) -> int:
    """How many threads read weights: on a CPU one, whose operations take all cores."""
    # Threads that read weights for a GPU: copies out of the system's cache and to the device take a core each. Chosen.
    return 8 if device.type == "cuda" else 1


def load_slots(slots: Sequence[WeightSlot], checkpoint: TensorSource, names: WeightNames, readers: int = 1) -> None:
    """Write every slot. Of two that are tied one may be missing.

    Args:
        slots: of all tensors of a model.
        checkpoint: what they are read from, by any thread.
        names: which of them may be left over.
        readers: threads, each of which reads and writes one slot at a time.

    Raises:
        WeightsRefused: tensors are missing, left over, or of another shape or kind of type; tied ones differ. The
            message has the first ten names.
    """
    check_names(specs_of(slots), checkpoint.stored, names)
    under_way, failures = _BytesUnderWay(_UNDER_WAY), list[BaseException]()

    def write(slot: WeightSlot, size: int) -> None:
        try:
            # Of this thread alone. What cannot be read ends the rest.
            with torch.inference_mode():
                if not failures:
                    slot.write([_read(checkpoint, name, spec) for name, spec in slot.specs.items()])
        # Raised by the thread that waits for all.
        except BaseException as error:
            failures.append(error)
        finally:
            under_way.release(size)

    with ThreadPoolExecutor(readers, thread_name_prefix="weights") as threads:
        for slot in slots:
            size = sum(spec.nbytes for spec in slot.specs.values())
            under_way.reserve(size)
            threads.submit(write, slot, size)
    if failures:
        raise failures[0]


class _BytesUnderWay:
    """Host memory of so many bytes, which threads share."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._left = size, 0, threading.Condition()

    def reserve(self, size: int) -> None:
        """Wait until there is room for `size` bytes, or for anything else nothing is there."""
        with self._left:
            self._left.wait_for(lambda: not self._used or self._used + size <= self._size)
            self._used += size

    def release(self, size: int) -> None:
        """Give the bytes back."""
        with self._left:
            self._used -= size
            self._left.notify_all()


def check_names(wanted: Mapping[str, TensorSpec], stored: Mapping[str, Stored], names: WeightNames) -> None:
    """The part of `load_slots` that reads no values, of what is `stored` by name."""
    wrong = []
    if missing := [name for name, spec in wanted.items() if name not in stored and spec.tied_to not in stored]:
        wrong.append(f"missing are {some(missing)}")
    unread = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignored))
    modules = tuple(name.removesuffix(names.joining) for name in stored if name.endswith(f".{names.joining}"))
    left = [name for name in stored if name not in wanted and not unread.fullmatch(name)]
    if left := [name for name in left if not name.startswith(modules)]:
        wrong.append(f"left over are {some(left)}")
    both = {name: (stored[name], spec) for name, spec in wanted.items() if name in stored}
    shapes = {
        f"{name} is {list(one.shape)}, expected {list(spec.shape)}"
        for name, (one, spec) in both.items()
        if one.shape != spec.shape
    }
    if shapes:
        wrong.append(f"of another shape are {some(shapes)}")
    if wrong:
        raise WeightsRefused(f"its tensors are not those of its config.json: {'; '.join(wrong)}")
    if kinds := [f"{name} ({one.dtype})" for name, (one, _) in both.items() if one.dtype not in FLOATS]:
        raise WeightsRefused(f"tensors are no floating point numbers of 16 or 32 bits: {some(kinds)}")


def _read(checkpoint: TensorSource, name: str, spec: TensorSpec) -> Tensor:
    both = spec.tied_to in checkpoint.stored and name in checkpoint.stored
    # Once for the two.
    if both and name < spec.tied_to and not torch.equal(checkpoint.read(name), checkpoint.read(spec.tied_to)):
        raise WeightsRefused(
            f"{name} differs from {spec.tied_to}, and config.json ties them: set tie_word_embeddings to false, or "
            "remove one"
        )
    held = name if name in checkpoint.stored else spec.tied_to
    return checkpoint.read(held).to(spec.dtype)
