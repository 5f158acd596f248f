"""Computes losses and gradients with the Triton kernel and with PyTorch, and writes how far they differ as JSON."""

from __future__ import annotations

import json
import sys

import torch

from tree_kernels.cross_entropy import soft_cross_entropy_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Rows, tokens: below a block, one block, several and a part of one.
CASES = [(3, 5), (2, 2048), (5, 4097), (4, 7000)]


def difference(rows: int, vocabulary: int, dtype: torch.dtype, *, weighted: bool) -> dict[str, float]:
    """Greatest relative differences, of losses and of what the logits have become; and how far those moved."""
    generator = torch.Generator().manual_seed(vocabulary)
    # Far from zero, where a forgotten peak overflows fp32.
    logits = (100 + 5 * torch.randn(rows, vocabulary, generator=generator)).to(DEVICE, dtype)
    probs = torch.randn(3, vocabulary + 40, generator=generator).softmax(-1)[:, :vocabulary].to(DEVICE, dtype)
    distributions = torch.randint(3, (rows,), generator=generator).to(DEVICE)
    weights = torch.rand(rows, generator=generator).to(DEVICE) if weighted else None
    found, expected = logits.clone(), logits.clone()
    # Rows of `probs` are apart, as those of a slice are.
    losses = soft_cross_entropy_(found, probs, distributions, weights, backend="triton")
    plain = soft_cross_entropy_(expected, probs, distributions, weights, backend="torch")
    return {
        "loss": float(((losses - plain).abs() / plain.abs()).max()),
        "gradient": float((found.float() - expected.float()).norm() / expected.float().norm()),
        "moved": float((found.float() - logits.float()).abs().max()),
    }


if __name__ == "__main__":
    json.dump(
        {
            f"{name} {rows}x{vocabulary} {'weighted' if weighted else 'alone'}": difference(
                rows, vocabulary, dtype, weighted=weighted
            )
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
            for rows, vocabulary in CASES
            for weighted in (True, False)
        },
        sys.stdout,
    )
