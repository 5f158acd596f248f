"""How many nodes a drafted tree should have, and how unlikely they may be, where the device chooses rows among them.

    python -m benchmarks.running_ahead.table_sizes --folder /tmp/running_ahead
        [--per-task 7] [--measured 2] [--tokens 112] [--json FILE] [--markdown FILE]

Walks over the recordings of `simulate`, one pass behind and mended: tokens a pass. The head grows the same levels in
all of its shapes, so more nodes cost it nothing, and a lower floor lets a level expand what is less likely.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.running_ahead.drafts import HEAD, TRIE_NEW, HeadTreeShape, trie_trees
from benchmarks.running_ahead.recording import Recording
from benchmarks.running_ahead.simulate import Study, parse, study_of
from benchmarks.running_ahead.walk import Tally, Way, walk
from benchmarks.shared.machine import describe
from benchmarks.shared.report import settings_of, show, write_json

ROWS = (3, 7, 15, 23, 31)
# Of one sequence, of eight and of 32, as `HeadTreeShape.for_sequences` makes them.
_LEVELS = ((8, 32, (239, 479, 1007)), (5, 8, (59, 125)), (5, 4, (30, 60)))
_FLOORS = (0.001, 0.0003, 0.0001, 0.00003)
_TRIES = ((32, 0.01), (32, 0.001), (63, 0.001), (239, 0.0001))


def head_sizes(study: Study) -> Iterator[dict[str, Any]]:
    """Every shape of the head, the nodes that its trees really have, and tokens a pass by rows."""
    for levels, width, counts in _LEVELS:
        for nodes in counts:
            for floor in _FLOORS:
                shape = HeadTreeShape(levels, width, 8, nodes, floor)
                tokens = [study.figure("", HEAD, shape, Way(rows, 1, mend=True))["tokens"] for rows in ROWS]
                sizes = sorted(
                    len(tree.children) - 1 for one in study.drafts for tree in one.tables(HEAD, shape).values()
                )
                yield {"source": "head", **asdict(shape), "median_nodes": sizes[len(sizes) // 2], "tokens": tokens}
                study.clear()


def trie_sizes(study: Study, recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    """Every size of the trie's trees; it has learnt the texts before."""
    places = [place for place, one in enumerate(recordings) if one.states is not None]
    for nodes, floor in _TRIES:
        trees = trie_trees(recordings, True, nodes, floor)
        sizes = sorted(tree.drafted for own in trees.values() for tree in own.values())
        tokens = []
        for rows in ROWS:
            whole = Tally()
            for one, place in zip(study.drafts, places, strict=True):
                one.tries = {TRIE_NEW: trees[place]}
                tables = one.tables(TRIE_NEW, HeadTreeShape(0, 0, 0, nodes))
                text = one.recording
                whole.add(walk(text.token_ids, text.roots, tables, one.chains, Way(rows, 1, mend=True)))
            tokens.append(round(whole.tokens / whole.passes, 3))
        study.clear()
        found = {"source": "trie", "nodes": nodes, "floor": floor}
        yield {**found, "median_nodes": sizes[len(sizes) // 2], "tokens": tokens}


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    levels = f"{found['levels']} x {found['width']}" if found["source"] == "head" else ""
    tokens = " | ".join(f"{each:.2f}" for each in found["tokens"])
    nodes = f"{found['nodes']} | {found['floor']:g} | {found['median_nodes']}"
    return f"| {found['source']} {levels} | {nodes} | {tokens} |"


def measure(options: argparse.Namespace) -> None:
    study, _, recordings = study_of(options)
    head = " | ".join(f"{rows} rows" for rows in ROWS)
    lines = [f"| | nodes at most | floor | median nodes | {head} |", "|---|" + "---:|" * (3 + len(ROWS))]
    found = []
    for figures in (head_sizes(study), trie_sizes(study, recordings)):
        for one in figures:
            found.append(one)
            lines.append(line(one))
            show(lines[-1])
    passes = sum(len(one.recording.roots) for one in study.drafts)
    write_json(options.json, {"machine": describe(), "settings": settings_of(options, ["folder"]), "cases": found})
    if options.markdown is not None:
        text = f"Tokens a pass, {len(study.drafts)} answers, {passes} positions.\n\n" + "\n".join(lines) + "\n"
        options.markdown.write_text(text)


def main() -> None:
    torch.set_num_threads(1)
    measure(parse())


if __name__ == "__main__":
    main()
