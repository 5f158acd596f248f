"""States that decay by more than one factor a head, over trees in plain PyTorch: the CPU's form, sequence by sequence.
The state of each node is made of its parent's, and is kept no longer than the pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rows of a prompt whose decays are made together. Chosen: those of 64 rows of Jamba's 8,192 channels take 34 MB.
_CHUNK = 64


def fold_tokens(state: Tensor, values: Tensor, gates: Tensor, decay: Tensor) -> None:
    """Take tokens' values [n, C] and gates [n, C + K * N] into a state [C, N], in place, one after the other."""
    for decays, added in zip(*_terms(values, gates, decay), strict=True):
        state.mul_(decays).add_(added)


def scan_known(state: Tensor, values: Tensor, gates: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
    """Outputs [n, C] of known tokens, which become part of the state [C, N] in place."""
    made = []
    for first in range(0, len(values), _CHUNK):
        part = slice(first, first + _CHUNK)
        chain = range(-1, len(values[part]) - 1)
        output, behind = scan_nodes(state, values[part], gates[part], queries[part], decay, chain)
        state.copy_(behind)
        made.append(output)
    return torch.cat(made)


def scan_nodes(
    state: Tensor, values: Tensor, gates: Tensor, queries: Tensor, decay: Tensor, parents: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Outputs [n, C] of nodes behind a state [C, N], and the state behind the last one. `parents` come before their
    children; that of the first is the state."""
    behind: list[Tensor] = []
    for node, (decays, added) in enumerate(zip(*_terms(values, gates, decay), strict=True)):
        before = behind[parents[node]] if node else state
        behind.append(torch.addcmul(added, before, decays))
    states = torch.stack(behind)
    # [n * K, channels of a group, N]
    grouped = states.view(queries.numel() // decay.shape[1], -1, decay.shape[1])
    return torch.bmm(grouped, queries.reshape(len(grouped), -1, 1)).view(values.shape), behind[-1]


def _terms(values: Tensor, gates: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Of tokens what multiplies a state [C, N], and what is added to it, each [n, C, N]."""
    steps, width = gates[:, : len(decay)], decay.shape[1]
    keys = gates[:, len(decay) :].unflatten(1, (-1, 1, width))  # type: ignore[no-untyped-call]
    added = (steps * values).unflatten(1, (keys.shape[1], -1, 1)) * keys  # type: ignore[no-untyped-call]
    return (steps[:, :, None] * decay).exp(), added.flatten(1, 2)


def keyed_behind(state: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
    """A new state [H, Dk, Dv] behind one more token: key [H, Dk], value [H, Dv], gates [H * Dk + H]."""
    decays, betas = gates[: key.numel()].view_as(key), gates[key.numel() :]
    state = state * decays.exp()[:, :, None]
    added = betas[:, None] * (value - torch.bmm(key[:, None], state)[:, 0])
    return state.baddbmm_(key[:, :, None], added[:, None])


def mix_keyed_nodes(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, parents: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, Dv] of nodes behind a state [H, Dk, Dv], and the state behind the last one. `parents` come before
    their children, None is a chain."""
    held: dict[int, Tensor] = {}
    inner, made = set(parents or ()), torch.empty_like(values)
    for node, (query, key, value, gate) in enumerate(zip(queries, keys, values, gates, strict=True)):
        before = state if not node or parents is None else held[parents[node]]
        own = keyed_behind(before, key, value, gate)
        made[node] = torch.bmm(query[:, None], own)[:, 0]
        if parents is None:
            state = own
        elif node in inner:
            held[node] = own
    return made, own
