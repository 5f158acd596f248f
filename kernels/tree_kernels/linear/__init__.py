"""Linear layers of few rows together with what a decoder layer does before and after them."""

from tree_kernels.linear.dispatch import HeadRows, Norm, RowLinears, ScaledRows, TorchLinears, row_linears

__all__ = ["HeadRows", "Norm", "RowLinears", "ScaledRows", "TorchLinears", "row_linears"]
