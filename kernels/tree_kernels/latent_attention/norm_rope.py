"""The steps between a latent layer's projections and its attention: norm, rotary embedding, and new rows of the cache.

One launch on a GPU, where PyTorch takes some twenty, most of them longer to launch than to run for a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels.paging import write_kv


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Angles by which each row's rotary parts are rotated, and their layout.

    Elements are rotated in pairs. Of P elements, a pair is 2 i and 2 i + 1 (interleaved: `pairs`), or i and P / 2 + i
    (halves). DeepSeek-V2's layers read and write interleaved pairs, DeepSeek-V3's read them and write halves, others
    read and write halves.
    """

    cosines: Tensor  # [R, P / 2], of any strides and floating dtype, as the sines are
    sines: Tensor
    pairs_in: bool  # the input is interleaved
    pairs_out: bool  # the output is interleaved


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Projections of a layer for R rows, with the widths of `latent_attention`."""

    vectors: Tensor  # [R, L + P]: latents before their norm, and rotary keys before rotation
    queries: Tensor  # [R, H, N + P], of which the last P are read
    weight: Tensor  # [L], of the latents' RMSNorm
    epsilon: float  # of the norm


def norm_rope_write(rows: LatentRows, rotary: RotaryAngles, cache: Tensor, slots: Tensor, absorbed: Tensor) -> None:
    """Write normed latents and rotated keys into the cache, and the rotated parts of queries into `absorbed`.

    Sums and rotations are computed in fp32. As in the models' own code, normed latents are rounded before they are
    multiplied with the weight. Raises `ValueError` for shapes or layouts that do not fit.

    Args:
        rows: projections of one layer, contiguous in their last dimension.
        rotary: of the rows.
        cache: [pages, page_size, L + P], contiguous, of their dtype. Written in place.
        slots: [R] int64, all different. On a GPU also int32, and rows whose slot is negative are left out of the cache.
        absorbed: [R, H, L + P], whose last P are written; see `absorbed_queries` for the others.
    """
    _check(rows, rotary, cache, slots, absorbed)
    if rows.vectors.is_cuda:
        from tree_kernels.latent_attention.triton_writing import norm_rope_write_rows

        norm_rope_write_rows(rows, rotary, cache, slots, absorbed)
        return
    latent = len(rows.weight)
    width = rows.vectors.shape[1] - latent
    latents = normed(rows.vectors[:, :latent], rows.weight, rows.epsilon)
    write_latents(latents, rotated(rows.vectors[:, latent:], rotary), cache, slots)
    absorbed[..., latent:] = rotated(rows.queries[..., -width:], rotary)


def write_latents(latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write one layer's new latents [R, L] and rotated keys [R, P] into the cache [pages, page_size, L + P], contiguous
    and of their dtype, in place; `slots` as in `paging.write_kv`."""
    vectors, width = cache.unsqueeze(2), latents.shape[1]
    write_kv(latents[:, None], rotary[:, None], vectors[..., :width], vectors[..., width:], slots)


def normed(latents: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of [R, L], in their dtype."""
    wide = latents.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(latents.dtype)


def rotated(parts: Tensor, rotary: RotaryAngles) -> Tensor:
    """Rotary embedding of [R, P] or [R, H, P], in their dtype."""
    wide = parts.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if rotary.pairs_in else wide.chunk(2, dim=-1)
    shape = (len(parts), *(1,) * (parts.dim() - 2), first.shape[-1])
    cosines, sines = (angle.float().view(shape) for angle in (rotary.cosines, rotary.sines))
    after = first * cosines - second * sines, second * cosines + first * sines
    both = torch.stack(after, dim=-1).flatten(-2) if rotary.pairs_out else torch.cat(after, dim=-1)
    return both.to(parts.dtype)


def _check(rows: LatentRows, rotary: RotaryAngles, cache: Tensor, slots: Tensor, absorbed: Tensor) -> None:
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
