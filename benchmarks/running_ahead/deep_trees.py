"""How deep and how wide a head's trees pay where the head shares the GPU with the target's passes, on recorded answers.

    python -m benchmarks.running_ahead.deep_trees --folder /tmp/deep_trees
        [--per-task 5] [--tokens 128] [--json FILE]

Trees of twelve levels are drawn at every position, which takes minutes; all else is read from them. A pass's rows are
the likeliest nodes of its tree, so all that a walk over a text must know of a position is which places the text's own
next tokens have among the nodes of each shape. A level may be left out where the *mass* of its frontier, the sum of the
path probabilities of the nodes that it would expand, is small. Costs are assumed for an 8B target.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.running_ahead.head import Drawn, HeadTrees
from benchmarks.running_ahead.recording import Recording, record
from benchmarks.running_ahead.simulate import claim, loaded_head, recording_parser
from benchmarks.shared.report import provenance, settings_of, show, write_json
from benchmarks.shared.workload import folder_of
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.neural.level_growth import Rules

# The trees that are drawn; smaller ones are read from them.
LEVELS, WIDTHS, BREADTH = 12, (4, 6, 8, 12, 16), 8
# Least path probability of a node: that of captured trees (`draft_service.neural.config`).
FLOOR = 3e-5
# A place that no pass has rows for.
UNRANKED = 1 << 14


class FlooredTrees(HeadTrees):
    """Trees without the paths that a drafter leaves out."""

    def _rules(self, count: int) -> Rules:
        return super()._rules(count)._replace(floor=FLOOR)


@dataclass(frozen=True)
class Ranks:
    """What passes at the P positions of a text accept from trees of up to L levels.

    Attributes:
        ranks: [P, L, L] int16; entry [p, l, k]: in a tree of l + 1 levels, the place of the text's next k + 1 tokens
            among the drafted nodes by falling path probability, from 1 on; `UNRANKED` where they were not drafted.
        masses: [P, L] masses of the frontiers that the first, the second, ... level leaves.
        missing: nodes that a tree of this width would have expanded, but the wider one at hand did not.
    """

    ranks: npt.NDArray[np.int16]
    masses: npt.NDArray[np.float64]
    missing: int = 0

    def accepted(self, rows: int) -> npt.NDArray[np.int64]:
        """[P, L] drafted tokens that a pass of `rows` rows, the root's among them, accepts, by levels of its tree."""
        return np.asarray((self.ranks < rows).sum(-1))


def ranks_of(recording: Recording, trees: Mapping[int, Drawn], levels: int, width: int) -> Ranks:
    """Those of a text's trees, of which each level expands only the best `width` nodes."""
    ranks = np.full((len(trees), levels, levels), UNRANKED, np.int16)
    masses, missing = np.zeros((len(trees), levels)), 0
    for position, (root, drawn) in enumerate(trees.items()):
        kept, masses[position], lost = narrowed(drawn, levels, width)
        missing += lost
        nodes = np.flatnonzero(kept)[1:]
        nodes = nodes[np.argsort(-drawn.path_probs[nodes], kind="stable")]
        places = np.zeros((levels, len(drawn.tokens)), np.int16)
        places[:, nodes] = (drawn.levels[nodes] <= np.arange(1, levels + 1)[:, None]).cumsum(1)
        for depth, node in enumerate(path_of(drawn, kept, recording.token_ids[root + 1 : root + 1 + levels])):
            ranks[position, depth:, depth] = places[depth:, node]
    return Ranks(ranks, masses, missing)


def path_of(drawn: Drawn, kept: npt.NDArray[np.bool_], tokens: Sequence[int]) -> Iterator[int]:
    """The nodes of these tokens below the root, as far as the tree has them."""
    node = 0
    for token in tokens:
        found = kept & (drawn.parents == node) & (drawn.tokens == token)
        # The root is its own parent.
        found[0] = False
        if not found.any():
            return
        node = int(found.argmax())
        yield node


