"""Requests and results of exchanges of the model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.errors import OutriderError

# Version of the weights that an engine starts with; each exchange increases it by one.
FIRST_VERSION = 1


class RunningRequests(Enum):
    """What happens to sequences that have begun. All others run with the new weights in any case."""

    # They end with the old weights first.
    DRAIN = "drain"
    # They end at once, with `WeightsChanged`.
    ABORT = "abort"
    # They are read again with the new weights, and continue.
    CONTINUE = "continue"


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
