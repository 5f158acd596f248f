"""What the demo shows at its end: the runs side by side, and the trace as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from outrider_client.demo.trace_sink import ReceivedSpan
from outrider_client.results import Result

# Attributes worth a line in a terminal, by the end of their names.
_SHOWN_ATTRIBUTES = (
    ("input_tokens", "prompt"),
    ("output_tokens", "tokens"),
    ("outrider.steps", "steps"),
    ("growths", "growths"),
    ("nodes", "nodes"),
)


def totals_table(drafted: Mapping[str, Result], plain: Result) -> Table:
    """Runs of the same prompt, by their drafters, and whether their outputs equal those of the plain run."""
    table = Table(title="The same prompt with and without drafts", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in (*drafted, "without"):
        table.add_column(name, justify="right")
    runs = (*drafted.values(), plain)
    for row, of in _ROWS:
        table.add_row(row, *map(of, runs))
    per_second = plain.tokens_per_second
    ratios = [run.tokens_per_second / per_second if per_second else 0.0 for run in drafted.values()]
    table.add_row("speed against plain", *(f"{ratio:.2f} x" for ratio in ratios), "1.00 x")
    table.add_section()
    table.add_row("outputs identical", *(_verdict(run, plain) for run in drafted.values()), "")
    return table


def _verdict(run: Result, plain: Result) -> str:
    same = run.token_ids == plain.token_ids
    return f"[green]yes, all {len(plain.token_ids)} tokens[/]" if same else "[bold red]NO[/]"


def _decode_rate(result: Result) -> str:
    per_token = result.time_per_output_token
    return f"{1 / per_token:.1f}" if per_token else "-"


def _acceptance(result: Result) -> str:
    totals = result.speculation
    return f"{totals.accepted_tokens}/{totals.drafted_tokens}" if totals.drafted_tokens else "-"


def _by_depth(result: Result) -> str:
    totals = result.speculation
    pairs = zip(totals.accepted_by_depth, totals.drafted_by_depth, strict=False)
    shares = [f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted]
    return " ".join(shares[:5]) + (" ..." if len(shares) > 5 else "") or "-"


_ROWS = (
    ("tokens", lambda r: str(r.completion_tokens)),
    ("steps", lambda r: str(r.speculation.steps)),
    ("mean accepted length", lambda r: f"{r.mean_accepted_length:.2f}"),
    ("drafted tokens accepted", _acceptance),
    ("acceptance by depth 1, 2, ...", _by_depth),
    ("time to first token, ms", lambda r: f"{r.time_to_first_token * 1e3:.0f}"),
    ("tokens/s, whole request", lambda r: f"{r.tokens_per_second:.1f}"),
    ("tokens/s after the first token", _decode_rate),
)


def trace_table(spans: Sequence[ReceivedSpan]) -> Table:
    """The spans of a trace, children indented below their parents, with start and duration in milliseconds."""
    title = f"Trace {spans[0].trace_id if spans else '(empty)'}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("span", "service"):
        table.add_column(name, no_wrap=True)
    for name in ("at ms", "takes ms"):
        table.add_column(name, justify="right")
    table.add_column("totals", max_width=44)
    begin = min((span.start_ns for span in spans), default=0)
    for depth, span in _tree(spans):
        table.add_row(
            "  " * depth + span.name.removeprefix("outrider.v1."),
            span.service.removeprefix("outrider-"),
            f"{(span.start_ns - begin) / 1e6:.1f}",
            f"{(span.end_ns - span.start_ns) / 1e6:.1f}",
            ", ".join(_attributes(span)),
        )
    return table


def _tree(spans: Sequence[ReceivedSpan]) -> Iterator[tuple[int, ReceivedSpan]]:
    known = {span.span_id for span in spans}

    def from_span(span: ReceivedSpan, depth: int) -> Iterator[tuple[int, ReceivedSpan]]:
        yield depth, span
        for child in spans:
            if child.parent_id == span.span_id:
                yield from from_span(child, depth + 1)

    for span in spans:
        # A span whose parent is missing is shown as a root.
        if span.parent_id not in known:
            yield from from_span(span, 0)


def _attributes(span: ReceivedSpan) -> Iterator[str]:
    for ending, words in _SHOWN_ATTRIBUTES:
        for name, value in span.attributes.items():
            if name.endswith(ending):
                yield f"{value} {words}"
