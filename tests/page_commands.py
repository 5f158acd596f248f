"""The commands and programs that pages show, as a reader would copy them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "kernels/README.md"),
    *(f"clients/{name}README.md" for name in ("", "go/", "typescript/", "outrider_vllm/")),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
# First words of a command, behind variables that it sets.
_PROGRAMS = (
    *("outrider", "python", "make", "pip", "curl", "buf", "grpcurl", "docker", "vllm", "npm", "go"),
    *("nvidia-smi", "ss", "git", "aider", "lm_eval", "kubectl"),
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(_PROGRAMS)}) ")
# Verbs that are whole without a word behind them.
_WHOLE = re.compile(r"outrider (?:health|info|(?:model|head|corpus) list)$")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Commands that are shown together, or one in the middle of a sentence, with the page that shows them."""

    page: str
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.commands[0][:60]}"


def blocks() -> list[Block]:
    """All of them, in the pages' order; commands in sentences only where no other says as much."""
    found: list[Block] = []
    spans: list[tuple[str, str]] = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for language, body in _FENCE.findall(text):
            if language in ("", "sh", "bash") and (shown := _commands(body)):
                found.append(Block(page, shown))
        spans += [(page, " ".join(span.split())) for _, span in _SPAN.findall(_FENCE.sub("", text))]
    known = {command for block in found for command in block.commands}
    known |= {span for _, span in spans if _is_typed(span)}
    for page, span in {span: (page, span) for page, span in reversed(spans)}.values():
        shown = any(span in block.commands for block in found)
        if _is_typed(span) and not shown and not any(_says_more(other, span) for other in known):
            found.append(Block(page, (span,)))
    return found


def _says_more(command: str, span: str) -> bool:
    """Whether one command has all words of another, and others too."""
    return set(span.split()) < set(command.split()) and command.split()[:2] == span.split()[:2]


def not_commands() -> list[tuple[str, str]]:
    """Page and first line of what blocks of commands show beside commands: drawings, files, formulas."""
    found = []
    for page in PAGES:
        for language, body in _FENCE.findall((ROOT / page).read_text()):
            shown = _commands(body)
            if language in ("sh", "bash") or (language == "" and shown):
                rest = [line for line in _lines(body) if not _COMMAND.match(f"{line} ")]
                found += [(page, line) for line in rest if not line.startswith("#")]
            elif language == "":
                found.append((page, next(line for line in body.splitlines() if line)))
    return found


def programs(language: str) -> list[tuple[str, str]]:
    """Page and text of every program in a language."""
    return [
        (page, body) for page in PAGES for shown, body in _FENCE.findall((ROOT / page).read_text()) if shown == language
    ]


def _commands(body: str) -> tuple[str, ...]:
    """A block's commands, each on one line where its quotes allow, without comments."""
    return tuple(re.sub(r"\s+# .*$", "", line) for line in _lines(body) if _COMMAND.match(f"{line} "))


def _lines(body: str) -> list[str]:
    """Lines as a shell reads them: those that go on are joined, those between quotes stay below one another."""
    found: list[str] = []
    waiting = ""
    for line in body.replace("\\\n", " ").splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        try:
            shlex.split(waiting, comments=True)
        except ValueError:
            # A quote is still open.
            continue
        found.append(waiting)
        waiting = ""
    return [line for line in found if line.strip()]


def _is_typed(span: str) -> bool:
    """Whether it is a command, and not the name of one."""
    if _WHOLE.match(span) or not span.startswith("outrider "):
        return _COMMAND.match(span) is not None
    return _COMMAND.match(span) is not None and (" --" in span or re.search(r" [A-Z]{2,}", span) is not None)
