"""What is asked of an exchange of the model's weights, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.errors import OutriderError

# Of the weights that an engine is started with; each exchange makes it one more.
FIRST_VERSION = 1


class RunningRequests(Enum):
    """What becomes of sequences that have begun. Those that have not run with the new weights, whatever it is."""

    # They end with the old weights first.
    DRAIN = "drain"
    # They end at once, with `WeightsChanged`.
    ABORT = "abort"
    # They are read again with the new weights, and go on.
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Where the new weights are: a folder of safetensors files on the engine's machine."""

    folder: str
    running: RunningRequests = RunningRequests.DRAIN


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """An exchange that was done.

    Attributes:
        model_version: of the weights in force.
        tensors, bytes: what was exchanged.
        prepare_ns: reading and checking, while sequences ran.
        pause_ns: the exchange itself, in which no step ran.
        aborted: sequences that ended with `WeightsChanged`.
        continued: sequences that had begun, and are read again.
    """

    model_version: int
    tensors: int
    bytes: int
    prepare_ns: int
    pause_ns: int
    aborted: int = 0
    continued: int = 0


# Gets what came of an update, once; from any thread.
UpdateDone = Callable[[WeightsUpdated | OutriderError], None]
