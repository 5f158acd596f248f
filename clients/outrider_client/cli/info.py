"""`outrider info`: what a target runs, on what, and whether drafts help it right now."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from outrider.consoles import output_console
from outrider_client.cli.base import Command, options
from outrider_client.client import Client
from outrider_client.results import TargetInfo
from outrider_client.terminal.options import ClientOptions


async def _run(arguments: argparse.Namespace) -> int:
    client = options(ClientOptions, "client", arguments)
    async with Client(client.connection(client.target)) as target:
        info = await target.info(client.deadline)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(client.target, info):
        table.add_row(name, Text(value))
    # Wider than any line: a terminal folds long reasons, and a pipe gets each on one line.
    output_console(width=None if sys.stdout.isatty() else 1000).print(table)
    return 0


def _lines(address: str, info: TargetInfo) -> Iterator[tuple[str, str]]:
    """(name, value) of each line. What an older target does not report is left out."""
    versions = (("outrider", info.version), ("torch", info.torch_version), ("triton", info.triton_version))
    yield "target", address
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions if version)
    yield "model", f"{info.model}, {info.dtype}, vocabulary {info.vocabulary_size}"
    if info.model_version:
        yield "weights", f"version {info.model_version}"
    if info.device:
        yield "device", f"{info.device}, {info.device_name}" if info.device_name else info.device
        captured = f"{info.captured_step_sizes} of {info.capturable_step_sizes} sizes of steps are captured"
        yield "steps", captured if info.capturable_step_sizes else "run eagerly"
    each = f", {info.kv_token_bytes:,} bytes each" if info.kv_token_bytes else ""
    yield "context", f"{info.max_context} tokens a sequence, {info.kv_tokens} in the KV cache{each}"
    yield "drafter", f"{info.drafter or 'none'}, up to {info.max_rows - 1} drafted rows a sequence and step"
    if info.draft:
        yield "draft", f"{info.draft}, {'connected' if info.draft_connected else 'not connected'}"
    if info.speculation_reason:
        yield "speculation", f"{'on' if info.speculating else 'off'}: {info.speculation_reason}"


INFO = Command(
    "info",
    "show what a target runs: versions, model, device, draft, and why it speculates or not",
    "Asks the target what it runs, on which device, where its draft is, and whether anything drafts right now and why.",
    _run,
    settings=(ClientOptions,),
)
