"""Prompt files: JSONL, one object a line with `id`, `task` and `turns` (one or two user turns)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from outrider.settings import SettingsError, json_lines, read_text


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A conversation to measure. `turns` are the user's; answers come from the model."""

    prompt_id: str
    task: str
    turns: tuple[str, ...]


def load_prompts(path: Path, *, limit: int = 0, tasks: Iterable[str] = ()) -> list[BenchPrompt]:
    """The prompts of a file, grouped by task. `tasks` selects tasks. A `limit` takes that many in all, evenly from the
    tasks, in the file's order. Raises `SettingsError`, which names the line."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for where, row in json_lines(path, read_text(path)):
        prompt = _parse(where, row)
        by_task.setdefault(prompt.task, []).append(prompt)
    wanted = [task for task in tasks if task]
    for task in wanted:
        if task not in by_task:
            raise SettingsError(f"{path} has no task {task!r}; it has {', '.join(sorted(by_task))}")
    kept = [by_task[task] for task in (wanted or by_task)]
    if not kept:
        raise SettingsError(f"{path} holds no prompts")
    if limit:
        dealt = [prompt for row in zip_longest(*kept) for prompt in row if prompt is not None]
        chosen = set(map(id, dealt[:limit]))
        kept = [[prompt for prompt in group if id(prompt) in chosen] for group in kept]
    return [prompt for group in kept for prompt in group]


def _parse(where: str, row: object) -> BenchPrompt:
    if not isinstance(row, dict):
        raise SettingsError(f"{where}: is not an object")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise SettingsError(f"{where}: turns must be a list of texts, at least one")
    for name in ("id", "task"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise SettingsError(f"{where}: {name} must be a text")
    return BenchPrompt(row["id"], row["task"], tuple(turns))
