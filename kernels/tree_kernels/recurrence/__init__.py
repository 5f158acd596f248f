"""Recurrent layers over trees of guesses: short convolutions, the gated delta rule, Mamba2,
selective scans,
the delta rule with a decay for each number of a key.

The state of the last committed token is read, and what a pass's nodes would add is not written: all nodes are solved at
once with a mask of ancestors, their inputs are kept, and the accepted ones are folded into the state, one after the
other as in plain decoding, when the next pass begins.
"""

from tree_kernels.recurrence.dispatch import RecurrenceBackend, RecurrentPass, TreeRecurrence
from tree_kernels.recurrence.gating import SpaceOutput, delta_gates, gated_heads, space_gates, space_output
from tree_kernels.recurrence.kept import KeptStates
from tree_kernels.recurrence.states import RecurrentStates
from tree_kernels.recurrence.types import (
    MOST_NODES,
    Convolved,
    HeadsLayout,
    RecurrencePlan,
    ShortConvolution,
    StateRule,
    StateShape,
)

__all__ = [
    "MOST_NODES",
    "Convolved",
    "HeadsLayout",
    "KeptStates",
    "RecurrenceBackend",
    "RecurrencePlan",
    "RecurrentPass",
    "RecurrentStates",
    "ShortConvolution",
    "SpaceOutput",
    "StateRule",
    "StateShape",
    "TreeRecurrence",
    "delta_gates",
    "gated_heads",
    "space_gates",
    "space_output",
]
