"""Updates of a target's weights: what happens to running requests, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RunningRequests(Enum):
    """What happens to running requests. Queued ones always run with the new weights."""

    # They finish with the old weights first; the others wait until then.
    DRAIN = "drain"
    # They fail with `WeightsChanged`, to be sent again.
    ABORT = "abort"
    # They are prefilled again with the new weights, and go on.
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """A finished update; times in seconds.

    `model_version` is that of the new weights; `tensors` and `bytes` are the exchanged ones. `prepare` is the time of
    reading and checking, while requests ran, `pause` that of the exchange, in which no step ran. `aborted` requests
    failed with `WeightsChanged`; `continued` ones are prefilled again.
    """

    model_version: int
    tensors: int
    bytes: int
    prepare: float
    pause: float
    aborted: int
    continued: int
