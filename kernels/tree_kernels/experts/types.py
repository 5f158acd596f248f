"""What a mixture of experts is made of: how rows choose, what they chose, and the experts' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tree_kernels.linear import Activation, GateForm
from tree_kernels.linear.forms import PLAIN_GATE, SILU


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row chooses its experts by their scores, and weighs them."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = True  # weights of the chosen sum to one
    least_sum: float = 0.0  # added to that sum
    clamped_sum: float = 0.0  # the least that it counts as
    # A row chooses among the experts of its `top_groups` best groups of consecutive experts.
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best expert's, or the sum of its two best
    scaling: float = 1.0  # of the weights
    rounded: bool = False  # weights are rounded to the rows' type

    def __post_init__(self) -> None:
        if self.top_k < 1 or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"expected top_k of 1 or more and top_groups of 1 to groups, got {self}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of R rows, the best first."""

    experts: Tensor  # [R, k] int32, contiguous
    weights: Tensor  # [R, k] fp32, contiguous


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of E experts of width I, each with a gate or each without."""

    gate_up: Tensor  # [E, 2 * I, H], contiguous; an expert's gate above its up; or [E, I, H], up alone
    down: Tensor  # [E, H, I], contiguous
    activation: Activation = SILU
    gate_form: GateForm = PLAIN_GATE
    gate_up_bias: Tensor | None = None  # [E, 2 * I], contiguous
    down_bias: Tensor | None = None  # [E, H], contiguous

    @property
    def gated(self) -> bool:
        """Whether experts have gates: else down reads activation(up)."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]

    def check(self) -> None:
        """Raise `ValueError` unless all have the same experts and widths, one type, and no gaps."""
        experts, made, hidden = self.gate_up.shape
        inner = self.down.shape[-1]
        if tuple(self.down.shape) != (experts, hidden, inner) or made not in (inner, 2 * inner):
            shapes = list(self.gate_up.shape), list(self.down.shape)
            raise ValueError(f"expected gate_up [E, 2 * I, H] and down [E, H, I], got {shapes[0]} and {shapes[1]}")
        if self.gate_up.dtype != self.down.dtype:
            raise ValueError("expected gate_up and down of one dtype")
        if not (self.gate_up.is_contiguous() and self.down.is_contiguous()):
            raise ValueError("expected gate_up and down to be contiguous")
        for bias, width in ((self.gate_up_bias, made), (self.down_bias, hidden)):
            if bias is None:
                continue
            if bias.shape != (experts, width) or bias.dtype != self.down.dtype or not bias.is_contiguous():
                raise ValueError(f"expected biases [E, 2 * I] and [E, H] of the weights' dtype, got {list(bias.shape)}")
