"""transformers' own `generate`, for a process of its own.

For comparison only: the same model folder, dtype, chat template, thread count and greedy choice as the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from outrider_client.local.models import model_path
from outrider_client.messages import Message
from outrider_client.results import RequestTimes, Result, SpeculationTotals


class _FirstToken:
    """Records the time of the first token, as a streamer of `generate`; the first call has the prompt."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:  # noqa: ARG002
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None: ...


@cache
def _loaded(model: str, dtype: str, device: str) -> tuple[Any, Any]:
    # Imported here: the process that measures needs neither.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(model_path(model))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return loaded.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def load(*model: str) -> None:
    """Load a model: a folder or a name in the model store, its dtype and its device."""
    _loaded(*model)


def answer(*model: str, messages: Sequence[Message], max_tokens: int) -> Result:
    """The greedy answer of a model that was loaded."""
    network, tokenizer = _loaded(*model)
    begun = time.perf_counter()
    turns = [{"role": role, "content": content} for role, content in messages]
    wanted = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(turns, **wanted).to(network.device)
    first = _FirstToken()
    output = network.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, streamer=first)
    ended = time.perf_counter()
    prompt_tokens = inputs["input_ids"].shape[1]
    token_ids = output[0, prompt_tokens:].tolist()
    return Result(
        text=tokenizer.decode(token_ids, skip_special_tokens=True),
        token_ids=tuple(token_ids),
        finish_reason=None,
        stop_token_id=None,
        stop_string=None,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(token_ids),
        speculation=SpeculationTotals(len(token_ids), 0, 0, 0, (), (), 0, 0),
        times=RequestTimes(0.0, 0.0, 0.0),
        time_to_first_token=first.at - begun,
        duration=ended - begun,
    )
