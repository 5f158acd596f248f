"""Moves the accepted path's keys and values to their slots in the paged cache, and writes its tokens beside them.

A slot is `page * page_size + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tree_kernels.verification.dispatch import Verdicts
from tree_kernels.verification.records import FIRST_ROW, RECORD, unpack_parameters


def move_kv(
    caches: Sequence[Tensor], source_slots: Tensor | Sequence[int], target_slots: Tensor | Sequence[int]
) -> None:
    """Copy slot `source_slots[i]` onto `target_slots[i]`, all different, in every cache, in place.

    All sources are read before any target is written, so the two may overlap. Raises `ValueError` where they do not
    have the same length. Caches are [pages, page_size, Hkv, width] each, contiguous; keys and values of every layer. A
    width may be 0.
    """
    if len(source_slots) != len(target_slots):
        raise ValueError(f"expected {len(source_slots)} target slots, got {len(target_slots)}")
    if not caches or not len(source_slots):
        return
    source = torch.as_tensor(source_slots, dtype=torch.int64, device=caches[0].device)
    target = torch.as_tensor(target_slots, dtype=torch.int64, device=caches[0].device)
    for cache in caches:
        slots = cache.flatten(0, 1)
        slots.index_copy_(0, target, slots.index_select(0, source))


def move_accepted(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    parameters: Tensor,
    verdicts: Verdicts,
    backend: Literal["triton", "torch"] | None = None,
) -> None:
    """Move the accepted path of every sequence of a step to the slots behind its root, in place.

    The i-th accepted row, counted from 1, goes to the slot of row i of its tree. On a GPU that is one launch for all
    layers, which waits for nothing and costs next to nothing where every row is in place already. Raises `ValueError`
    where the shapes of keys and values do not fit, or they are not contiguous.

    Args:
        keys: [layers, pages, page_size, Hkv, D], contiguous.
        values: [layers, pages, page_size, Hkv, Dv], contiguous. Dv may be 0.
        slots: [R] int32 of the step's rows, all different; a negative slot is neither read nor written.
        parameters, verdicts: of the step's verification, see `DeviceVerifier.pack`.
        backend: "triton" or "torch"; None is "triton" on a GPU and "torch" elsewhere.
    """
    if keys.shape[:4] != values.shape[:4] or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(
            "expected contiguous keys and values [layers, pages, page_size, heads, width], "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    if (backend or ("triton" if keys.is_cuda else "torch")) == "triton":
        # Only here: Triton may be absent.
        from tree_kernels.verification.triton_move import move_rows

        move_rows(keys, values, slots, parameters, verdicts.tensor, len(verdicts.accepted_counts))
        return
    moves = _accepted_moves(slots.tolist(), parameters, verdicts)
    for pool in (keys, values):
        move_kv(list(pool), [source for source, _ in moves], [target for _, target in moves])


def keep_accepted(
    tokens: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    parameters: Tensor,
    verdicts: Verdicts,
    backend: Literal["triton", "torch"] | None = None,
) -> None:
    """Write the tokens of every accepted path beside its keys, which were moved right behind its root, in place.

    Args:
        tokens: [slots] int32, the token of each key of the cache.
        token_ids: [R] int32, as the step read them.
        slots, parameters, verdicts, backend: as in `move_accepted`.
    """
    if (backend or ("triton" if tokens.is_cuda else "torch")) == "triton":
        # Only here: Triton may be absent.
        from tree_kernels.verification.triton_move import keep_rows

        keep_rows(tokens, token_ids, slots, parameters, verdicts.accepted_counts, verdicts.accepted_rows)
        return
    for b, count in enumerate(verdicts.accepted_counts.tolist()):
        if count:
            first = int(parameters[b * RECORD + FIRST_ROW])
            rows = first + verdicts.accepted_rows[first : first + count]
            places = slots[first + 1 : first + 1 + count]
            tokens[places.long()] = token_ids[rows.long()]


def _accepted_moves(slots: list[int], parameters: Tensor, verdicts: Verdicts) -> list[tuple[int, int]]:
    """Slots to read and to write."""
    counts, accepted = verdicts.accepted_counts.tolist(), verdicts.accepted_rows.tolist()
    moves = []
    for sequence, count in zip(unpack_parameters(parameters.cpu().numpy(), len(counts)), counts, strict=True):
        first = sequence.first_row
        own = accepted[first : first + count]
        moves += [(slots[first + row], slots[first + place]) for place, row in enumerate(own, start=1)]
    return [(source, target) for source, target in moves if source != target and source >= 0 and target >= 0]
