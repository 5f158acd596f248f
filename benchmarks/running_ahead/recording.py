"""Greedy answers of a model with the hidden states that an EAGLE head reads, kept on disk for `simulate.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.workload import Prompt, chat_tokens, folder_of, read_conversations

# Tokens. Chosen: longer prompts take longer to record.
LONGEST_PROMPT = 1000
_BATCH = 8


@dataclass(frozen=True)
class Recording:
    """One prompt and its answer.

    Attributes:
        task: what kind of prompt.
        token_ids: prompt and answer.
        prompt_length: tokens of the prompt.
        states: [tokens, F * W] captured states side by side, of every token; None where only the text is wanted.
    """

    task: str
    token_ids: list[int]
    prompt_length: int
    states: Tensor | None = None

    @property
    def roots(self) -> range:
        """Positions at which a pass may begin: of every answered token but the last, after which nothing is said."""
        return range(self.prompt_length, len(self.token_ids) - 1)


class Recorder:
    """A model on the CPU, in fp32."""

    def __init__(self, model: str, layers: tuple[int, ...]) -> None:
        """`layers` are decoder layers whose outputs are captured, counted from 0."""
        folder = folder_of(model)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._layers = layers

    def prompts(self, per_task: int) -> list[tuple[str, Prompt]]:
        """The first turns of the first short prompts of each task."""
        found: dict[str, list[Prompt]] = {}
        for one in read_conversations():
            own = found.setdefault(one.task, [])
            if len(own) < per_task:
                ids = chat_tokens(self._tokenizer, [{"role": "user", "content": one.turns[0]}])
                if len(ids) <= LONGEST_PROMPT:
                    own.append(ids)
        return [(task, ids) for task, own in found.items() for ids in own]

    @torch.inference_mode()
    def answer(self, prompts: list[tuple[str, Prompt]], tokens: int) -> list[Recording]:
        """Answers of at most so many tokens, without states."""
        ends = self._model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        fill = min(ends)
        # Of like length together: padding is read too.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place][1]))
        found: dict[int, Recording] = {}
        for begin in range(0, len(order), _BATCH):
            chosen = order[begin : begin + _BATCH]
            width = max(len(prompts[place][1]) for place in chosen)
            rows = [[fill] * (width - len(prompts[place][1])) + list(prompts[place][1]) for place in chosen]
            mask = [[0] * (width - len(prompts[place][1])) + [1] * len(prompts[place][1]) for place in chosen]
            made = self._model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=fill,
            )
            for place, row in zip(chosen, made[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                task, prompt = prompts[place]
                found[place] = Recording(task, [*prompt, *row[:end]], len(prompt))
        return [found[place] for place in range(len(prompts))]

    @torch.inference_mode()
    def with_states(self, recording: Recording) -> Recording:
        """The same with what the model held at every token, from one pass over the text."""
        output = self._model.model(torch.tensor([recording.token_ids]), output_hidden_states=True)
        # Entry 0 is the embedding.
        states = torch.cat([output.hidden_states[layer + 1][0] for layer in self._layers], dim=-1)
        return Recording(recording.task, recording.token_ids, recording.prompt_length, states.clone())


def record(
    model: str, layers: tuple[int, ...], per_task: int, measured: int, tokens: int, path: Path
) -> list[Recording]:
    """Answers to `per_task` prompts of each task, the last `measured` of each with states; from `path` once made."""
    if path.exists():
        return read_recordings(path)
    recorder = Recorder(model, layers)
    answers = recorder.answer(recorder.prompts(per_task), tokens)
    by_task: dict[str, list[Recording]] = {}
    for one in answers:
        by_task.setdefault(one.task, []).append(one)
    recordings = []
    for own in by_task.values():
        split = len(own) - measured
        recordings += own[:split] + [recorder.with_states(one) for one in own[split:]]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, recordings)
    return recordings


def _write(path: Path, recordings: list[Recording]) -> None:
    """Texts in the file's metadata, states as its tensors, by place."""
    texts = [(one.task, one.token_ids, one.prompt_length) for one in recordings]
    states = {str(place): one.states for place, one in enumerate(recordings) if one.states is not None}
    save_file(states, path, metadata={"recordings": json.dumps(texts)})


def read_recordings(path: Path) -> list[Recording]:
    """What `record` has kept there."""
    with safe_open(path, framework="pt") as file:
        texts, kept = json.loads(file.metadata()["recordings"]), set(file.keys())
        return [
            Recording(*text, file.get_tensor(str(place)) if str(place) in kept else None)
            for place, text in enumerate(texts)
        ]
