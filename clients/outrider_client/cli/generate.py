"""`outrider generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from outrider.consoles import error_console, output_console
from outrider.errors import UnknownCorpus
from outrider.runtime import run
from outrider.settings import SettingsError, unreadable
from outrider.structured_output import StructuredOutput
from outrider.visible import visible
from outrider_client.cli.base import Command, CommandFailed, options
from outrider_client.client import Client, Message
from outrider_client.generation import Generation
from outrider_client.results import Result
from outrider_client.terminal.options import ClientOptions, GenerateOptions
from outrider_client.terminal.painting import Painter
from outrider_client.terminal.waiting import until_loaded


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="what to say; read from the standard input when left out or -")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a chat template")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--prediction", metavar="FILE", type=Path, help="file with the answer that is expected, such as a text to edit"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", type=Path, help="the answer is JSON of this JSON Schema")
    form.add_argument("--regex", metavar="REGEX", help="the answer matches this regular expression")
    form.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="the answer is one of these; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of streaming text")
    parser.add_argument("--colour", action="store_true", help="show drafted and own tokens in two colours")


def _run(arguments: argparse.Namespace) -> int:
    client = options(ClientOptions, "client", arguments)
    wanted = options(GenerateOptions, "generate", arguments)
    if arguments.raw and arguments.system:
        raise SettingsError("--system needs the chat template, which --raw leaves out")
    return run(_generate(arguments, client, wanted, _prompt(arguments.prompt)))


def _prompt(given: str | None) -> str:
    if given not in (None, "-"):
        text = str(given)
    elif sys.stdin.isatty():
        raise SettingsError("a prompt is needed, as an argument or on the standard input")
    else:
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise SettingsError(f"the prompt is no UTF-8: {error}") from None
    if not text.strip():
        raise SettingsError("the prompt is empty")
    return text


async def _generate(arguments: argparse.Namespace, reach: ClientOptions, wanted: GenerateOptions, prompt: str) -> int:
    form = _form(arguments)
    messages: list[Message] = [("system", arguments.system)] if arguments.system else []
    async with Client(reach.connection(reach.target)) as client:
        await until_loaded(client, error_console(), reach.deadline)
        painter = Painter() if arguments.colour else None
        generation = client.generate(
            messages=() if arguments.raw else [*messages, ("user", prompt)],
            text=prompt if arguments.raw else "",
            sampling=replace(wanted.sampling(tuple(arguments.stop)), structured_output=form),
            speculation=wanted.speculating(),
            prediction=text_of(arguments.prediction) if arguments.prediction else None,
            timeout=reach.deadline,
        )
        if not arguments.json:
            await _stream(generation, painter)
        result = await generation.result()
    if arguments.json:
        json.dump(result_as_json(result), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        error_console().print(f"[dim]{summary(result)}[/]", soft_wrap=True)
    warn_of_refusal(result, wanted)
    return 0


def _form(arguments: argparse.Namespace) -> StructuredOutput | None:
    """The form of the answer, if there is to be one. The target checks it."""
    if arguments.json_schema is not None:
        return StructuredOutput(json_schema=text_of(arguments.json_schema))
    if arguments.regex is not None:
        return StructuredOutput(regex=arguments.regex)
    return StructuredOutput(choices=tuple(arguments.choice)) if arguments.choice else None


async def _stream(generation: Generation, painter: Painter | None) -> None:
    console = output_console()
    async for chunk in generation:
        if painter is None:
            sys.stdout.write(visible(chunk.text) if console.is_terminal else chunk.text)
            sys.stdout.flush()
        else:
            console.print(painter.paint(chunk), end="", soft_wrap=True)
    sys.stdout.write("\n")


def summary(result: Result) -> str:
    """The totals of a generation in one line."""
    reason = result.finish_reason.value if result.finish_reason else "unfinished"
    predicted = result.accepted_prediction_tokens + result.rejected_prediction_tokens
    of_prediction = f"{result.accepted_prediction_tokens} of {predicted} predicted kept, " if predicted else ""
    not_lossless = f"not lossless: {result.lossy_tokens} tokens the model would not draw, " if result.lossy else ""
    return (
        f"{result.completion_tokens} tokens in {result.speculation.steps} steps, "
        f"{result.mean_accepted_length:.2f} per step, {result.tokens_per_second:.1f} tokens/s, {of_prediction}"
        f"{not_lossless}first token after {result.time_to_first_token * 1e3:.0f} ms, ended by {reason}"
    )


def warn_of_refusal(result: Result, wanted: GenerateOptions) -> None:
    """Print on the standard error that the draft service refused the request, if it did."""
    if result.draft_refused:
        corpus = f" (--corpus {wanted.corpus})" if result.draft_refused == UnknownCorpus.reason else ""
        line = f"the draft service refused to draft: {result.draft_refused}{corpus}"
        error_console().print(f"[yellow]{escape(line)}[/]", soft_wrap=True)


def result_as_json(result: Result) -> dict[str, object]:
    """A result as JSON types, derived figures included."""
    return {
        **dataclasses.asdict(result),
        "finish_reason": result.finish_reason.value if result.finish_reason else None,
        "tokens_per_second": result.tokens_per_second,
        "mean_accepted_length": result.mean_accepted_length,
    }


def text_of(path: Path) -> str:
    """A UTF-8 file, or `CommandFailed`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(unreadable(path, error)) from error


GENERATE = Command(
    "generate",
    "answer one prompt",
    "Sends one prompt to the target and streams the answer to the standard output; totals go to the standard error.",
    _run,
    settings=(ClientOptions, GenerateOptions),
    add_flags=_add_flags,
)
