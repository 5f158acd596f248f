"""Multi-head latent attention over token trees, with one vector for each token in the cache (arXiv 2405.04434).

A token's keys and values of all heads are projections of one latent, beside one rotary key for all heads. So the cache
keeps latent and rotary key; the projections are absorbed into queries before attention, and into outputs after it.
"""

from tree_kernels.latent_attention.dispatch import LatentAttention, LatentBackend
from tree_kernels.latent_attention.norm_rope import LatentRows, RotaryAngles, norm_rope_write, write_latents
from tree_kernels.latent_attention.projections import HeadProjections, absorb_into, absorbed_queries, expanded_values
from tree_kernels.latent_attention.reference import attend_expanded

__all__ = [
    "HeadProjections",
    "LatentAttention",
    "LatentBackend",
    "LatentRows",
    "RotaryAngles",
    "absorb_into",
    "absorbed_queries",
    "attend_expanded",
    "expanded_values",
    "norm_rope_write",
    "write_latents",
]
