"""A tiny model that is served, a head that learnt what it says, and what the plain loop says to every request."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from conftest import make_tiny
from engine_harness import plain_each
from scripted_service import byte_tokenizer
from taught_heads import prompts, request_of, taught_head

from draft_service.eagle.checkpoint import save_head
from outrider.sampling import SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
    "penalties": SamplingParams(repetition_penalty=1.05, frequency_penalty=0.02, ignore_eos=True),
}
MAX_TOKENS = 120


@dataclass(frozen=True)
class Taught:
    """Folders of the model and of the head, and the longest answer to each (sampling, prompt)."""

    model: Path
    head: Path
    answers: dict[str, list[list[int]]]

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        return prompts()

    def answer(self, sampling: str, prompt: int, max_tokens: int) -> list[int]:
        """What the plain loop says. A shorter answer is the beginning of a longer one."""
        assert max_tokens <= MAX_TOKENS
        return self.answers[sampling][prompt][:max_tokens]


def taught(folder: Path) -> Taught:
    """Make all of it in `folder`, or find it there."""
    model_folder, head_folder, written = folder / "model", folder / "head", folder / "answers.json"
    if not written.exists():
        model = make_tiny()
        model.set_attn_implementation("eager")
        wanted = [request_of(prompt, sampling, MAX_TOKENS) for sampling in SAMPLINGS.values() for prompt in prompts()]
        said = list(map(list, plain_each(model, wanted)))
        count = len(prompts())
        answers = {name: said[place * count :][:count] for place, name in enumerate(SAMPLINGS)}
        save_head(taught_head(model, "eagle-3.1", MAX_TOKENS, samplings=SAMPLINGS), head_folder, embedding=True)
        model.save_pretrained(model_folder)
        byte_tokenizer().save_pretrained(model_folder)
        written.write_text(json.dumps(answers))
    return Taught(model_folder, head_folder, json.loads(written.read_text()))
