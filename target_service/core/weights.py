"""Requests and results of exchanges of the model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.weight_updates import RunningRequests, WeightsUpdated

# Version of the weights that an engine starts with; each exchange increases it by one.
FIRST_VERSION = 1


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Where the new weights are: a folder of safetensors files on the engine's machine."""

    folder: str
    running: RunningRequests = RunningRequests.DRAIN


# Receives the result of an update, once; called from any thread.
UpdateDone = Callable[[WeightsUpdated | OutriderError], None]
