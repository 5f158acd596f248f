"""What lies between a latent layer's projections and its attention: a norm, rotary embedding, and the cache's new rows.

One launch on a GPU, where PyTorch takes some twenty, most of them longer to launch than to run for a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels.latent_attention.writing import write_latents


@dataclass(frozen=True, slots=True)
class Rotary:
    """By what each row's rotary parts turn, and how they are laid out.

    Elements turn in twos. Of P elements, two that turn together are 2 i and 2 i + 1 (`pairs`), or i and P / 2 + i
    (halves). DeepSeek-V2's layers read and write pairs, DeepSeek-V3's read pairs and write halves, others' read and
    write halves.

    Attributes:
        cosines, sines: [R, P / 2], of any strides and floating dtype.
        pairs_in: what is read are pairs.
        pairs_out: what is written are pairs.
    """

    cosines: Tensor
    sines: Tensor
    pairs_in: bool
    pairs_out: bool


@dataclass(frozen=True, slots=True)
class LatentRows:
    """What a layer has projected for R rows, with the widths of `latent_attention`.

    Attributes:
        vectors: [R, L + P]: latents as they are before their norm, and rotary keys before they turn.
        queries: [R, H, N + P], of which the last P are read.
        weight: [L], of the latents' RMSNorm.
        epsilon: of the norm.
    """

    vectors: Tensor
    queries: Tensor
    weight: Tensor
    epsilon: float


def norm_rope_write(rows: LatentRows, rotary: Rotary, cache: Tensor, slots: Tensor, absorbed: Tensor) -> None:
    """Write normed latents and turned keys into the cache, and turned queries behind where absorbed ones go.

    Sums and turns are computed in fp32. As in the models' own code, what is normed is rounded before the weight
    multiplies it.

    Args:
        rows: of one layer, contiguous in their last dimension.
        rotary: of the rows.
        cache: [pages, page_size, L + P], contiguous, of their dtype. Written in place.
        slots: [R] int64, all different. On a GPU also int32, and rows whose slot is negative are left out of the cache.
        absorbed: [R, H, L + P], whose last P are written; see `absorbed_queries` for the others.

    Raises:
        ValueError: shapes or layouts that do not fit.
    """
    _check(rows, rotary, cache, slots, absorbed)
    if rows.vectors.is_cuda:
        from tree_kernels.latent_attention.triton_writing import norm_rope_write_rows

        norm_rope_write_rows(rows, rotary, cache, slots, absorbed)
        return
    latent = len(rows.weight)
    width = rows.vectors.shape[1] - latent
    latents = normed(rows.vectors[:, :latent], rows.weight, rows.epsilon)
    write_latents(latents, turned(rows.vectors[:, latent:], rotary), cache, slots)
    absorbed[..., latent:] = turned(rows.queries[..., -width:], rotary)


def normed(latents: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of [R, L], in their dtype."""
    wide = latents.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(latents.dtype)


def turned(parts: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of [R, P] or [R, H, P], in their dtype."""
    half = parts.shape[-1] // 2
    # [..., P / 2] each: what turns together.
    between = parts.shape[:-1]
    first, second = (
        parts.reshape(*between, half, 2).float().unbind(-1)
        if rotary.pairs_in
        else parts.reshape(*between, 2, half).float().unbind(-2)
    )
    shape = (len(parts), *(1,) * (parts.dim() - 2), half)
    cosines, sines = (angle.float().view(shape) for angle in (rotary.cosines, rotary.sines))
    after = first * cosines - second * sines, second * cosines + first * sines
    both = torch.stack(after, dim=-1).flatten(-2) if rotary.pairs_out else torch.cat(after, dim=-1)
    return both.to(parts.dtype)


def _check(rows: LatentRows, rotary: Rotary, cache: Tensor, slots: Tensor, absorbed: Tensor) -> None:
    count, width = rows.vectors.shape
    latent, heads = len(rows.weight), rows.queries.shape[1]
    half = (width - latent) // 2
    if width - latent != 2 * half or half == 0:
        raise ValueError(f"expected an even rotary width behind {latent} of a latent, got {width - latent}")
    if len(rows.queries) != count or rows.queries.shape[2] < 2 * half:
        raise ValueError(f"expected queries [{count}, heads, {2 * half} or more], got {list(rows.queries.shape)}")
    if absorbed.shape != (count, heads, width) or cache.dim() != 3 or cache.shape[2] != width:
        raise ValueError(
            f"expected absorbed queries [{count}, {heads}, {width}] and a cache [pages, page_size, {width}], "
            f"got {list(absorbed.shape)} and {list(cache.shape)}"
        )
    if any(angle.shape != (count, half) for angle in (rotary.cosines, rotary.sines)):
        raise ValueError(f"expected cosines and sines [{count}, {half}], got {list(rotary.cosines.shape)}")
    if slots.shape != (count,) or slots.is_floating_point():
        raise ValueError(f"expected integer slots [{count}], got {slots.dtype} {list(slots.shape)}")
    if any(one.dtype != rows.vectors.dtype for one in (rows.queries, rows.weight, cache, absorbed)):
        raise ValueError(f"expected all of {rows.vectors.dtype}, as the vectors are")
    if any(one.stride(-1) != 1 for one in (rows.vectors, rows.queries, rows.weight, absorbed)):
        raise ValueError("expected rows whose last dimension is contiguous")
    if not cache.is_contiguous():
        raise ValueError("expected a contiguous cache")
