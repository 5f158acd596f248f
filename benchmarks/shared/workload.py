"""The prompts of the benchmarks, in the order in which every engine under comparison gets them."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer

TASK_FILE = Path(__file__).parents[1] / "prompts.jsonl"
LONGEST_PROMPT = 3500
# Random prompts have ids that the vocabulary of every real model has.
_LOWEST_ID, _HIGHEST_ID = 1000, 30000

Prompt = tuple[int, ...]
# Of the form that requests with structured output fill in.
_FIELDS = {
    "name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "email": {"type": "string", "maxLength": 30}, "is_customer": {"type": "boolean"},
    "country_of_residence": {"enum": ["Germany", "France", "Spain", "Italy"]},
    "preferred_contact_method": {"enum": ["email", "telephone", "letter"]},
    "number_of_previous_orders": {"type": "integer", "minimum": 0, "maximum": 999},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptTurns:
    """The turns of a user, and the kind of task that they are."""

    task: str
    turns: tuple[str, ...]


def read_conversations() -> list[PromptTurns]:
    """Every row of the shared file, task by task in the file's order."""
    by_task: dict[str, list[PromptTurns]] = {}
    for line in TASK_FILE.read_text().splitlines():
        row = json.loads(line)
        by_task.setdefault(row["task"], []).append(PromptTurns(row["task"], tuple(row["turns"])))
    return [one for of_task in by_task.values() for one in of_task]


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Prompt:
    """Token ids of a conversation, up to where the model's answer begins; `tokenizer` is a target's, or of
    transformers."""
    if isinstance(tokenizer, ModelTokenizer):
        return tuple(_encoder_of(tokenizer).chat(messages))
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
    return tuple(ids)


@functools.cache
def _encoder_of(tokenizer: ModelTokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer)


def first_turn_tokens(tokenizer: Any, conversation: PromptTurns) -> Prompt:
    """Token ids of a conversation's first turn, up to where the model's answer begins."""
    return chat_tokens(tokenizer, [{"role": "user", "content": conversation.turns[0]}])


def first_of_each_task(conversations: Iterable[PromptTurns], count: int) -> list[PromptTurns]:
    """The first `count` of each task; all for 0."""
    taken = Counter[str]()
    chosen = []
    for one in conversations:
        taken[one.task] += 1
        if not count or taken[one.task] <= count:
            chosen.append(one)
    return chosen


def folder_of(model: str) -> str:
    """The folder of a known model, a folder itself, or a hub id."""
    if Path(model).is_dir():
        return model
    # vLLM runs where the target's requirements are not installed.
    from target_service.model.loading.store import resolve

    return str(resolve(model))


def read_prompts(model: str, limit: int) -> list[Prompt]:
    """Token ids of the first turns, task by task in the file's order; those of 3,500 tokens and more are left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(model))
    prompts = (first_turn_tokens(tokenizer, one) for one in read_conversations())
    return [ids for ids in prompts if len(ids) < LONGEST_PROMPT][: limit or None]


def short_prompts(tokenizer: Any, per_task: int, longest: int) -> list[tuple[str, Prompt]]:
    """(task, token ids) of the first turns of each task's first `per_task` prompts of at most `longest` tokens."""
    by_task: dict[str, list[Prompt]] = {}
    for one in read_conversations():
        found = by_task.setdefault(one.task, [])
        if len(found) < per_task and len(ids := first_turn_tokens(tokenizer, one)) <= longest:
            found.append(ids)
    return [(task, ids) for task, found in by_task.items() for ids in found]


def random_prompts(count: int, tokens: int, vocabulary_size: int) -> list[Prompt]:
    """Prompts of random ids, the same in every call."""
    dice = random.Random(0)
    low = min(_LOWEST_ID, vocabulary_size // 2)
    high = min(_HIGHEST_ID, vocabulary_size)
    return [tuple(dice.randrange(low, high) for _ in range(tokens)) for _ in range(count)]


def wave(prompts: Sequence[Prompt], number: int, concurrency: int) -> list[Prompt]:
    """The `concurrency` prompts from `number * concurrency` on, beginning again at the end. Wave -1 is for warming up:
    the last prompts, which none of the first waves has."""
    begin = number * concurrency
    return [prompts[place % len(prompts)] for place in range(begin, begin + concurrency)]


def closed_requests(prompts: Sequence[Prompt], concurrency: int, max_tokens: int) -> list[tuple[Prompt, int]]:
    """(prompt, tokens) of every request of a closed loop: `concurrency` to warm up, and max(4 * concurrency, 24) more.

    The lengths of the first answers rise evenly, so that the ends of all later ones are spread over time.
    """
    count = concurrency + max(4 * concurrency, 24)
    lengths = [max(1, max_tokens * (place + 1) // concurrency) for place in range(concurrency)]
    lengths += [max_tokens] * (count - concurrency)
    return [(prompts[place % len(prompts)], tokens) for place, tokens in enumerate(lengths)]


def form_schema(number: int = 0) -> dict[str, Any]:
    """A JSON Schema of seven fields; with another number one that was not compiled yet."""
    fields = {f"{name}_{number}" if number else name: each for name, each in _FIELDS.items()}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