def narrowed(drawn: Drawn, levels: int, width: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64], int]:
    """A tree whose levels expand `width` nodes each: which nodes it has [n], the root among them; its masses [levels];
    and how many nodes it would expand, but the tree at hand did not."""
    kept, expanded = np.zeros((2, len(drawn.tokens)), np.bool_)
    kept[0] = expanded[0] = True
    masses, missing = np.zeros(levels), 0
    for level in range(1, levels + 1):
        new = np.flatnonzero((drawn.levels == level) & expanded[drawn.parents])
        kept[new] = True
        frontier = new[np.argsort(-drawn.path_probs[new], kind="stable")[:width]]
        expanded[frontier] = True
        masses[level - 1] = drawn.path_probs[frontier].sum()
        if level < levels:
            missing += int((~drawn.expanded[frontier]).sum())
    return kept, masses, missing


@dataclass(frozen=True, slots=True)
class PassCost:
    """Milliseconds of a pass with its verification, of a level behind it, and of a level that is left out."""

    verified: float
    level: float
    skipped: float


@dataclass(frozen=True, slots=True)
class Limit:
    """Levels of a tree at most, and the least mass of a frontier that is expanded; every one is with 0."""

    levels: int
    least_mass: float = 0.0

    def depth(self, masses: npt.NDArray[np.float64]) -> int:
        """Levels that are grown, by the masses [L] of their frontiers. The root's level always is."""
        few = masses[: self.levels - 1] < self.least_mass
        return 1 + int(few.argmax() if few.any() else len(few))


@dataclass
class Walked:
    """Sums over passes of `streams` sequences each."""

    streams: int
    tokens: int = 0
    passes: int = 0
    levels: int = 0
    milliseconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Tokens a second of all sequences; tokens of one in a pass; levels of a pass."""
        return {
            "tokens_per_s": round(1000 * self.tokens / self.milliseconds, 1),
            "tokens_per_pass": round(self.tokens / self.passes / self.streams, 3),
            "levels_per_pass": round(self.levels / self.passes, 2),
        }


@dataclass
class _Reader:
    """A text that passes read: what they accept [P, L] and the masses [P, L] at every position, and the next one."""

    accepted: npt.NDArray[np.int64]
    masses: npt.NDArray[np.float64]
    place: int = 0

    def emit(self, levels: int) -> int:
        """Tokens of a pass: those accepted and the target's own, which the end of the text does not have."""
        emitted = min(int(self.accepted[self.place, levels - 1]) + 1, len(self.accepted) - self.place)
        self.place += emitted
        return emitted


def walk(texts: Sequence[Ranks], streams: int, rows: int, limit: Limit, cost: PassCost) -> Walked:
    """Passes of `streams` sequences with as many levels and `rows` rows of each, until fewer texts are left. Levels are
    left out by the mean of the sequences' masses."""
    waiting = (_Reader(ranks.accepted(rows), ranks.masses) for ranks in texts if len(ranks.masses))
    running, walked = list[_Reader](), Walked(streams)
    while True:
        running = [one for one in running if one.place < len(one.accepted)]
        running += itertools.islice(waiting, streams - len(running))
        if len(running) < streams:
            return walked
        levels = limit.depth(np.mean([one.masses[one.place] for one in running], axis=0))
        walked.tokens += sum(one.emit(levels) for one in running)
        walked.passes += 1
        walked.levels += levels
        walked.milliseconds += cost.verified + levels * cost.level + (limit.levels - levels) * cost.skipped


@dataclass(frozen=True, slots=True)
class TreeCase:
    """Sequences of a pass, rows of each, nodes that a level of each expands, and times."""

    streams: int
    rows: int
    width: int
    cost: PassCost


