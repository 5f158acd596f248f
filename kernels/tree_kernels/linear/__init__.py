"""Linear layers together with what a decoder layer does before and after them."""

import torch
from torch import Tensor

from tree_kernels.linear.forms import NO_ACTIVATION, PLAIN_SUM, Activation, ActivationKind, GateForm, HeadForm, SumForm
from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.layers import RowLinears
from tree_kernels.linear.rows import HeadInputs, HeadRows, Norm, ScaledRows
from tree_kernels.linear.triton_tiling import choose_vector_tiling

__all__ = [
    "NO_ACTIVATION",
    "PLAIN_SUM",
    "Activation",
    "ActivationKind",
    "GateForm",
    "HeadForm",
    "HeadInputs",
    "HeadRows",
    "Int8Weight",
    "Norm",
    "RowLinears",
    "ScaledRows",
    "SumForm",
    "Weight",
]


def row_linears(device: torch.device, *, invariant: bool = False) -> RowLinears:
    """The layers for few rows. With `invariant`, no bit of a row's result depends on how many rows there are."""
    if device.type != "cuda":
        return RowLinears()
    # Only here: Triton may be absent, and Gluon's kernels are for Hopper alone.
    from tree_kernels.hopper import runs_on
    from tree_kernels.linear.triton_backend import TritonLinears

    if invariant or not runs_on(device):
        return TritonLinears(device, invariant=invariant)
    from tree_kernels.linear.ring_backend import RingLinears

    return RingLinears(device)


def single_row_linears(device: torch.device) -> RowLinears:
    """The layers for one row, whose weights need no matrix units."""
    if device.type != "cuda":
        return RowLinears()
    from tree_kernels.linear.vector_backend import VectorLinears

    return VectorLinears(device)


def reads_in_registers(weight: Tensor) -> bool:
    """Whether `single_row_linears` reads a weight [N, K] through registers."""
    return weight.is_cuda and choose_vector_tiling(*weight.shape, itemsize=weight.element_size()) is not None


def many_row_linears(device: torch.device) -> RowLinears:
    """The layers with cuBLAS's products, which is faster for many rows."""
    if device.type != "cuda":
        return RowLinears()
    from tree_kernels.linear.cublas_backend import CublasLinears

    return CublasLinears(device)
