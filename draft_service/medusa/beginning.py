"""New Medusa heads for a target: each begins as the target's own lm_head."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draft_service.medusa.head import MedusaHead, MedusaShape


def new_heads(shape: MedusaShape, tokens: NDArray[np.int64] | None, lm_head: Tensor) -> MedusaHead:
    """Heads in fp32 on the CPU whose residual blocks say nothing, as the paper begins (arXiv 2401.10774, section 2.1).

    So all of them guess at first what the target would say next, and learn to look further from there. A block of zeros
    has a gradient: that of `silu` at 0 is one half.

    Args:
        tokens: [V'] target ids that the heads can say; None for all.
        lm_head: [vocab_size, H] of the target.
    """
    heads = MedusaHead(shape, None if tokens is None else torch.from_numpy(tokens))
    rows = lm_head.float().cpu()
    rows = rows if tokens is None else rows[torch.from_numpy(tokens)]
    with torch.no_grad():
        for module in heads.modules():
            if isinstance(module, nn.Linear):
                for parameter in module.parameters():
                    parameter.zero_()
        for own in heads.lm_heads:
            own.weight.copy_(rows)
    return heads
