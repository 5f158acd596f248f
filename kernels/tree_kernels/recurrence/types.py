"""What a kind of recurrent layer computes between its products, and what is kept of a sequence.

Symbols: R rows, C channels of the convolution, K its taps, G gates, H heads of the state, Dk and Dv its widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch

# Rows of a tree on a GPU, whose ancestors are bits of one word.
MOST_NODES = 64


class StateRule(StrEnum):
    """How a token changes the state S [Dk, Dv] of a head, which decays by exp(g) first.

    DELTA: S += k (beta * (v - k S)), the gated delta rule (arXiv 2412.06464). SUM: S += k (beta * v), that of Mamba2
    (arXiv 2405.21060). A head's output is q S.
    """

    DELTA = "delta"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of what one recurrent layer keeps of a sequence. Without heads, only its convolution's last inputs.

    Where it is `selective`, each channel is a head, and its state [N] decays by factors of its own (Mamba, arXiv
    2312.00752): S = exp(step * decay) S + step * value * key, of which the output is query S. Channels have keys and
    queries in `key_groups`, consecutive ones the same.
    Where it is `keyed`, each number of a key decays by itself (Kimi Delta Attention, arXiv 2510.26692): the delta rule
    behind S = exp(g)[:, None] S, with g [Dk] of each head.
    """

    channels: int
    taps: int
    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    selective: bool = False
    keyed: bool = False
    key_groups: int = 1

    def __post_init__(self) -> None:
        if self.channels < 1 or self.taps < 1:
            raise ValueError(f"expected channels and at least one tap, got {self.channels} and {self.taps}")

    @property
    def gates(self) -> int:
        """G, gates of a token: of each head the logarithm of its decay, then of each head its beta; of a selective
        scan each channel's step, then the keys; of keyed states each head's logarithms of decays, then all betas."""
        if self.selective:
            return self.heads + self.key_groups * self.key_width
        return self.heads * self.key_width + self.heads if self.keyed else 2 * self.heads

    @property
    def early_gates(self) -> int:
        """Those that the convolution keeps. Others are kept with the states."""
        return 0 if self.selective or self.keyed else self.gates


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """A causal convolution of each channel by itself: output t is the sum of weight[:, j] * input t - K + 1 + j."""

    weight: Tensor  # [C, K]
    bias: Tensor | None = None  # [C]
    silu: bool = False  # of the output


@dataclass(frozen=True, slots=True)
class HeadsLayout:
    """Where the convolution's outputs have queries, keys and values, and how heads use them.

    Queries and keys are `key_heads` of Dk numbers each, shared by consecutive heads of values. `normed` divides both by
    their length (the root of the sum of squares and 1e-6). `scaling` multiplies queries.
    """

    rule: StateRule
    key_heads: int
    query_at: int
    key_at: int
    value_at: int
    normed: bool = False
    scaling: float = 1.0


@dataclass
class RecurrencePlan:
    """The index work of one step, done once and used by every layer. Backends add their own."""

    batch: AttentionBatch
    # [R] int32, where each row's inputs are kept until it is accepted or not; negative for rows that are known already.
    node_slots: Tensor


@dataclass
class Convolved:
    """What the convolution makes of a step's rows. Backends add what they made of the tokens before."""

    rows: Tensor  # [R, C]
