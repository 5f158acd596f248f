"""A tiny model in a folder, with a tokenizer of bytes and a chat template: a target that can teach on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 259
END = 2
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary, as GPT-2 chose them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(256 + place) for place in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def chat_tokenizer() -> Any:
    """Byte b is id 3 + b; ids 0 to 2 are pad, begin and end of a turn."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": END} | {one: 3 + byte for byte, one in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = _TEMPLATE
    return fast


def save_teaching_model(folder: Path, *, layers: int = 6) -> Path:
    """Random weights that make little more than a table of which token follows which: a head can learn that fast.

    Turns end after some ten tokens, or not at all where nothing is drawn.
    """
    config = LlamaConfig(**(TINY | {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "eos_token_id": END}))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(std=0.4)
        # One direction that every token has, and only the end is said for.
        model.model.embed_tokens.weight[:, 0] = 2.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END, 0] = 1.0
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder
