"""What the choices of launches share: whether a step waits for its draft, which loads are one, and margins."""

from __future__ import annotations

from enum import Enum

# Of all choices: what drafted passes have to make of plain ones, so that noise does not decide; the share of the time
# that tries of what seems slower may take, a hundredth by the design of the loop; and the share of the faster rate
# below which a first trial ends early. The first and the last are chosen.
MARGIN, TRYING, HOPELESS = 1.02, 0.01, 0.8


class LaunchMode(Enum):
    """How a step with a draft is launched. A pass without a draft has no mode (None)."""

    # Without waiting: with the rows that the device chooses from the trees it has, or with none.
    RUN_AHEAD = "run_ahead"
    # Once the draft has answered the last committed tokens. Nothing runs on the device until then.
    WAIT_FOR_DRAFT = "wait_for_draft"


def load_size(load: int) -> int:
    """Loads in powers of two, up to and with each: as many sequences as there is room for, and one less, which an
    arrival replaces, are one load."""
    return (load - 1).bit_length()
