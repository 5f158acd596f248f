"""From a head's queries to queries over latents, and from attended latents to a head's values.

With keys k = U c of a latent c, q . (U c) = (U^T q) . c: a head's half of the projection that makes keys goes into its
query once, instead of into every key of the cache. With values v = W c, a weighted sum of values is W times the same
sum of latents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadProjections(NamedTuple):
    """Projections from latents to keys and values; views of one weight, so that writing to it changes both."""

    keys: Tensor  # [H, N, L], to a head's keys without their rotary part
    values: Tensor  # [H, V, L]

    @classmethod
    def of(cls, weight: Tensor, heads: int, plain: int) -> HeadProjections:
        """The halves of a `kv_b_proj` weight [H * (N + V), L], with N = `plain`."""
        both = weight.view(heads, -1, weight.shape[1])
        return cls(both[:, :plain], both[:, plain:])


def absorbed_queries(plain: Tensor, rotary: Tensor, projections: HeadProjections) -> Tensor:
    """Queries over latents and rotary keys, [R, H, L + P], contiguous, in their dtype, by queries [R, H, N] without
    their rotary part and [R, H, P], that part, rotated. The launches depend on shapes alone."""
    rows, heads, _ = plain.shape
    latent = projections.keys.shape[2]
    absorbed = plain.new_empty(rows, heads, latent + rotary.shape[2])
    absorb_into(absorbed, plain, projections)
    absorbed[..., latent:] = rotary
    return absorbed


def absorb_into(absorbed: Tensor, plain: Tensor, projections: HeadProjections) -> None:
    """Write the part of absorbed queries that latents are multiplied with, the first L of `absorbed` [R, H, L + P], by
    queries [R, H, N] without their rotary part."""
    latent = projections.keys.shape[2]
    # Written in place, head by head, so that nothing is concatenated afterwards.
    torch.bmm(plain.transpose(0, 1), projections.keys, out=absorbed[..., :latent].transpose(0, 1))


def expanded_values(attended: Tensor, projections: HeadProjections) -> Tensor:
    """A head's output [R, H, V], contiguous, of attended latents [R, H, L], in their dtype."""
    rows, heads, _ = attended.shape
    output = attended.new_empty(rows, heads, projections.values.shape[1])
    torch.bmm(attended.transpose(0, 1), projections.values.transpose(1, 2), out=output.transpose(0, 1))
    return output
