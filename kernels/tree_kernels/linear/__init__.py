"""Linear layers of few rows together with what a decoder layer does before and after them."""

from tree_kernels.linear.dispatch import RowLinears, TorchLinears, row_linears
from tree_kernels.linear.rows import HeadInput, HeadInputs, HeadRows, Norm, ScaledRows

__all__ = ["HeadInput", "HeadInputs", "HeadRows", "Norm", "RowLinears", "ScaledRows", "TorchLinears", "row_linears"]
