"""Which of the target's tokens a head can draft: a head may have rows for fewer of them, and settings may allow fewer
still.

In a checkpoint `d2t` holds offsets, so that draft id i stands for i + d2t[i], and `t2d` [vocab_size] marks the tokens
that can be said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from draft_service.checkpoints.facts import HeadRefused, HeadShape

Shape = TypeVar("Shape", bound=HeadShape)


def read_token_map(path: str | Path) -> tuple[int, ...]:
    """Target token ids from a JSON list, or from a safetensors file with one tensor of integers.

    Raises:
        HeadRefused: another kind of file, or none.
    """
    from safetensors.torch import load_file

    path = Path(path)
    if path.suffix not in (".json", ".safetensors"):
        raise HeadRefused(f"{path.name}: a token map is a JSON list or a safetensors file, never a pickle")
    try:
        if path.suffix == ".json":
            return tuple(int(token) for token in json.loads(path.read_text()))
        (ids,) = load_file(path).values()
        return tuple(ids.flatten().tolist())
    except (OSError, ValueError, TypeError) as error:
        raise HeadRefused(f"{path.name} is no token map: {error}") from None


def ids_of(offsets: Tensor) -> Tensor:
    """[V'] int64 target ids, from the offsets of `d2t` [V']."""
    return offsets.long() + torch.arange(len(offsets))


def tensors_of(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a head that can say the target ids [V']."""
    ids = token_ids.cpu()
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def check_token_ids(shape: HeadShape, token_ids: Tensor | None) -> None:
    """Raise `HeadRefused` unless the target ids [V'] are those of a head of this shape; None are all of them."""
    if token_ids is None:
        if shape.draft_vocab_size != shape.vocab_size:
            raise HeadRefused(
                f"the head says {shape.draft_vocab_size} of {shape.vocab_size} tokens, and nothing says which (d2t)"
            )
        return
    if token_ids.shape != (shape.draft_vocab_size,):
        raise HeadRefused(f"{len(token_ids)} token ids are mapped, the head says {shape.draft_vocab_size}")
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
    """The shape and the target ids of a head that shall say no more than a token map (FR-Spec, arXiv 2502.14856).

    Args:
        token_ids: [V'] that it can say; None for all.
        token_map: target ids, of which those that it does not know are left out; None changes nothing.
        tensors: weights, of which the `lm_heads` that are there are cut in place.

    Raises:
        HeadRefused: it can say none of them.
    """
    if token_map is None:
        return shape, token_ids
    wanted = torch.tensor(sorted(set(token_map)), dtype=torch.int64)
    known = torch.arange(shape.vocab_size) if token_ids is None else token_ids
    rows = torch.isin(known, wanted).nonzero()[:, 0]
    if not len(rows):
        raise HeadRefused("the token map names no token that the head knows")
    for name in lm_heads:
        if name in tensors:
            tensors[name] = tensors[name][rows]
    return replace(shape, draft_vocab_size=len(rows)), known[rows]
