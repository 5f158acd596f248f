"""The results of a tuning run as a table, sentences, a plot, and the comment of its file."""

from __future__ import annotations

import math
from pathlib import Path

from rich import box
from rich.table import Table

from outrider.machine import describe_commit, describe_machine
from outrider_client.tuning.candidates import DEFAULT_LABEL
from outrider_client.tuning.estimates import Estimate
from outrider_client.tuning.session import NO_TIME, Measured, Tuning


def tuning_table(tuning: Tuning) -> Table:
    """A row for each configuration and load: speeds, tokens per step, and the ratio with its 95 % interval."""
    info = tuning.info
    title = f"{info.model}, {info.dtype}, {info.drafter or 'no draft'}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("settings", overflow="fold")
    for name in ("c", "tok/s", "default's", "tok/step", "x default", "95 %", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    for load, figures in tuning.speculation.by_load.items():
        # Inverted: the settings in force were measured against plain decoding.
        ratio = Estimate(-figures.ratio.mean, figures.ratio.error, figures.ratio.freedom)
        rates = (f"{figures.base_tokens_per_second:.1f}", f"{figures.tokens_per_second:.1f}", "1.00")
        table.add_row("plain decoding", str(load), *rates, *_ratio(ratio))
    for label, measured in _labelled(tuning):
        table.add_section()
        for number, (load, figures) in enumerate(measured.by_load.items()):
            steps = "-" if figures.tokens_per_step is None else f"{figures.tokens_per_step:.2f}"
            rates = (f"{figures.tokens_per_second:.1f}", f"{figures.base_tokens_per_second:.1f}", steps)
            table.add_row("" if number else label, str(load), *rates, *_ratio(figures.ratio))
    return table


def _labelled(tuning: Tuning) -> list[tuple[str, Measured]]:
    """Every measurement of a candidate by its label, the second one of the best at the end."""
    labelled = [(measured.label, measured) for _, measured in tuning.measured]
    if tuning.final is not None and tuning.final not in tuning.measured:
        labelled.append((f"once more: {tuning.final[1].label}", tuning.final[1]))
    return labelled


def _ratio(ratio: Estimate) -> tuple[str, str, str]:
    return f"{ratio.ratio:.2f}", _interval(ratio), str(ratio.freedom + 1)


def _interval(ratio: Estimate) -> str:
    return f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio.freedom else "one pair"


def _gain(ratio: Estimate) -> str:
    return f"{ratio.ratio:.2f} x ({_interval(ratio)})"


def sentences(tuning: Tuning) -> list[str]:
    """The speed of the settings in force, the engine's own decision, what tuning adds, and what was not measured."""
    speculation, left_out = tuning.speculation.ratio, dict[str, list[str]]()
    for candidate, why in tuning.left_out:
        left_out.setdefault(why, []).append(candidate.label)
    lines = [f"The settings in force make {_gain(speculation)} of plain decoding."]
    if speculation.high < 1.0:
        lines.append("Drafts cost more than they bring here: a target without a draft would be faster.")
    if tuning.info.speculation_reason:
        lines.append(f"The engine, by itself: {tuning.info.speculation_reason}.")
    lines.append(verdict(tuning))
    lines += [f"Not measured, {why}: {', '.join(labels)}." for why, labels in left_out.items()]
    if NO_TIME in left_out:
        lines.append(f"To measure all of them takes about --minutes {math.ceil(tuning.minutes_for_all)}.")
    return lines


def verdict(tuning: Tuning) -> str:
    """What tuning adds, in a sentence."""
    if tuning.final is None:
        why = "nothing that was tried was faster" if tuning.measured else "there was no time to try anything"
        return f"Tuning adds nothing: {why}. The settings in force stay."
    candidate, measured = tuning.final
    if tuning.chosen is None:
        return (
            f"Tuning adds nothing: the best, {candidate.label}, made {_gain(measured.ratio)} of the settings in force, "
            "which is within the noise. They stay."
        )
    return f"Tuning adds {_gain(measured.ratio)} of the settings in force: {candidate.label}."


def file_comment(tuning: Tuning, when: str, command: str) -> str:
    """How the settings of a file were found: command, model, machine and result."""
    machine, info = describe_machine(), tuning.info
    where = info.device_name or machine["processor"] or machine["platform"]
    commit = describe_commit()
    return "\n".join(
        (
            f"By `{command}` at {when}.",
            f"{info.model}, {info.dtype}, drafter {info.drafter or 'none'}, {where}, {machine['cores']} cores, "
            f"Outrider {info.version}{f', commit {commit[:10]}' if commit else ''}.",
            f"At {', '.join(map(str, tuning.speculation.by_load))} requests at once. {verdict(tuning)}",
            "Settings that are not named here are their defaults.",
        )
    )


def save_tuning_plot(tuning: Tuning, path: Path) -> None:
    """Write a PNG: for each candidate and load the ratio to the settings in force, with its interval."""
    from matplotlib.figure import Figure

    labelled = _labelled(tuning)
    figure = Figure(figsize=(9, 1.5 + 0.45 * max(1, len(labelled))), layout="constrained")
    axis = figure.subplots()
    loads = list(tuning.speculation.by_load)
    for number, load in enumerate(loads):
        shift = (number + 0.5) / len(loads) - 0.5
        for place, (_, measured) in enumerate(labelled):
            ratio = measured.by_load[load].ratio
            ends = [[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]] if ratio.freedom else None
            name = f"{load} at once" if place == 0 else None
            axis.errorbar(ratio.ratio, place + 0.6 * shift, xerr=ends, fmt="o", color=f"C{number}", label=name)
    axis.axvline(1.0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(labelled)), [label for label, _ in labelled], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"tokens per second over {DEFAULT_LABEL} settings, with the 95 % interval")
    axis.set_title(f"{tuning.info.model}, {tuning.info.dtype}, {tuning.info.drafter}", loc="left", fontsize=9)
    if labelled:
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
