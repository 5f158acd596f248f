"""Records greedy answers of a model on disk, with the hidden states that an EAGLE head reads, for `simulate.py`."""

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

from benchmarks.shared.greedy_answers import greedy_answers
from benchmarks.shared.workload import Prompt, folder_of, short_prompts

# Tokens. Chosen, since longer prompts take longer to record.
LONGEST_PROMPT = 1000
_BATCH = 8


@dataclass(frozen=True)
class Recording:
    """One prompt and its answer.

    Attributes:
        task: the kind of prompt.
        token_ids: prompt and answer.
        prompt_length: tokens of the prompt.
        states: [tokens, F * W] concatenated hidden states of every token; None where only the text is used.
    """

    task: str
    token_ids: list[int]
    prompt_length: int
    states: Tensor | None = None

    @property
    def roots(self) -> range:
        """Positions at which a pass may begin: those of the answer's tokens, without the last."""
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
        """(task, token ids) of the first turns of each task's first short prompts."""
        return short_prompts(self._tokenizer, per_task, LONGEST_PROMPT)

    def answer(self, prompts: list[tuple[str, Prompt]], tokens: int) -> list[Recording]:
        """Answers of at most `tokens` tokens, without states."""
        # By length, since padding takes time too.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place][1]))
        found: dict[int, Recording] = {}
        for begin in range(0, len(order), _BATCH):
            chosen = order[begin : begin + _BATCH]
            outputs = greedy_answers(self._model, [prompts[place][1] for place in chosen], tokens)
            for place, output in zip(chosen, outputs, strict=True):
                task, prompt = prompts[place]
                found[place] = Recording(task, [*prompt, *output], len(prompt))
        return [found[place] for place in range(len(prompts))]

    @torch.inference_mode()
    def with_states(self, recording: Recording) -> Recording:
        """The same with the model's hidden states, from one pass over the text."""
        output = self._model.model(torch.tensor([recording.token_ids]), output_hidden_states=True)
        # Entry 0 is the embedding.
        states = torch.cat([output.hidden_states[layer + 1][0] for layer in self._layers], dim=-1)
        return Recording(recording.task, recording.token_ids, recording.prompt_length, states.clone())


def record(
    model: str, layers: tuple[int, ...], per_task: int, measured: int, tokens: int, path: Path
) -> list[Recording]:
    """Answers to `per_task` prompts of each task, the last `measured` with states; read from `path` if it exists."""
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
    """Write texts to the file's metadata, and states as its tensors, by place."""
    texts = [(one.task, one.token_ids, one.prompt_length) for one in recordings]
    states = {str(place): one.states for place, one in enumerate(recordings) if one.states is not None}
    save_file(states, path, metadata={"recordings": json.dumps(texts)})


def read_recordings(path: Path) -> list[Recording]:
    """Read the file that `record` writes."""
    with safe_open(path, framework="pt") as file:
        texts, kept = json.loads(file.metadata()["recordings"]), set(file.keys())
        return [
            Recording(task, token_ids, prompt_length, file.get_tensor(str(place)) if str(place) in kept else None)
            for place, (task, token_ids, prompt_length) in enumerate(texts)
        ]