FIXED = [Limit(levels) for levels in range(2, LEVELS + 1)]
_MASSES = (0.02, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
ADAPTIVE = [Limit(levels, mass) for levels in (5, 6, 7, 8, 10, 12) for mass in _MASSES]
# Assumed from measurements of an 8B shape on H200s (`2026-11-29-h200-heads-behind-passes.md`,
# `2026-11-30-h200-level-launches.md`): passes by rows, levels by the nodes that all sequences expand. A level that is
# left out still has its launches; their time was not measured.
VERIFIED = {24: 4.55, 32: 4.55, 48: 4.7, 64: 4.8}
_DEEP = [TreeCase(1, rows, 8, PassCost(verified, 0.155, 0.035)) for rows, verified in VERIFIED.items()]
_DEEP += [TreeCase(1, 32, 8, PassCost(4.55, 0.11, 0.03)), TreeCase(8, 16, 4, PassCost(6.9, 0.19, 0.045))]
# The same level for all widths.
_WIDE = [TreeCase(1, rows, width, PassCost(VERIFIED[rows], 0.155, 0.035)) for width in WIDTHS for rows in VERIFIED]
_WIDE += [TreeCase(8, 16, 8, PassCost(6.9, 0.215, 0.045))]
CASES = [(case, FIXED + ADAPTIVE) for case in _DEEP] + [(case, FIXED) for case in _WIDE if case not in _DEEP]
# For several streams every text comes so many times, in an order that is drawn.
_TIMES = 8
_HALVES = 1000


def figures_of(texts: Sequence[Ranks], case: TreeCase, limits: Sequence[Limit]) -> dict[str, Any]:
    """Walks with each limit; `texts` are of the case's width."""
    if case.streams > 1:
        texts = random.Random(1).sample(list(texts) * _TIMES, len(texts) * _TIMES)
    walks = [asdict(limit) | walk(texts, case.streams, case.rows, limit, case.cost).figures() for limit in limits]
    return asdict(case) | {"walks": walks}


def held_out_gains(
    texts: Sequence[Ranks], case: TreeCase, fixed: Sequence[Limit], adaptive: Sequence[Limit]
) -> list[float]:
    """The best adaptive limit beside the best fixed one with one stream, each chosen on one half of the texts: ratios
    less 1 of tokens a second in the other half, for several halves."""
    walks = {limit: [walk([text], 1, case.rows, limit, case.cost) for text in texts] for limit in (*fixed, *adaptive)}

    def speed(limit: Limit, half: Sequence[int]) -> float:
        own = [walks[limit][place] for place in half]
        return sum(one.tokens for one in own) / sum(one.milliseconds for one in own)

    gains, dice = [], random.Random(0)
    for _ in range(_HALVES):
        places = dice.sample(range(len(texts)), len(texts))
        chosen, judged = places[: len(texts) // 2], places[len(texts) // 2 :]
        plain, best = (max(limits, key=lambda limit: speed(limit, chosen)) for limits in (fixed, adaptive))
        gains.append(speed(best, judged) / speed(plain, judged) - 1)
    return gains


def measure(options: argparse.Namespace) -> dict[str, Any]:
    claim(options.folder, settings_of(options, ["folder"]))
    head = loaded_head(options)
    layers = head.config.layers_of(TargetCheckpoint(folder_of(options.model)).num_layers)
    path = options.folder / "recordings.safetensors"
    recordings = record(options.model, layers, options.per_task, options.per_task, options.tokens, path)
    trees, texts = FlooredTrees(head, LEVELS, max(WIDTHS), BREADTH), {width: list[Ranks]() for width in WIDTHS}
    for one in recordings:
        drawn = trees.draw(one)
        for width, own in texts.items():
            own.append(ranks_of(one, drawn, LEVELS, width))
        show(f"{one.task}: {len(drawn)} trees")
    alone = _DEEP[list(VERIFIED).index(32)]
    gains = held_out_gains(texts[alone.width], alone, FIXED, ADAPTIVE)
    return {
        "texts": len(recordings),
        "positions": sum(len(one.roots) for one in recordings),
        "missing": {width: sum(one.missing for one in own) for width, own in texts.items()},
        "held out": asdict(alone) | {"mean": statistics.mean(gains), "deviation": statistics.stdev(gains)},
        "cases": [figures_of(texts[case.width], case, limits) for case, limits in CASES],
    }


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--per-task", type=int, default=5, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options)
    write_json(
        options.json, provenance("running_ahead.deep_trees") | {"settings": settings_of(options, ["folder"])} | found
    )


if __name__ == "__main__":
    main()
