"""At which temperature a head's trees for greedy requests accept most, on recorded answers.

    python -m benchmarks.running_ahead.temperatures --folder /tmp/temperatures
        [--temperatures 1,0.85,0.75,0.65] [--per-task 3] [--tokens 128] [--json FILE]

A head's distribution is near the target's own at temperature 1, of which a greedy target takes the likeliest token. The
temperature changes neither that token nor the order of a node's children, but which nodes are expanded and which become
rows, since those go by the probabilities of whole paths. Trees are drawn anew at each temperature. Costs are assumed
for an 8B target, as in `deep_trees.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.running_ahead.deep_trees import (
    VERIFIED,
    FlooredTrees,
    Limit,
    PassCost,
    Ranks,
    TreeCase,
    figures_of,
    ranks_of,
)
from benchmarks.running_ahead.head import Drawn
from benchmarks.running_ahead.recording import Recording, record
from benchmarks.running_ahead.simulate import claim, loaded_head, recording_parser
from benchmarks.shared.report import comma_separated, provenance, settings_of, show, write_json
from benchmarks.shared.workload import folder_of
from draft_service.checkpoints.target import TargetCheckpoint

LEVELS, WIDTH, BREADTH = 8, 8, 8
LIMITS = (Limit(5), Limit(7), *(Limit(LEVELS, mass) for mass in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)))
ROWS = (16, *VERIFIED)
# Of a level, and of one that is left out, on an H200: `2026-11-30-h200-level-launches.md`.
LEVEL_MS = 0.155, 0.028
# Lower ends of the bins of scores.
BINS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)


def walks_of(texts: Sequence[Ranks]) -> list[dict[str, Any]]:
    """Passes of one stream through all texts, by rows and limit."""
    costs = {rows: PassCost(VERIFIED.get(rows, min(VERIFIED.values())), *LEVEL_MS) for rows in ROWS}
    return [figures_of(texts, TreeCase(1, rows, WIDTH, cost), LIMITS) for rows, cost in costs.items()]


def calibration_of(recordings: Sequence[Recording], trees: Sequence[Mapping[int, Drawn]]) -> list[dict[str, float]]:
    """By bins of scores: nodes whose parent is right, their mean score, and the share of them that is right."""
    scores, right = list[float](), list[bool]()
    for recording, own in zip(recordings, trees, strict=True):
        for root, drawn in own.items():
            future = recording.token_ids[root + 1 : root + 1 + LEVELS]
            agrees = np.zeros(len(drawn.tokens), np.bool_)
            agrees[0] = True
            for node in range(1, len(drawn.tokens)):
                level = drawn.levels[node]
                if agrees[drawn.parents[node]] and level <= len(future):
                    agrees[node] = drawn.tokens[node] == future[level - 1]
                    scores.append(drawn.scores[node])
                    right.append(agrees[node])
    bins = np.searchsorted(BINS, scores, side="right") - 1
    return [
        {
            "from": BINS[bin],
            "nodes": int((bins == bin).sum()),
            "score": round(float(np.mean(np.array(scores)[bins == bin])), 4),
            "right": round(float(np.mean(np.array(right)[bins == bin])), 4),
        }
        for bin in sorted(set(bins.tolist()))
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    claim(options.folder, settings_of(options, ["folder", "temperatures"]))
    head = loaded_head(options)
    layers = head.config.layers_of(TargetCheckpoint(folder_of(options.model)).num_layers)
    path = options.folder / "recordings.safetensors"
    recordings = record(options.model, layers, options.per_task, options.per_task, options.tokens, path)
    found = list[dict[str, Any]]()
    for temperature in options.temperatures:
        drawer = FlooredTrees(head, LEVELS, WIDTH, BREADTH, temperature=temperature)
        trees = [drawer.draw(one) for one in recordings]
        texts = [ranks_of(one, drawn, LEVELS, WIDTH) for one, drawn in zip(recordings, trees, strict=True)]
        found.append(
            {
                "temperature": temperature,
                "accepted_by_text": {
                    rows: [round(float(one.accepted(rows)[:, -1].mean()), 4) for one in texts] for rows in ROWS
                },
                "walks": walks_of(texts),
                "calibration": calibration_of(recordings, trees),
            }
        )
        means = {rows: round(statistics.mean(own), 3) for rows, own in found[-1]["accepted_by_text"].items()}
        show(f"temperature {temperature}: accepted with so many rows {means}")
    return {
        "texts": [one.task for one in recordings],
        "positions": sum(len(one.roots) for one in recordings),
        "found": found,
    }


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--temperatures", type=comma_separated(float), default=[1.0, 0.85, 0.75, 0.65])
    parser.add_argument("--per-task", type=int, default=3, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options)
    write_json(
        options.json,
        provenance("running_ahead.temperatures") | {"settings": settings_of(options, ["folder"])} | found,
    )


if __name__ == "__main__":
    main()
