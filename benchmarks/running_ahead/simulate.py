"""Simulates a draft that runs ahead of its target, on recorded greedy answers: how large its trees should be, how many
rows a pass should have, and whether a pass should wait for a draft.

    python -m benchmarks.running_ahead.simulate --folder /tmp/running_ahead
        [--per-task 7] [--measured 2] [--tokens 112] [--json FILE] [--markdown FILE]

Answers with the hidden states that the head reads, and the head's trees at every position, are recorded once. That
takes minutes; they are kept in `--folder`, which can only be used again with the same settings. Every figure is then a
walk over the recordings (`walk`). Trees of other shapes are pruned from the largest, which is exact except for nodes
that a smaller shape expands and the largest does not: their share is `inexact`. Tokens are counted from the answer's
first one, and the first pass has no draft. Costs are assumed for an 8B target (`costs`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.running_ahead.calibration import by_bin, corrected, factor_of, fit, judged, table_of_chain
from benchmarks.running_ahead.costs import HEAD_COST, TRIE_COST, fits, ratio
from benchmarks.running_ahead.drafts import (
    BREADTH,
    HEAD,
    LEVELS,
    LOOKUP,
    MERGED_NEW,
    SOURCES,
    TRIE_NEW,
    TRIE_WARM,
    WIDTH,
    Drafts,
    HeadTreeShape,
    draw_all,
)
from benchmarks.running_ahead.head import HeadTrees
from benchmarks.running_ahead.recording import Recording, record
from benchmarks.running_ahead.tables import markdown
from benchmarks.running_ahead.walk import NOWHERE, Chain, Table, Tally, Way, merged, rows_of, walk
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, settings_of, show, write_json
from benchmarks.shared.workload import folder_of
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import EagleCheckpoint
from draft_service.eagle.head import EagleHead
from outrider.heads import head_source

USUAL, SHALLOW = HeadTreeShape(12, 16, 8, 239), HeadTreeShape(3, 16, 8, 63)
ROWS = (8, 12, 16, 24, 32, 48, 63)
FEW_ROWS = (12, 24, 48)
# Milliseconds of the shortest wait that might be reached, with levels. Assumed.
SHORT_WAIT = 1.0

Figure = dict[str, Any]


class Study:
    """Walks over all recordings."""

    def __init__(self, drafts: Sequence[Drafts]) -> None:
        self.drafts = drafts

    def clear(self) -> None:
        """Drop all kept tables."""
        for one in self.drafts:
            one.clear()

    @property
    def inexact(self) -> float:
        """Share of nodes that the shapes so far expand, but whose children are missing."""
        return sum(one.missing for one in self.drafts) / max(1, sum(one.expanded for one in self.drafts))

    def walks(self, source: str, shape: HeadTreeShape, way: Way, near: HeadTreeShape | None = None) -> list[Tally]:
        """The walk over each recording, in their order."""
        found = []
        for one in self.drafts:
            trees, short = one.tables(source, shape), one.tables(source, near) if near else None
            found.append(walk(one.recording.token_ids, one.recording.roots, trees, one.chains, way, short))
        return found

    def figure(
        self, mode: str, source: str, shape: HeadTreeShape, way: Way, near: HeadTreeShape | None = None
    ) -> Figure:
        """The figures of one way to draft."""
        walks = self.walks(source, shape, way, near)
        whole, tasks = Tally(), dict[str, Tally]()
        for one, tally in zip(self.drafts, walks, strict=True):
            whole.add(tally)
            tasks.setdefault(one.recording.task, Tally()).add(tally)
        waited = near or shape
        wait = TRIE_COST.wait(0) if source in (TRIE_NEW, TRIE_WARM) else HEAD_COST.wait(waited.levels)
        found: Figure = {"mode": mode, "source": source, "shape": asdict(shape), "near": near and asdict(near)}
        found |= {"way": asdict(way), "wait_ms": round(wait, 2)} | figures(whole, way, wait)
        found["ratio_short_wait"] = round(ratio(whole, way, SHORT_WAIT), 3)
        # Shows whether a difference between ways is more than noise.
        found["ratio_by_prompt"] = [round(ratio(tally, way, wait), 3) for tally in walks]
        found["tasks"] = {task: round(tally.tokens / tally.passes, 3) for task, tally in tasks.items()}
        return found


def figures(tally: Tally, way: Way, wait: float) -> Figure:
    """Means over passes, and tokens a second relative to plain decoding."""

    def mean(total: float, count: int) -> float:
        return round(total / count, 3) if count else 0.0

    return {
        "passes": tally.passes,
        "tokens": mean(tally.tokens, tally.passes),
        "promised": mean(tally.passes + tally.expected, tally.passes),
        "rows": mean(tally.rows, tally.passes),
        "hits": mean(tally.hits, tally.passes),
        "hit_tokens": mean(tally.hit_tokens, tally.hits),
        "held": mean(tally.held, tally.passes),
        "held_tokens": mean(tally.held_tokens, tally.held),
        "misses": mean(tally.misses, tally.passes),
        "miss_tokens": mean(tally.miss_tokens, tally.misses),
        "ratio": round(ratio(tally, way, wait), 3),
    }


def modes(rows: int, source: str) -> list[tuple[str, Way, HeadTreeShape, HeadTreeShape | None]]:
    """The modes of each drafter: name, way, shape of trees, and shape of the trees that held passes wait for."""
    if source == LOOKUP:
        return [("blind", Way(rows, 1), USUAL, None)]
    found = [
        ("lockstep, no lookup", Way(rows, 0, lookup=False), USUAL, None),
        ("lockstep", Way(rows, 0), USUAL, None),
        ("blind", Way(rows, 1), USUAL, None),
        ("blind, mended", Way(rows, 1, mend=True), USUAL, None),
        ("two behind", Way(rows, 2), USUAL, None),
        ("two behind, mended", Way(rows, 2, mend=True), USUAL, None),
        ("held on a miss", Way(rows, 1, "miss"), USUAL, None),
        ("held on a miss, 3 levels", Way(rows, 1, "miss"), USUAL, SHALLOW),
        ("held on nothing, 3 levels", Way(rows, 1, "promise", 1.1), USUAL, SHALLOW),
        ("held on nothing, 3 levels, mended", Way(rows, 1, "promise", 1.1, mend=True), USUAL, SHALLOW),
    ]
    if source not in (TRIE_NEW, TRIE_WARM):
        found.append(("lockstep, 4 levels", Way(rows, 0), HeadTreeShape(4, 16, 8, 63), None))
    return found


def main_table(study: Study) -> Iterable[Figure]:
    for source in SOURCES:
        for rows in ROWS:
            for mode, way, shape, near in modes(rows, source):
                yield study.figure(mode, source, shape, way, near)
    study.clear()


def shapes() -> list[tuple[str, HeadTreeShape]]:
    """Drafters and shapes that are compared in blind passes."""
    found = [(HEAD, HeadTreeShape(levels, width, 8, 239)) for levels in (6, 8, 10, 12, 16) for width in (4, 8, 16, 32)]
    found += [(HEAD, HeadTreeShape(levels, width, 4, 239)) for levels in (8, 12) for width in (4, 8, 16, 32)]
    found += [(HEAD, HeadTreeShape(*shape)) for shape in _OTHER_NODES]
    found += [(MERGED_NEW, HeadTreeShape(levels, width, 8, 239)) for levels in (6, 8, 12) for width in (8, 16, 32)]
    return found + [(MERGED_NEW, HeadTreeShape(*shape)) for shape in _OTHER_NODES]


_OTHER_NODES = ((3, 16, 8, 239), (4, 16, 8, 239), (8, 16, 8, 63), (8, 16, 8, 127), (8, 32, 8, 511), (12, 32, 8, 2000))


def shape_table(study: Study) -> Iterable[Figure]:
    for source, shape in shapes():
        for rows in FEW_ROWS:
            for mend in (False, True):
                yield study.figure("blind, mended" if mend else "blind", source, shape, Way(rows, 1, mend=mend))
        study.clear()


def hold_table(study: Study) -> Iterable[Figure]:
    for source in (HEAD, MERGED_NEW):
        for rows in FEW_ROWS:
            for levels in (2, 3, 4, 6, 12):
                near = HeadTreeShape(levels, 16, 8, 63)
                for mend in (False, True):
                    yield study.figure("held", source, USUAL, Way(rows, 1, "miss", mend=mend), near)
                    for least in (1.1, 1.25, 1.5, 2.0, 2.5):
                        yield study.figure("held", source, USUAL, Way(rows, 1, "promise", least, mend=mend), near)
        study.clear()


def pairs(study: Study, source: str) -> Iterable[tuple[Table, list[int]]]:
    """Every tree of a source, or every chain of prompt lookup, with the next tokens of the text."""
    for one in study.drafts:
        text = one.recording.token_ids
        if source == LOOKUP:
            yield from ((table_of_chain(chain), text[root + 1 :]) for root, chain in one.chains.items())
        else:
            yield from ((table, text[root + 1 :]) for root, table in one.tables(source, USUAL).items())


def calibration(study: Study) -> Figure:
    """`sources`: bins of path probabilities and fitted corrections; `changes`: figures with each correction."""
    by_source: Figure = {}
    flat: dict[str, Callable[[float, int], float]] = {}
    scaled: dict[str, Callable[[float, int], float]] = {}
    for source in (HEAD, TRIE_NEW, TRIE_WARM, LOOKUP):
        nodes = judged(pairs(study, source))
        correction, factor = fit(nodes, deeper=False), factor_of(nodes)
        by_source[source] = {"bins": by_bin(pairs(study, source)), "factor": round(factor, 3)}
        by_source[source] |= {"flat": asdict(correction), "deeper": asdict(fit(nodes, deeper=True))}
        flat[source], scaled[source] = correction, _scale(factor)
    changes = []
    for source in (HEAD, MERGED_NEW):
        for name, chosen in (("none", None), ("factor", scaled), ("log-odds", flat)):
            changes += _with_corrections(study, source, name, chosen)
    study.clear()
    return {"sources": by_source, "changes": changes}


def _scale(factor: float) -> Callable[[float, int], float]:
    return lambda score, _: min(1.0, score * factor)


def _with_corrections(
    study: Study, source: str, name: str, chosen: Mapping[str, Callable[[float, int], float]] | None
) -> list[Figure]:
    parts = [HEAD, TRIE_NEW] if source == MERGED_NEW else [source]
    ways = [Way(rows, behind) for rows in FEW_ROWS for behind in (0, 1)]
    tallies = [Tally() for _ in ways]
    for one in study.drafts:
        tables: list[Mapping[int, Table]] = [one.tables(part, USUAL) for part in parts]
        chains = one.chains
        if chosen:
            tables = [corrected(own, chosen[part]) for part, own in zip(parts, tables, strict=True)]
            right = chosen[LOOKUP]
            chains = {
                root: Chain(chain.tokens, right(chain.first, 1), right(chain.following, 2)) if chain.tokens else chain
                for root, chain in chains.items()
            }
        trees = tables[0]
        if len(tables) > 1:
            trees = {root: merged([own[root] for own in tables], USUAL.nodes) for root in trees}
        for tally, way in zip(tallies, ways, strict=True):
            tally.add(walk(one.recording.token_ids, one.recording.roots, trees, chains, way))
    wait = HEAD_COST.wait(USUAL.levels)
    return [
        {"source": source, "correction": name, "way": asdict(way)} | figures(tally, way, wait)
        for tally, way in zip(tallies, ways, strict=True)
    ]


def why_missed(study: Study, shape: HeadTreeShape, rows: int) -> dict[str, float]:
    """Shares of blind passes that hit the head's tree, and of the places where tokens left it."""
    kinds: Counter[str] = Counter()
    for one in study.drafts:
        text, root, before = one.recording.token_ids, one.recording.roots.start, NOWHERE
        tables = one.tables(HEAD, shape)
        while root in one.recording.roots:
            table = Table() if before == NOWHERE else tables[before]
            node = NOWHERE if before == NOWHERE else table.walk(text[before + 1 : root + 1])
            kinds["first pass" if before == NOWHERE else left_at(table, text[before + 1 : root + 1])] += 1
            found = rows_of(table, node, one.chains[root], rows, text[root + 1 :])
            before, root = root, root + found.accepted + 1
    study.clear()
    return {kind: round(count / kinds.total(), 3) for kind, count in kinds.most_common()}


