"""Where and how a decoder's weights lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tree_models.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and type of a decoder's weights, and their formats."""

    device: torch.device
    dtype: torch.dtype
    packed: bool = False  # products in the layout of a CPU's matrix unit; see `layers.linear.can_pack`
    latent: bool = False  # latent attention keeps latents in the cache, and absorbs the product that expands them
    ranks: RankGroup | None = None  # those that share the decoder; None where it is whole

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """A weight that is still to be written, of another type than the others if one is given."""
        memory = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(memory, requires_grad=False)
