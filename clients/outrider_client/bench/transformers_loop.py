"""transformers' own `generate` as a program: JSON requests on the standard input, JSON answers on the output.

For comparison only: the same model folder, dtype, chat template, thread count and greedy choice as the target.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from outrider_client.local.models import model_path


class _FirstToken(BaseStreamer):  # type: ignore[misc]
    """Records the time of the first token; the first call has the prompt."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:  # noqa: ARG002
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None: ...


def _answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], max_tokens: int) -> dict[str, object]:
    begun = time.perf_counter()
    wanted = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(messages, **wanted).to(model.device)
    first = _FirstToken()
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, streamer=first)
    ended = time.perf_counter()
    prompt_tokens = inputs["input_ids"].shape[1]
    token_ids = output[0, prompt_tokens:].tolist()
    return {
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        "prompt_tokens": prompt_tokens,
        "ttft": first.at - begun,
        "duration": ended - begun,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder, or name in the model store")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder, dtype = str(model_path(arguments.model)), getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
    _write({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        messages = [{"role": role, "content": content} for role, content in request["messages"]]
        _write(_answer(model, tokenizer, messages, request["max_tokens"]))
    return 0


def _write(row: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
