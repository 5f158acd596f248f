"""Kernels compiled ahead of their first launch, by several processes at once.

A start compiles hundreds of kernels, each when it is first launched: one after the other, on one core. Here the same
code is run once without launching anything. What it would compile is collected and compiled by processes into Triton's
cache on disk, so that the launches that follow find it there.
"""

from tree_kernels.ahead.compiling import AheadCompiler
from tree_kernels.ahead.processes import CHILD

__all__ = ["CHILD", "AheadCompiler"]
