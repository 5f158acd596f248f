"""Whether another way to compute a layer agrees with the layer's own code on the same random rows."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

# Relative error of two ways to compute a layer in half precision. Chosen: some seven roundings of bf16 (2^-8 each);
# another formula differs by about the size of the result.
TOLERANCE = 0.03


def agree(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Whether each tensor is the expected one up to rounding in half precision; False where either has a NaN.

    Each is compared by itself: where rotary keys are small beside latents, wrong ones would be lost in a common norm.
    """
    return all(
        one.shape == other.shape and bool((one - other).float().norm() <= TOLERANCE * other.float().norm())
        for one, other in zip(found, expected, strict=True)
    )


def most_rows_agree(found: Tensor, expected: Tensor) -> bool:
    """Whether most rows of [R, H] are the expected ones up to rounding in half precision: of mixtures of experts, where
    rounding may send a row to another expert. False where most have a NaN."""
    if found.shape != expected.shape:
        return False
    errors = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return int((errors <= TOLERANCE).sum()) * 2 > len(errors)
