"""What an exchange of a target's weights does to requests that have begun."""

from __future__ import annotations

from enum import Enum


class RunningRequests(Enum):
    """What happens to running requests. Queued ones always run with the new weights."""

    # They finish with the old weights first; the others wait until then.
    DRAIN = "drain"
    # They fail with `WeightsChanged`, to be sent again.
    ABORT = "abort"
    # They are prefilled again with the new weights, and go on.
    CONTINUE = "continue"
