"""Trees that a network grows behind each pass of its target, on the device alone."""

from tree_kernels.pass_trees.dispatch import NODES, make_tails, read_outcome, write_tables
from tree_kernels.pass_trees.types import Tails, VerifiedRows

__all__ = ["NODES", "Tails", "VerifiedRows", "make_tails", "read_outcome", "write_tables"]
