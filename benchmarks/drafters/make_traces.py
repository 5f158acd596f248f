"""Writes greedy answers of a model as token traces for `benchmarks.drafters.draft_quality`.

python -m benchmarks.drafters.make_traces PROMPTS OUT [--per-task 12] [--tokens 256]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.greedy_answers import greedy_answers
from benchmarks.shared.workload import chat_tokens
from target_service.model.loading import store


class Answerer:
    """Greedy answers by transformers, in one batch."""

    def __init__(self, name: str, tokens: int) -> None:
        path = store.resolve(name)
        self._tokens = tokens
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def answer(self, chats: list[list[dict[str, str]]]) -> list[tuple[list[int], list[int]]]:
        """Prompt and output token ids of each chat."""
        prompts = [list(chat_tokens(self._tokenizer, chat)) for chat in chats]
        return list(zip(prompts, greedy_answers(self._model, prompts, self._tokens), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prompts", type=Path, help="file of prompts: id, task, turns")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--per-task", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in arguments.prompts.read_text().splitlines():
        prompt = json.loads(line)
        tasks[prompt["task"]].append(prompt)
    answerer = Answerer(arguments.model, arguments.tokens)
    with arguments.out.open("w") as out:
        for task, prompts in tasks.items():
            chats: list[list[dict[str, str]]] = [[] for _ in prompts[: arguments.per_task]]
            for turn in range(2):
                live = [(chat, p) for chat, p in zip(chats, prompts, strict=False) if turn < len(p["turns"])]
                for chat, prompt in live:
                    chat.append({"role": "user", "content": prompt["turns"][turn]})
                answers = answerer.answer([chat for chat, _ in live]) if live else []
                for (chat, prompt), (token_ids, output) in zip(live, answers, strict=True):
                    chat.append({"role": "assistant", "content": answerer.text(output)})
                    record = {"id": prompt["id"], "task": task, "turn": turn, "prompt": token_ids, "output": output}
                    out.write(json.dumps(record) + "\n")
            sys.stderr.write(f"{task}: {len(chats)} prompts\n")


if __name__ == "__main__":
    main()
