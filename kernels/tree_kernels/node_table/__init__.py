"""Rows of a pass chosen on the device, from trees that a draft sent and from sequences' own text."""

from tree_kernels.node_table.dispatch import NodeTable
from tree_kernels.node_table.feeding import advance_one_token, fill_pending, shift_by_accepted
from tree_kernels.node_table.layout import longest_run
from tree_kernels.node_table.mailboxes import Mailboxes
from tree_kernels.node_table.step_integers import StepIntegers

__all__ = [
    "Mailboxes",
    "NodeTable",
    "StepIntegers",
    "advance_one_token",
    "fill_pending",
    "longest_run",
    "shift_by_accepted",
]
