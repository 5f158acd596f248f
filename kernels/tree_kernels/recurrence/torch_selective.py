"""States that decay by more than one factor a head, over trees in plain PyTorch: the CPU's form, sequence by sequence.
The state of each node is made of its parent's, and is kept no longer than the pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rows of a prompt whose decays are made together. Chosen: those of 64 rows of Jamba's 8,192 channels take 34 MB.
_CHUNK = 64
# Rows of a prompt that are solved together. Chosen: decays between 16 rows of Kimi Linear's 32 heads take 8 MB in fp64.
_KEYED_CHUNK = 16


def fold_tokens(state: Tensor, values: Tensor, gates: Tensor, decay: Tensor) -> None:
    """Take tokens' values [n, C] and gates [n, C + N] into a state [C, N], in place, one after the other."""
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
    return torch.bmm(torch.stack(behind), queries[:, :, None])[:, :, 0], behind[-1]


def _terms(values: Tensor, gates: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Of tokens what multiplies a state [C, N], and what is added to it, each [n, C, N]."""
    steps, keys = gates[:, : len(decay)], gates[:, len(decay) :]
    return (steps[:, :, None] * decay).exp(), (steps * values)[:, :, None] * keys[:, None]


def keyed_behind(state: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
    """A new state [H, Dk, Dv] behind one more token: key [H, Dk], value [H, Dv], gates [H * Dk + H]."""
    decays, betas = gates[: key.numel()].view_as(key), gates[key.numel() :]
    state = state * decays.exp()[:, :, None]
    added = betas[:, None] * (value - torch.bmm(key[:, None], state)[:, 0])
    return state.baddbmm_(key[:, :, None], added[:, None])


def mix_keyed_nodes(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, parents: Sequence[int] | None
) -> Tensor:
    """Outputs [n, H, Dv] of nodes behind a state [H, Dk, Dv]. `parents` come before their children, None is a chain."""
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
    return made


def mix_keyed_known(state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor) -> Tensor:
    """Outputs [n, H, Dv] of known tokens, which become part of the state [H, Dk, Dv] in place."""
    made = []
    for first in range(0, len(values), _KEYED_CHUNK):
        part = slice(first, first + _KEYED_CHUNK)
        output, behind = _solved_chain(state, queries[part], keys[part], values[part], gates[part])
        state.copy_(behind)
        made.append(output)
    return torch.cat(made)


def _solved_chain(state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, Dv] of a chain behind a state [H, Dk, Dv], solved together, and the state behind it.

    As `torch_backend` has it, but a decay between two tokens is a vector of Dk numbers: with G(i) the sum of the
    logarithms [Dk] up to token i,

        u(i) = beta(i) * (v(i) - (k(i) exp(G(i))) S - sum over j < i of (k(i) exp(G(i) - G(j)) k(j)) u(j))

    and no power is of a positive number. A token whose inputs are not finite spoils itself and those behind it.
    """
    count, heads, width = keys.shape
    broken = ~torch.cat([keys.flatten(1), values.flatten(1), gates], dim=1).isfinite().all(dim=1)
    keys, values = (one.masked_fill(broken[:, None, None], 0.0) for one in (keys, values))
    gates = gates.masked_fill(broken[:, None], 0.0)
    logs, betas = gates[:, : heads * width].view(count, heads, width), gates[:, heads * width :]
    # In fp64: differences of large sums are small.
    sums = logs.double().cumsum(0)
    seen = torch.ones(count, count, dtype=torch.bool, device=state.device).tril_()
    between = (sums[:, None] - sums[None]).masked_fill_(~seen[:, :, None, None], float("-inf")).exp().float()
    # [i, j, H, Dk], the key of token j as token i meets it.
    met, reached = between * keys, sums.exp().float()
    scores = torch.einsum("ihk,ijhk->hij", queries, met)
    system = betas.T[:, :, None] * torch.einsum("ihk,ijhk->hij", keys, met)
    added = betas[:, :, None] * (values - torch.einsum("ihk,hkv->ihv", keys * reached, state))
    solved = torch.linalg.solve_triangular(system, added.transpose(0, 1), upper=False, unitriangular=True)
    outputs = torch.einsum("ihk,hkv->ihv", queries * reached, state) + torch.bmm(scores, solved).transpose(0, 1)
    outputs[broken.cumsum(0) > 0] = float("nan")
    behind = reached[-1, :, :, None] * state + torch.einsum("jhk,hjv->hkv", met[-1], solved)
    return outputs, behind
