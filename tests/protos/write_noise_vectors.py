"""Writes `noise_vectors.json` beside itself. Run it for a new kind of vector, never to make a failing test pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from outrider.noise import exponentials, noise_words

SEEDS = [0, 1, 42, 2**32 - 1, 2**32, 0x9E3779B97F4A7C15, 2**64 - 1]
POSITIONS = [0, 1, 5, 4095, 2**32 - 1, 2**32]
TOKEN_IDS = [0, 1, 2, 3, 4, 5, 1023, 49151, 151935, 2**31 - 1]
WEIGHTS = [[1, 1, 1, 1], [1000, 1, 1, 1, 1], [0, 3, 0, 5, 2, 0, 7], [1] * 64]


def main() -> None:
    words = []
    for seed in SEEDS:
        for position in POSITIONS:
            values = noise_words(seed, position, np.array(TOKEN_IDS))
            words.append(
                {
                    "seed": str(seed),
                    "position": str(position),
                    "token_ids": TOKEN_IDS,
                    "words": values.tolist(),
                    "exponentials": exponentials(values).tolist(),
                }
            )
    races = []
    for seed in SEEDS:
        for position, weights in enumerate(WEIGHTS):
            times = exponentials(noise_words(seed, position, np.arange(len(weights))))
            with np.errstate(divide="ignore"):
                winner = int(np.argmin(times / np.array(weights, dtype=np.float64)))
            races.append({"seed": str(seed), "position": str(position), "weights": weights, "winner": winner})
    path = Path(__file__).with_name("noise_vectors.json")
    path.write_text(json.dumps({"words": words, "races": races}, indent=1) + "\n")


if __name__ == "__main__":
    main()
