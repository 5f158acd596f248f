"""Weights that wait to replace those of a network, read while it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from target_service.model.network import TargetNetwork
from target_service.model.weights.files import read_weights
from target_service.model.weights.host_memory import HostMemory
from target_service.model.weights.slots import weight_slots, write_weights
from tree_models.ranks.decoder import RankDecoder
from tree_models.slots import WeightSlot, specs_of


@dataclass(eq=False)
class WaitingWeights:
    """The weights of one exchange: `read`, then `write` between two steps, and `release` in any case. `read` may run
    in another thread."""

    network: TargetNetwork
    weights: Mapping[str, Tensor] = field(default_factory=dict, init=False)
    _slots: Sequence[WeightSlot] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._memory = HostMemory(self.network.device)

    def read(self, folder: Path) -> None:
        """Read a folder's tensors, of a rank's network its part of each. Raises what `read_weights` does."""
        network, self._slots = self.network, weight_slots(self.network)
        if isinstance(network, RankDecoder):
            self.weights = read_weights(folder, network.whole_specs, self._memory, network.cuts)
        else:
            self.weights = read_weights(folder, specs_of(self._slots), self._memory)
        self._memory.lock()

    def write(self, beat: Callable[[], None]) -> None:
        """Write them to the network; see `write_weights`."""
        write_weights(self._slots, self.weights, self.network.device, beat)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor of the whole model, one of two that are tied."""
        network, weights = self.network, self.weights
        specs = network.whole_specs if isinstance(network, RankDecoder) else specs_of(self._slots)
        return list({tensor.data_ptr(): specs[name].nbytes for name, tensor in weights.items()}.values())

    def release(self) -> None:
        """Give their memory back."""
        self.weights = {}
        self._memory.release()
