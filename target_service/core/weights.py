"""Requests and results of exchanges of the model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.running_requests import RunningRequests

# Version of the weights that an engine starts with; each exchange increases it by one.
FIRST_VERSION = 1


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Where the new weights are: a folder of safetensors files on the engine's machine."""

    folder: str
    running: RunningRequests = RunningRequests.DRAIN


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """The result of an exchange.

    Attributes:
        model_version: version of the new weights.
        tensors, bytes: what was exchanged.
        prepare_ns: reading and checking, while sequences ran.
        pause_ns: the exchange itself, in which no step ran.
        aborted: sequences that ended with `WeightsChanged`.
        continued: sequences that are read again.
    """

    model_version: int
    tensors: int
    bytes: int
    prepare_ns: int
    pause_ns: int
    aborted: int = 0
    continued: int = 0


# Receives the result of an update, once; called from any thread.
UpdateDone = Callable[[WeightsUpdated | OutriderError], None]
