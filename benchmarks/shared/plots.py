"""Draws the GPU figures of docs/performance.md from their JSON files, as PNGs beside them; and the README's figure of
speculation at the cost of an 8B model, from that of a run with the widened model.

    python -m benchmarks.shared.plots [--results benchmarks/results] [--prefix 2026-11-21-h200-]
    python -m benchmarks.shared.plots --widened docs/speed8b.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Only this script needs matplotlib, which is no requirement of the benchmarks.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

# Milliseconds in which 4.3 TB/s read the 15.0 GB of weights of a Llama-3.1-8B shape.
FLOOR_8B_MS = 3.49

Row = dict[str, Any]


def rows(document: dict[str, Any], **fields: object) -> list[Row]:
    """The results with these values in the named fields."""
    found: list[Row] = document["results"]
    return [row for row in found if all(row[name] == value for name, value in fields.items())]


def axis(title: str, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    drawn = figure.subplots()
    drawn.set_title(title, fontsize=10)
    drawn.set_xlabel("requests at once")
    drawn.set_ylabel(label)
    drawn.grid(alpha=0.3)
    return figure, drawn


def name_levels(drawn: Axes, levels: Iterable[int]) -> None:
    """A logarithmic axis of concurrency, with a tick for each level measured."""
    drawn.set_xscale("log", base=2)
    drawn.xaxis.set_major_locator(FixedLocator(sorted(set(levels))))
    drawn.xaxis.set_minor_locator(NullLocator())
    drawn.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))


def line(drawn: Axes, measured: Sequence[Row], middle: str, least: str, most: str, label: str) -> None:
    """A point for each concurrency, with a bar from the slowest to the fastest repeat."""
    levels = [row["concurrency"] for row in measured]
    values = [row[middle] for row in measured]
    below = [row[middle] - row[least] for row in measured]
    above = [row[most] - row[middle] for row in measured]
    drawn.errorbar(levels, values, yerr=[below, above], marker="o", capsize=3, label=label)


def throughput(own: dict[str, Any], engine: dict[str, Any], vllm: dict[str, Any]) -> Figure:
    figure, drawn = axis("SmolLM2-135M, one H200, waves of 200 tokens (bars: slowest and fastest)", "tokens per second")
    named = ((own, "Outrider, through gRPC"), (engine, "Outrider, engine alone"), (vllm, "vLLM 0.24.0, offline"))
    for document, label in named:
        line(drawn, rows(document, loop="waves"), "tokens_per_second", "least", "most", label)
    elsewhere: dict[str, float] = vllm["elsewhere"]
    levels = [int(level) for level in elsewhere]
    drawn.plot(levels, list(elsewhere.values()), "s--", color="C2", label="vLLM 0.24.0, offline, on another machine")
    name_levels(drawn, own["settings"]["concurrency"])
    drawn.set_ylim(bottom=0)
    drawn.legend(frameon=False)
    return figure


def step_times(document: dict[str, Any]) -> Figure:
    figure, drawn = axis("Llama-8B shape, random weights, prompts of 1,024 tokens, one H200", "ms per decode step")
    labels = {"service": "Outrider, through gRPC", "engine": "Outrider, engine alone", "vllm": "vLLM 0.24.0, offline"}
    for run in document["runs"]:
        line(drawn, rows(run, loop="steps"), "step_ms", "least_step_ms", "most_step_ms", labels[run["name"]])
    drawn.axhline(FLOOR_8B_MS, color="grey", linestyle="--", label="reading the weights once at 4.3 TB/s")
    name_levels(drawn, document["runs"][0]["settings"]["concurrency"])
    drawn.set_ylim(bottom=0)
    drawn.legend(frameon=False)
    return figure


# The run whose bars are drawn: a label, and the mode and placement of the rows.
WIDENED_RUN = "2026-11-26-h200-widened-sixteenth"
WIDENED = (
    ("one H200: lookup and a trie", "trie", "own process"),
    ("one H200: lookup, trie and EAGLE head", "merged", "same GPU"),
    ("two H200: lookup, trie and EAGLE head on the second", "merged", "second GPU"),
)
WIDENED_LOADS = (1, 8, 32)


def widened(document: dict[str, Any]) -> Figure:
    """Speed of whole greedy answers, others' prompts in between, relative to plain decoding of the same run."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    drawn = figure.subplots()
    width = 0.8 / len(WIDENED)
    ratios = {
        (row["mode"], row["placement"], row["concurrency"]): row["ratio_of_whole_answers"]
        for row in rows(document, temperature=0.0, prompts="new", delay_ms=0.0)
    }
    for number, (label, mode, placement) in enumerate(WIDENED):
        heights = [ratios[mode, placement, load] for load in WIDENED_LOADS]
        places = [place + (number - (len(WIDENED) - 1) / 2) * width for place in range(len(WIDENED_LOADS))]
        drawn.bar(places, heights, width, label=label)
        for place, height in zip(places, heights, strict=True):
            drawn.annotate(f"{height:.2f}", (place, height + 0.03), ha="center", fontsize=8)
    drawn.axhline(1.0, color="grey", linestyle="--")
    drawn.set_xticks(range(len(WIDENED_LOADS)), [f"{load} request{'s' * (load > 1)}" for load in WIDENED_LOADS])
    drawn.set_ylabel("tokens/s, as a multiple of plain decoding")
    drawn.set_title("Real text at the cost of an 8B model, whole answers, greedy", fontsize=10)
    drawn.set_ylim(0, 4.0)
    drawn.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--prefix", default="2026-11-21-h200-")
    parser.add_argument("--widened", type=Path, help="draw only the figure of speculation at 8B cost, to this file")
    options = parser.parse_args()
    if options.widened:
        document = json.loads((options.results / f"{WIDENED_RUN}.json").read_text())
        widened(document).savefig(options.widened, dpi=110)
        return

    def read(name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((options.results / f"{options.prefix}{name}.json").read_text())
        return document

    figures = {"throughput": throughput(read("serving"), read("engine"), read("vllm")), "8b": step_times(read("8b"))}
    for name, figure in figures.items():
        figure.savefig(options.results / f"{options.prefix}{name}.png", dpi=100)


if __name__ == "__main__":
    main()
