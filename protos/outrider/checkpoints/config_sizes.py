"""Sizes in a config.json, checked before anything of those sizes is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.checkpoints.refusal import CheckpointRefused

# Sizes that no model is without, by the names of several families. Their own code would divide by them.
_POSITIVE = {
    "hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size", "num_hidden_layers", "n_layer", "n_layers",
    "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "n_positions",
}  # fmt: skip
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
_SIZE = re.compile(r"(num|n)_\w+|\w+_(size|dim|dims|rank|heads|layers|experts)|max_position_embeddings|sliding_window")
# Ids and counts are 32 bits wide on devices.
_MOST = 2**31 - 1


def check_sizes(config: Mapping[str, Any], tensor_count: int | None = None) -> None:
    """Raise `CheckpointRefused` for a size in config.json, or in its part about text, that is no number, negative,
    larger than any model's, or zero where a model cannot be without.

    With `tensor_count`, the number of tensors in the model's files, also for more layers than tensors.
    """
    for name, value in _entries(config):
        # Added to a variance. Published ones are from 1e-12 to 1e-3.
        if re.fullmatch(r"(\w+_)?(eps|epsilon)", name) and _is_number(value) and not 0 <= value < 1:
            raise CheckpointRefused(f"config.json has {name} {value}, expected a number from 0 to 1")
        if not _SIZE.fullmatch(name):
            continue
        # Some families name a size for each layer, or list layers by their kinds.
        values = [one for one in value if _is_number(one)] if isinstance(value, list) else [value]
        for one in values:
            if name not in _POSITIVE and not _is_number(one):
                continue
            _check_size(name, one)
            if name in _LAYERS and tensor_count is not None and one > tensor_count:
                raise CheckpointRefused(f"config.json has {name} {one}, and there are {tensor_count} tensors")


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int:
        raise CheckpointRefused(f"config.json has {name} {str(value)[:40]!r}, which is no whole number")
    # The text by which a model is checked at load has 13 tokens.
    least = 16 if name == "max_position_embeddings" else 1 if name in _POSITIVE else 0
    if value < least:
        raise CheckpointRefused(f"config.json has {name} {value}, expected at least {least}")
    most = _MOST
    if name in {"max_position_embeddings", "n_positions", "n_ctx"}:
        # No model has a longer context, and tables by position are made for all of it.
        most = 1 << 24
    elif _is_count(name):
        # Modules of some families are made one by one. Published models have up to 512 experts and 1,000 layers.
        most = 1 << 16
    if value > most:
        raise CheckpointRefused(f"config.json has {name} {str(value)[:40]}, expected at most {most}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_count(name: str) -> bool:
    return name.endswith(("_layers", "_experts", "_heads")) or name in _LAYERS


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for name, value in holder.items():
            if value is not None:
                yield name, value
