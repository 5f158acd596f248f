"""The prompts that benchmarks ask, in the order in which every engine under comparison gets them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASK_FILE = Path(__file__).parents[1] / "prompts.jsonl"
LONGEST_PROMPT = 3500
# Random prompts keep to ids that every vocabulary of a real model has.
_LOWEST_ID, _HIGHEST_ID = 1000, 30000

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn."""

    task: str
    turns: tuple[str, ...]


def read_conversations() -> list[Conversation]:
    """Every row of the shared file, task by task in the file's order."""
    by_task: dict[str, list[Conversation]] = {}
    for line in TASK_FILE.read_text().splitlines():
        row = json.loads(line)
        by_task.setdefault(row["task"], []).append(Conversation(row["task"], tuple(row["turns"])))
    return [one for of_task in by_task.values() for one in of_task]


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Prompt:
    """Token ids of a conversation, up to where the model begins to speak."""
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
    return tuple(ids)


def folder_of(model: str) -> str:
    """The folder of a known model, a folder itself, or a hub id."""
    if Path(model).is_dir():
        return model
    # Peers run where the target's own requirements are not installed.
    from target_service.model.loading.store import resolve

    return str(resolve(model))


def read_prompts(model: str, limit: int) -> list[Prompt]:
    """Token ids of the first turns, task by task in the file's order; those of 3,500 tokens and more are left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(model))
    asked = (chat_tokens(tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in read_conversations())
    return [ids for ids in asked if len(ids) < LONGEST_PROMPT][: limit or None]


def random_prompts(count: int, tokens: int, vocabulary_size: int) -> list[Prompt]:
    """Prompts of random ids, the same for every call: what a model says to them is its own affair."""
    dice = random.Random(0)
    low = min(_LOWEST_ID, vocabulary_size // 2)
    high = min(_HIGHEST_ID, vocabulary_size)
    return [tuple(dice.randrange(low, high) for _ in range(tokens)) for _ in range(count)]


def wave(prompts: Sequence[Prompt], number: int, concurrency: int) -> list[Prompt]:
    """Prompts `number * concurrency` and following, going round. Wave -1 is for warming up: the last ones, which no
    other wave of a few has."""
    begin = number * concurrency
    return [prompts[place % len(prompts)] for place in range(begin, begin + concurrency)]


def closed_requests(prompts: Sequence[Prompt], concurrency: int, max_tokens: int) -> list[tuple[Prompt, int]]:
    """(prompt, tokens) of every request of a closed loop: `concurrency` to warm up, and max(4 * concurrency, 24) more.

    The first answers are of lengths that rise evenly, so that from then on ends are spread over time.
    """
    count = concurrency + max(4 * concurrency, 24)
    lengths = [max(1, max_tokens * (place + 1) // concurrency) for place in range(concurrency)]
    lengths += [max_tokens] * (count - concurrency)
    return [(prompts[place % len(prompts)], tokens) for place, tokens in enumerate(lengths)]