def left_at(table: Table, tokens: Sequence[int]) -> str:
    """Where tokens leave a tree. The last one is the target's own token."""
    for place in range(len(tokens)):
        if table.walk(tokens[: place + 1]) == NOWHERE:
            where = "own token" if place == len(tokens) - 1 else "accepted token"
            known = table.children[table.walk(tokens[:place])]
            return f"{where} {'is another child' if known else 'is below a leaf'}"
    return "hit" if table.children[table.walk(tokens)] else "root is a leaf"


def ranked(head: HeadTrees, recordings: Iterable[Recording]) -> dict[str, float]:
    """Shares of positions at which the next token is among the head's likeliest, by their number."""
    ranks = [rank for one in recordings if one.states is not None for rank in head.ranks(one)]
    counts = (1, 2, 4, 8, 16, 32, 64, 128, 1024)
    found = {f"top {count}": sum(0 <= rank < count for rank in ranks) for count in counts}
    found["cannot be said"] = ranks.count(-1)
    return {name: round(count / len(ranks), 4) for name, count in found.items()}


def loaded_head(options: argparse.Namespace) -> EagleHead:
    target = TargetCheckpoint(folder_of(options.model))
    return EagleCheckpoint(head_source(options.head)).load(target=target)


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of its recordings to a folder. Raises `ValueError` if it has others, or was not made here."""
    file, text = folder / "settings.json", json.dumps(settings, indent=1) + "\n"
    if not file.exists() and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, and has no settings.json")
    if file.exists() and file.read_text() != text:
        raise ValueError(f"{folder} was made with other settings: {file.read_text()}")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def study_of(options: argparse.Namespace) -> tuple[Study, HeadTrees, Sequence[Recording]]:
    """Recordings and drafts, read from the folder or made."""
    made_with = {name: getattr(options, name) for name in ("model", "head", "per_task", "measured", "tokens")}
    claim(options.folder, made_with | {"levels": LEVELS, "width": WIDTH, "breadth": BREADTH})
    head = loaded_head(options)
    trees = HeadTrees(head, LEVELS, WIDTH, BREADTH)
    layers = head.config.layers_of(TargetCheckpoint(folder_of(options.model)).num_layers)
    path = options.folder / "recordings.safetensors"
    recordings = record(options.model, layers, options.per_task, options.measured, options.tokens, path)
    return Study(draw_all(recordings, trees, options.folder)), trees, recordings


def measure(options: argparse.Namespace) -> dict[str, Any]:
    study, trees, recordings = study_of(options)
    found: dict[str, Any] = {
        "recordings": [
            {"task": one.recording.task, "prompt": one.recording.prompt_length, "positions": len(one.recording.roots)}
            for one in study.drafts
        ],
        "levels_that_fit": max(levels for levels in range(1, 64) if fits(levels)),
    }
    parts: dict[str, Callable[[], Any]] = {
        "main": lambda: list(main_table(study)),
        "holds": lambda: list(hold_table(study)),
        "calibration": lambda: calibration(study),
        "ranks": lambda: ranked(trees, recordings),
        "misses": lambda: {
            f"{shape.levels} x {shape.width}, {shape.nodes} nodes, {rows} rows": why_missed(study, shape, rows)
            for shape in (USUAL, HeadTreeShape(16, 32, 8, 4000))
            for rows in (12, 24)
        },
        "shapes": lambda: list(shape_table(study)),
    }
    for name, make in parts.items():
        found[name] = make()
        found["inexact"] = round(study.inexact, 6)
        show(f"{name}: done")
        write(options, found)
    return found


def write(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write the parts so far."""
    document = {"machine": describe(), "settings": settings_of(options, ["folder"]), **found}
    write_json(options.json, document)
    if options.markdown is not None:
        options.markdown.write_text(markdown(document))


def recording_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of `loaded_head`, and of the folder that `claim` takes."""
    parser = parser_of(doc)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", default="smollm2-135m-instruct")
    parser.add_argument("--folder", type=Path, required=True, help="of recordings, and what else is kept of them")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = recording_parser(__doc__)
    parser.add_argument("--per-task", type=int, default=7, help="prompts of each task; tries learn from the first ones")
    parser.add_argument("--measured", type=int, default=2, help="how many of them are walked")
    parser.add_argument("--tokens", type=int, default=112, help="of an answer, at most")
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    torch.set_num_threads(1)
    measure(parse())


if __name__ == "__main__":
    main()
