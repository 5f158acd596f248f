"""Draft vocabularies: the target's tokens that a head can draft, which settings may limit further.

In a checkpoint `d2t` [V'] holds offsets, so that draft id i is target id i + d2t[i], and `t2d` [vocab_size] marks the
tokens of the draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from draft_service.checkpoints.facts import HeadShape
from outrider.checkpoints.headers import read_header
from outrider.checkpoints.tensors import read_tensor
from outrider.heads import HeadRefused

Shape = TypeVar("Shape", bound=HeadShape)


def read_token_map(name: str | Path) -> tuple[int, ...] | None:
    """Read target token ids from a JSON list, or from a safetensors file with one tensor of integers; None without a
    name. Raises `HeadRefused` if the file cannot be read, or is of another kind."""
    if not name:
        return None
    path = Path(name)
    if path.suffix not in (".json", ".safetensors"):
        raise HeadRefused(f"{path.name}: a token map is a JSON list or a safetensors file, never a pickle")
    try:
        if path.suffix == ".json":
            return tuple(int(token) for token in json.loads(path.read_text()))
        (ids,) = read_header(path).values()
        return tuple(read_tensor(ids).flatten().tolist())
    # Among them `CheckpointRefused`.
    except (OSError, ValueError, TypeError) as error:
        raise HeadRefused(f"{path.name} is no token map: {error}") from None


def ids_of(offsets: Tensor) -> Tensor:
    """[V'] int64 target ids, from the offsets of `d2t` [V']."""
    return offsets.long() + torch.arange(len(offsets))


def tensors_of(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a head with these target ids [V']."""
    ids = token_ids.cpu()
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def check_token_ids(shape: HeadShape, token_ids: Tensor | None) -> None:
    """Raise `HeadRefused` unless a head of this shape can have these target ids [V'], or all for None."""
    if token_ids is None:
        if shape.draft_vocab_size != shape.vocab_size:
            raise HeadRefused(f"the head drafts {shape.draft_vocab_size} of {shape.vocab_size} tokens, but has no d2t")
        return
    if token_ids.shape != (shape.draft_vocab_size,):
        raise HeadRefused(f"the token map has {len(token_ids)} tokens, the head {shape.draft_vocab_size}")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= shape.vocab_size:
        raise HeadRefused(f"the token map leaves the vocabulary of {shape.vocab_size}")
    if len(set(token_ids.tolist())) != len(token_ids):
        raise HeadRefused("the token map names a token twice")


def restrict(
    shape: Shape,
    token_ids: Tensor | None,
    token_map: Sequence[int] | None,
    tensors: MutableMapping[str, Tensor],
    lm_heads: Iterable[str],
) -> tuple[Shape, Tensor | None]:
    """Limit a head's vocabulary to a token map (FR-Spec, arXiv 2502.14856). Returns its new shape and target ids.
    Raises `HeadRefused` if no token is left.

    Args:
        token_ids: [V'] target ids of the head's vocabulary; None for all.
        token_map: target ids, of which those outside the head's vocabulary are ignored; None changes nothing.
        tensors: weights; rows of the `lm_heads` among them are removed in place.
    """
    if token_map is None:
        return shape, token_ids
    wanted = torch.tensor(sorted(set(token_map)), dtype=torch.int64)
    known = torch.arange(shape.vocab_size) if token_ids is None else token_ids
    rows = torch.isin(known, wanted).nonzero()[:, 0]
    if not len(rows):
        raise HeadRefused("the token map names no token of the head's vocabulary")
    for name in lm_heads:
        if name in tensors:
            tensors[name] = tensors[name][rows]
    return replace(shape, draft_vocab_size=len(rows)), known[rows]
