"""The figures of `simulate.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.shared.report import markdown_table

Figure = Mapping[str, Any]


def _distinct(found: Iterable[Figure], key: Callable[[Figure], Any]) -> list[Any]:
    return list(dict.fromkeys(key(one) for one in found))


def _shape(one: Figure) -> str:
    shape = one["shape"]
    return f"{shape['levels']} x {shape['width']} x {shape['breadth']}, {shape['nodes']}"


def by_rows(found: Sequence[Figure], value: Callable[[Figure], object]) -> str:
    """A line for each drafter and mode, a column for each number of rows."""
    counts = _distinct(found, lambda one: one["way"]["rows"])
    lines = []
    for source, mode in _distinct(found, lambda one: (one["source"], one["mode"])):
        own = {one["way"]["rows"]: one for one in found if (one["source"], one["mode"]) == (source, mode)}
        lines.append([f"{source}: {mode}", *(value(own[count]) for count in counts)])
    return markdown_table(["rows", *map(str, counts)], lines)


def main_tables(found: Sequence[Figure]) -> list[str]:
    return [
        "## Tokens a pass\n",
        by_rows(found, lambda one: f"{one['tokens']:.2f}"),
        "## Ratio to plain decoding\n",
        by_rows(found, lambda one: f"{one['ratio']:.2f}"),
        "## Share of hits / tokens at hits / tokens at misses (h: of passes held, and theirs)\n",
        by_rows([one for one in found if one["mode"] in ("blind", "two behind", "held on a miss")], _parts),
    ]


def _parts(one: Figure) -> str:
    other = f"h{one['held_tokens']:.1f}" if one["held"] else f"{one['miss_tokens']:.1f}"
    return f"{one['hits']:.2f} / {one['hit_tokens']:.1f} / {other}"


def task_table(found: Sequence[Figure], rows: int) -> list[str]:
    """Tokens a pass by task, for one number of rows."""
    chosen = [
        one for one in found if one["way"]["rows"] == rows and one["mode"] in ("lockstep", "blind", "blind, mended")
    ]
    tasks = list(chosen[0]["tasks"])
    lines = [[f"{one['source']}: {one['mode']}", *(f"{one['tasks'][task]:.2f}" for task in tasks)] for one in chosen]
    return [f"## Tokens a pass by task, {rows} rows\n", markdown_table(["", *tasks], lines)]


def hold_tables(found: Sequence[Figure]) -> list[str]:
    """For trees of few levels: a line for each rule, a column for each number of rows."""
    parts = ["## Holds: share of passes held / tokens a pass / ratio / ratio where a wait is 1.0 ms\n"]
    found = [one for one in found if one["near"]["levels"] in (3, 6)]

    def name(one: Figure) -> str:
        way = one["way"]
        rule = "miss" if way["hold"] == "miss" else f"promise < {way['least']:g}"
        return f"{one['source']}, {one['near']['levels']} levels, {rule}{', mended' if way['mend'] else ''}"

    lines = []
    for label in _distinct(found, name):
        own = (one for one in found if name(one) == label)
        texts = (f"{x['held']:.2f} / {x['tokens']:.2f} / {x['ratio']:.2f} / {x['ratio_short_wait']:.2f}" for x in own)
        lines.append([label, *texts])
    counts = _distinct(found, lambda one: one["way"]["rows"])
    return [*parts, markdown_table(["", *(f"{count} rows" for count in counts)], lines)]


def shape_tables(found: Sequence[Figure]) -> list[str]:
    counts = _distinct(found, lambda one: one["way"]["rows"])
    lines = []
    for source, shape in _distinct(found, lambda one: (one["source"], _shape(one))):
        own = [one for one in found if (one["source"], _shape(one)) == (source, shape)]
        plain = [one for one in own if not one["way"]["mend"]]
        mended = [one for one in own if one["way"]["mend"]]
        texts = (
            f"{one['tokens']:.2f} / {one['hits']:.2f} / {one['ratio']:.2f} / {other['ratio']:.2f}"
            for one, other in zip(plain, mended, strict=True)
        )
        lines.append([f"{source}, {shape}", *texts])
    head = ["levels x expanded x children, kept", *(f"{count} rows" for count in counts)]
    return ["## Shapes, blind: tokens a pass / hits / ratio / ratio mended\n", markdown_table(head, lines)]


def calibration_tables(found: Figure) -> list[str]:
    sources = found["sources"]
    bins = sorted({one["from"] for own in sources.values() for one in own["bins"]})
    lines = []
    for low in bins:
        cells = []
        for own in sources.values():
            one = next((one for one in own["bins"] if one["from"] == low), None)
            cells.append(f"{one['promised']:.3f} → {one['right']:.3f} ({one['nodes']})" if one else "")
        lines.append([f"from {low:g}", *cells])
    parts = ["## Path probability: promised → accepted (nodes)\n", markdown_table(["", *sources], lines)]
    fits = []
    for name, own in sources.items():
        flat = own["flat"]
        fits.append([name, own["factor"], f"{flat['base']:.2f} + {flat['slope']:.2f} x log-odds"])
    parts += ["Corrections of a score given its parent:\n", markdown_table(["", "factor", "log-odds"], fits)]
    changes = []
    for one in found["changes"]:
        mode = "blind" if one["way"]["behind"] else "lockstep"
        name = f"{one['source']}, {mode}, {one['way']['rows']} rows, {one['correction']}"
        changes.append([name, f"{one['tokens']:.3f}", f"{one['promised']:.2f}"])
    return [*parts, "What they change:\n", markdown_table(["", "tokens", "promised"], changes)]


def markdown(document: Figure) -> str:
    """The tables of all parts that the document has."""
    recordings = document["recordings"]
    positions = sum(one["positions"] for one in recordings)
    parts = ["# A draft that runs ahead, simulated on recorded answers\n"]
    parts.append(
        f"{len(recordings)} greedy answers of {document['settings']['model']} (fp32), {positions} positions; costs of "
        f"an 8B target, one sequence. Rows do not count the root. Written by `benchmarks/running_ahead/simulate.py`. "
        f"Levels of a head that fit into a pass: {document['levels_that_fit']}. Nodes that smaller shapes would have "
        f"expanded, but not the largest: {100 * document.get('inexact', 0.0):.3f} %.\n"
    )
    if "main" in document:
        parts += main_tables(document["main"]) + task_table(document["main"], 24)
    if "holds" in document:
        parts += hold_tables(document["holds"])
    if "shapes" in document:
        parts += shape_tables(document["shapes"])
    for name in ("misses", "ranks"):
        if name in document:
            title = {"misses": "Where blind passes leave the head's tree", "ranks": "The next token is in the head's"}
            own = document[name]
            rows = own.items() if name == "misses" else [("", own)]
            parts.append(f"## {title[name]}\n")
            for label, values in rows:
                shares = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in values.items())
                parts.append(f"{label + ': ' if label else ''}{shares}\n")
    if "calibration" in document:
        parts += calibration_tables(document["calibration"])
    return "\n".join(parts)
