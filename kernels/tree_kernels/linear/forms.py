"""What families of models compute between products, as data: the heads' norms, the activation, how a sum is made.

Each form is part of a layer's description and is the same in every step. Kernels are compiled for the forms in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from tree_kernels.linear.rows import Norm


@dataclass(frozen=True, slots=True)
class HeadForm:
    """What is done to queries and keys before attention: norms, then rotary embedding; and to values.

    A norm's weight is [D], for each head by itself, or as wide as all heads together, for a norm over all of them.
    """

    query_norm: Norm | None = None
    key_norm: Norm | None = None
    # Pair i of the rotary embedding is numbers 2i and 2i + 1 of a head, not i and T / 2 + i.
    interleaved: bool = False
    value_epsilon: float = 0.0  # of an RMSNorm of each value's head without weights, beside such norms; 0 for none

    def __post_init__(self) -> None:
        if (self.query_norm is None) != (self.key_norm is None):
            raise ValueError("expected norms of queries and keys, or neither")
        if self.value_epsilon and (self.query_norm is None or self.query_norm.weight.dim() != 1):
            raise ValueError("expected a norm of values beside norms of queries and keys")


class ActivationKind(StrEnum):
    """What is made of a product's numbers: an MLP's activation, or a gate's."""

    SILU = "silu"
    GELU = "gelu"  # by the error function
    GELU_TANH = "gelu_tanh"  # its approximation by tanh
    RELU = "relu"
    RELU2 = "relu2"  # max(x, 0)²
    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 x), which is near to GELU
    SIGMOID = "sigmoid"  # 1 / (1 + exp(-x)), which is a gate's
    SOFTPLUS = "softplus"  # log(1 + exp(x)), likewise
    XIELU = "xielu"  # arXiv 2411.13010
    NONE = "none"  # the product itself


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation, and its numbers where it has any."""

    kind: ActivationKind = ActivationKind.SILU
    # xIELU's [4] fp32: alpha of positive numbers, alpha of negative ones, beta, epsilon.
    parameters: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.kind is ActivationKind.XIELU) != (self.parameters is not None):
            raise ValueError(f"expected parameters for xIELU alone, not for {self.kind}")


@dataclass(frozen=True, slots=True)
class GateForm:
    """How gate and up become what down reads: activation(gate) * (up + offset), with limits of both."""

    limit: float = 0.0  # the most that gate is, and the size that up is limited to; 0 for none
    limits_activated: bool = False  # what is limited is activation(gate), not gate (Step 3.7)
    offset: float = 0.0  # added to up

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"expected a limit of 0 or more, got {self.limit}")


@dataclass(frozen=True, slots=True)
class SumForm:
    """How a product joins the residual: residual + multiplier * norm(product)."""

    norm: Norm | None = None  # over the product's columns
    multiplier: float = 1.0


NO_ACTIVATION = Activation(ActivationKind.NONE)
LLAMA_HEADS = HeadForm()
SILU = Activation()
PLAIN_GATE = GateForm()
PLAIN_SUM = SumForm()
