"""Rows of a pass chosen on the device, from trees that a draft sent and from sequences' own text."""

from tree_kernels.node_table.dispatch import NodeTable
from tree_kernels.node_table.feeding import advance, fill_pending, move_on
from tree_kernels.node_table.layout import (
    EXPECTED_UNIT,
    KEPT,
    LONGEST,
    LOOKUP,
    MAX_PATH,
    MOST_COST,
    NODES,
    PROSPECTS,
    REPORT,
    REPORT_ROWS,
    REPORT_TOKENS,
    TABLE,
    WINDOW,
    Figure,
    longest_run,
)
from tree_kernels.node_table.lookup_costs import COST_OF_HALVING, RIGHT
from tree_kernels.node_table.mailboxes import Mailboxes
from tree_kernels.node_table.step_integers import StepIntegers

__all__ = [
    "COST_OF_HALVING",
    "EXPECTED_UNIT",
    "KEPT",
    "LONGEST",
    "LOOKUP",
    "MAX_PATH",
    "MOST_COST",
    "NODES",
    "PROSPECTS",
    "REPORT",
    "REPORT_ROWS",
    "REPORT_TOKENS",
    "RIGHT",
    "TABLE",
    "WINDOW",
    "Figure",
    "Mailboxes",
    "NodeTable",
    "StepIntegers",
    "advance",
    "fill_pending",
    "longest_run",
    "move_on",
]
