"""`outrider corpus add`: teach a draft service documents before the first request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from outrider.runtime import run
from outrider.settings import SettingsError, add_flags
from outrider_client.cli.base import Command, CommandFailed, add_config_flag, error_console, options
from outrider_client.cli.generate import read_text
from outrider_client.draft import CorpusAdded, DraftClient
from outrider_client.local.models import ModelMissing, Tokenizer, load_tokenizer
from outrider_client.terminal.options import DEFAULT_MODEL, AccessOptions, ClientOptions

_DEFAULT_DRAFT = "127.0.0.1:50052"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    add = actions.add_parser(
        "add",
        help="add documents to a tenant's trie, or to a shared corpus",
        description="Tokenises text files with the served model's tokenizer and sends them to the draft service. "
        "Files that end in .jsonl hold token ids instead: a list, or an object with token_ids, per line.",
        allow_abbrev=False,
    )
    add.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text files, or .jsonl files of token ids")
    add.add_argument(
        "--draft", default=_DEFAULT_DRAFT, metavar="ADDRESS", help=f"draft service (default: {_DEFAULT_DRAFT})"
    )
    add.add_argument(
        "--corpus", default="", metavar="NAME", help="shared corpus to add to; the tenant's own trie when left out"
    )
    add.add_argument("--model", default=DEFAULT_MODEL, help="model whose tokenizer to use (default: %(default)s)")
    add_config_flag(add)
    add_flags(add, AccessOptions)


def _run(arguments: argparse.Namespace) -> int:
    reach = options(ClientOptions, "client", arguments)
    documents = list(_documents(arguments.files, arguments.model))
    added = run(_add(reach, arguments.draft, arguments.corpus, documents))
    Console(highlight=False).print(f"added {added.tokens} tokens; the trie has {added.nodes} nodes")
    return 0


async def _add(reach: ClientOptions, address: str, corpus: str, documents: Sequence[Sequence[int]]) -> CorpusAdded:
    console = error_console()
    async with DraftClient(reach.connection(address)) as draft:
        shown = track(documents, "sending", console=console, disable=not console.is_terminal)
        return await draft.add_corpus(shown, tenant=reach.tenant, corpus=corpus, timeout=reach.deadline)


def _documents(files: Sequence[Path], model: str) -> Iterator[Sequence[int]]:
    tokenizer: Tokenizer | None = None
    for path in files:
        text = read_text(path)
        if path.suffix == ".jsonl":
            yield from _token_lines(path, text)
            continue
        if tokenizer is None:
            try:
                tokenizer = load_tokenizer(model)
            except ModelMissing as error:
                raise CommandFailed(f"{error}\nFetch it with `outrider model pull {model}`.") from error
        yield tokenizer.encode(text)


def _token_lines(path: Path, text: str) -> Iterator[Sequence[int]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SettingsError(f"{path}:{number}: {error}") from None
        token_ids = row.get("token_ids") if isinstance(row, dict) else row
        if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
            raise SettingsError(f"{path}:{number}: needs a list of token ids, or an object with token_ids")
        yield token_ids


CORPUS = Command(
    "corpus",
    "teach a draft service documents",
    "Teaches a draft service documents, so that it drafts from them before the first request.",
    _add_flags,
    _run,
)
