"""`outrider corpus`: add documents to a draft service before the first request, list corpora, and delete them."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from rich.progress import track

from outrider.consoles import error_console, output_console
from outrider.runtime import run
from outrider.settings import SettingsError, add_flags, json_lines
from outrider.wire.frames import CorpusInfo
from outrider_client.cli.base import Command, CommandFailed, add_config_flag, options
from outrider_client.cli.generate import text_of
from outrider_client.draft import DraftClient
from outrider_client.failures import ServiceUnreachable
from outrider_client.local.models import DEFAULT_MODEL, ModelMissing, Tokenizer, load_tokenizer
from outrider_client.terminal.options import AccessOptions, ClientOptions

_Action = Callable[[argparse.Namespace, ClientOptions, DraftClient], Awaitable[None]]


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
        "--corpus", default="", metavar="NAME", help="shared corpus to add to; the tenant's own trie when left out"
    )
    add.add_argument("--model", default=DEFAULT_MODEL, help="model whose tokenizer to use (default: %(default)s)")
    _add_access(add, _run_add)
    listed = actions.add_parser(
        "list",
        help="list the corpora that a tenant may draft from",
        description="Lists the tenant's own trie, if it has one, and the shared corpora.",
        allow_abbrev=False,
    )
    _add_access(listed, _run_list)
    delete = actions.add_parser(
        "delete",
        help="delete a shared corpus",
        description="Has the draft service forget a shared corpus that the tenant owns, or any with the token of the "
        "service's trusted tenant. Sequences that use it go on without it.",
        allow_abbrev=False,
    )
    delete.add_argument("name", metavar="NAME", help="shared corpus to delete")
    _add_access(delete, _run_delete)


def _add_access(parser: argparse.ArgumentParser, run_action: _Action) -> None:
    parser.add_argument(
        "--draft", default="127.0.0.1:50052", metavar="ADDRESS", help="draft service (default: %(default)s)"
    )
    add_config_flag(parser)
    add_flags(parser, AccessOptions)
    parser.set_defaults(run_action=run_action)


def _run(arguments: argparse.Namespace) -> int:
    reach = options(ClientOptions, "client", arguments)
    if arguments.run_action is _run_add:
        # Outside of the loop, where Ctrl-C ends it at once.
        arguments.documents = list(_documents(arguments.files, arguments.model))
    try:
        run(_run_action(arguments, reach))
    except ServiceUnreachable as error:
        if error.tls_problem is not None:
            raise
        # The draft of `outrider up` listens on a private socket by default.
        raise CommandFailed(
            f"{error}\n`outrider up --draft-listen {arguments.draft}` has its draft listen there, "
            "and `outrider draft` runs one alone."
        ) from error
    return 0


async def _run_action(arguments: argparse.Namespace, reach: ClientOptions) -> None:
    run_action: _Action = arguments.run_action
    async with DraftClient(reach.connection(arguments.draft)) as draft:
        await run_action(arguments, reach, draft)


async def _run_list(_: argparse.Namespace, reach: ClientOptions, draft: DraftClient) -> None:
    corpora = await draft.list_corpora(tenant=reach.tenant, timeout=reach.deadline)
    if not corpora:
        error_console().print("there are no corpora")
        return
    rows = [("NAME", "OWNER", "TOKENS", "DOCUMENTS", "NODES", "MEMORY", "KIND"), *map(_row, corpora)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = output_console(soft_wrap=True)
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        out.print("  ".join(padded).rstrip(), markup=False)


def _row(corpus: CorpusInfo) -> Sequence[str]:
    figures = map(str, (corpus.tokens, corpus.documents, corpus.nodes))
    name, kind = (corpus.name, "shared") if corpus.shared else ("-", "own")
    return name, corpus.owner, *figures, f"{corpus.bytes / 2**20:.1f} MB", kind


async def _run_delete(arguments: argparse.Namespace, reach: ClientOptions, draft: DraftClient) -> None:
    deleted = await draft.delete_corpus(arguments.name, tenant=reach.tenant, timeout=reach.deadline)
    output_console().print(f"deleted {deleted.name}: {deleted.tokens} tokens, {deleted.nodes} nodes")


async def _run_add(arguments: argparse.Namespace, reach: ClientOptions, draft: DraftClient) -> None:
    documents: Sequence[Sequence[int]] = arguments.documents
    console = error_console()
    shown = track(documents, "sending", console=console, disable=not console.is_terminal)
    added = await draft.add_corpus(shown, tenant=reach.tenant, corpus=arguments.corpus, timeout=reach.deadline)
    output_console().print(f"added {added.tokens} tokens; the trie has {added.nodes} nodes")


def _documents(files: Sequence[Path], model: str) -> Iterator[Sequence[int]]:
    tokenizer: Tokenizer | None = None
    for path in files:
        text = text_of(path)
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
    for where, row in json_lines(path, text):
        token_ids = row.get("token_ids") if isinstance(row, dict) else row
        if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
            raise SettingsError(f"{where}: needs a list of token ids, or an object with token_ids")
        yield token_ids


CORPUS = Command(
    "corpus",
    "add documents to a draft service; list and delete corpora",
    "Teaches a draft service documents, so that it drafts from them before the first request; lists and deletes what "
    "it was taught.",
    _run,
    add_flags=_add_flags,
    service="draft",
)
