"""Writes greedy answers of a model, decoded plainly, as token traces for `benchmarks/drafters/draft_quality.py`.

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

from target_service.model.loading import store


class Answerer:
    """Greedy answers in batches of one task, through transformers' own `generate`."""

    def __init__(self, name: str, tokens: int) -> None:
        path = store.resolve(name)
        self._tokens = tokens
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @torch.inference_mode()
    def answer(self, chats: list[list[dict[str, str]]]) -> list[tuple[list[int], list[int]]]:
        """Prompt and output token ids of each chat."""
        prompts = [self._tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        prompts = [prompt if isinstance(prompt, list) else prompt["input_ids"] for prompt in prompts]
        width = max(map(len, prompts))
        ends = self._model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        fill = min(ends)
        padded = torch.tensor([[fill] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self._model.generate(
            padded, attention_mask=mask, max_new_tokens=self._tokens, do_sample=False, pad_token_id=fill
        )
        outputs = [row[width:] for row in made.tolist()]
        cuts = [next((i + 1 for i, token in enumerate(output) if token in ends), None) for output in outputs]
        return [(prompt, output[:cut]) for prompt, output, cut in zip(prompts, outputs, cuts, strict=True)]


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
