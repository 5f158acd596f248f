"""Fills awaited tokens with the Triton kernel and writes what it made of them as JSON to standard output."""

from __future__ import annotations

import json
import sys

import torch

from tree_kernels._triton_feeding import fill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    awaited = torch.randint(0, 50_000, (64,), generator=generator, dtype=torch.int32)
    found = []
    for rows in (1, 5, 255, 256, 257, 600):
        token_ids = torch.randint(-64, 50_000, (rows,), generator=generator, dtype=torch.int32)
        # Half of them awaited, the first and the last among those that may be.
        token_ids[::2] = torch.randint(-64, 0, (len(token_ids[::2]),), generator=generator, dtype=torch.int32)
        token_ids[0] = -1 if rows % 2 else -64
        filled = fill(token_ids.to(DEVICE), awaited.to(DEVICE))
        found.append({"token_ids": token_ids.tolist(), "filled": filled.tolist()})
    json.dump({"awaited": awaited.tolist(), "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
