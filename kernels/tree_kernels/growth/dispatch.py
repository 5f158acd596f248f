"""Trees that grow on the device a level at a time, as in EAGLE-2 (arXiv 2406.16858), with shapes that never change.

Symbols are those of `growth.types`. Nothing here waits for the device, so that a whole tree can be captured in one CUDA
graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.growth.types import MASS_UNITS, Children, Growth, GumbelMax, VocabularyRanks
from tree_kernels.philox import exponentials, gumbel_words_by_sequence

# Probability below which a token counts as impossible.
_LEAST = 1e-30


def make_growth(
    sequences: int, levels: int, width: int, breadth: int, device: torch.device, *, least_mass: float = 0.0
) -> Growth:
    """Trees of a root alone; `width` is W, and `breadth` K. With `least_mass` a level is left out where the path
    probabilities of what it would expand hold less, on average over the trees that may grow: then L is at least 3, else
    `ValueError` is raised."""
    if least_mass and levels < 3:
        raise ValueError("trees whose levels may be left out have at least three")
    items = 1 + breadth + (levels - 1) * width * breadth

    def zeros(count: int, dtype: torch.dtype, *copies: int) -> Tensor:
        return torch.zeros(*copies, sequences, count, dtype=dtype, device=device)

    growth = Growth(
        tokens=zeros(items, torch.int32),
        parents=zeros(items, torch.int32),
        path_probs=zeros(items, torch.float64),
        scores=zeros(items, torch.float32),
        frontier=zeros(width, torch.int32, 2),
        frontier_path_probs=zeros(width, torch.float64, 2),
        next_tokens=zeros(width, torch.int32),
        sources=zeros(width, torch.int64),
        worth=torch.zeros(levels + 1, dtype=torch.int32, device=device),
        least_mass=least_mass,
        breadth=breadth,
    )
    growth.path_probs[:, 0] = 1.0
    growth.scores[:, 0] = 1.0
    return growth


def likeliest(
    logits: Tensor,
    temperatures: Tensor,
    breadth: int,
    token_ids: Tensor | None,
    ranks: VocabularyRanks | None = None,
) -> Children:
    """The K = `breadth` most probable tokens of each row of logits [R, V'].

    Temperatures [B] float32 are positive, each for R / B consecutive rows; `token_ids` [V'] int32 are the target's ids
    of the network's, None when they are the same. With `ranks` logits are [R, V' / ranks], of this one's tokens: all
    ranks get the same children, bit for bit, by one call of `joined`."""
    # More are not held by one program of the kernel.
    if logits.is_cuda and breadth <= 32:
        # Only here: Triton may be absent.
        from tree_kernels.growth import triton_children

        return triton_children.likeliest(logits, temperatures, breadth, token_ids, ranks)
    return _first_children(*_most_probable(logits, temperatures, breadth, token_ids, ranks), breadth)


def gumbel_max_winners(
    logits: Tensor,
    temperatures: Tensor,
    breadth: int,
    token_ids: Tensor | None,
    gumbel_max: GumbelMax,
    level: int,
    entrants: int,
    sharpness: float,
    ranks: VocabularyRanks | None = None,
) -> Children:
    """The tokens of each row that most likely win the target's Gumbel-max draw, with their chances.

    The most probable `entrants` of a row take part in the draw, after the request's filters; all other tokens take part
    with expected noise. `level` is the depth of the children, from 1, and `sharpness` how far the Gumbel-max draw over
    the network's distribution is taken for the target's own. The others are those of `likeliest`.
    """
    # More are not held by one program of the kernel.
    if logits.is_cuda and min(entrants, logits.shape[1]) <= 2048:
        from tree_kernels.growth import triton_children

        return triton_children.gumbel_max_winners(
            logits, temperatures, breadth, token_ids, gumbel_max, level, entrants, sharpness, ranks
        )
    tokens, rows = _most_probable(logits, temperatures, entrants, token_ids, ranks)
    sequences, known = len(temperatures), rows.shape[1]
    probs, rest, kept = _filtered(rows.double().view(sequences, -1, known), gumbel_max)
    words = gumbel_words_by_sequence(
        gumbel_max.seeds, gumbel_max.positions + (level - 1), tokens.view(sequences, -1).long()
    )
    noise = exponentials(words).view_as(probs)
    weights = torch.where(kept, (probs.clamp(min=_LEAST) / noise) ** sharpness, 0.0)
    chances = weights / (rest.clamp(min=_LEAST) ** sharpness + weights.sum(-1, keepdim=True))
    scores = torch.where((gumbel_max.coupled > 0)[:, None, None], chances, rows.double().view_as(chances)).flatten(0, 1)
    ranked, places = scores.sort(dim=-1, descending=True, stable=True)
    return _first_children(tokens.gather(1, places), ranked, breadth)


def _first_children(tokens: Tensor, scores: Tensor, breadth: int) -> Children:
    """The first K of [R, M] ranked tokens; where M is less, the rest have a score of 0."""
    padding = 0, max(0, breadth - tokens.shape[1])
    return Children(
        torch.nn.functional.pad(tokens[:, :breadth], padding),
        torch.nn.functional.pad(scores[:, :breadth].double(), padding),
    )


def grow(growth: Growth, children: Children, limits: Tensor, level: int, floor: float, tail_parents: Tensor) -> None:
    """Add the children of every frontier, and choose the next one: the best new items, without those that have as many
    better items as the tree may have nodes. Of a level that is left out there are no children.

    Args:
        growth: written in place.
        children: of the frontier, F rows of each sequence; their depth is `level`, from 1.
        limits: [2, B] int32: most nodes and most depth of each tree.
        floor: least path probability of a node.
        tail_parents: [B, T] int32, rows of the tail; those of the new frontier are written, if there is another level.
    """
    if growth.tokens.is_cuda:
        # Only here: Triton may be absent. One launch, where PyTorch takes dozens.
        from tree_kernels.growth import triton_backend

        triton_backend.grow(growth, children, limits, level, floor, tail_parents)
        return
    (_, sequences, width), breadth = growth.frontier.shape, growth.breadth
    now = level % 2
    places = 1 if level == 1 else width
    begin = growth.first_item(level)
    end = begin + places * breadth
    path_prob = growth.frontier_path_probs[now, :, :, None] if level > 1 else growth.path_probs[:, :1, None]
    scores, tokens = children.scores.view(sequences, places, breadth), children.tokens
    if growth.least_mass and level > 1:
        # Nothing was computed of a level that is left out.
        wanted = growth.worth[level] > 0
        scores, tokens = torch.where(wanted, scores, 0.0), torch.where(wanted, tokens, 0)
    # Written so that NaN is no child.
    there = (scores > 0.0) & (path_prob * scores >= floor) & (path_prob > 0.0)
    scores = scores.clamp(max=1.0)
    path_probs = torch.where(there, path_prob * scores, 0.0).flatten(1)
    growth.tokens[:, begin:end] = tokens.view(sequences, -1)
    growth.path_probs[:, begin:end] = path_probs
    growth.scores[:, begin:end] = scores.flatten(1)
    if level > 1:
        growth.parents[:, begin:end] = growth.frontier[now, ..., None].expand(-1, -1, breadth).flatten(1)
    if 1 + (level - 1) * width < tail_parents.shape[1]:
        _choose(growth, path_probs, limits, level, tail_parents)
        if growth.least_mass:
            _weigh(growth, limits, level)


def _choose(growth: Growth, path_probs: Tensor, limits: Tensor, level: int, tail_parents: Tensor) -> None:
    """Choose the next frontier among a level's items, whose path probabilities are [B, F * K]; see `grow`."""
    _, sequences, width = growth.frontier.shape
    following, begin = (level + 1) % 2, growth.first_item(level)
    end, places = begin + path_probs.shape[1], path_probs.shape[1] // growth.breadth
    best, chosen = (part[:, :width] for part in path_probs.sort(dim=1, descending=True, stable=True))
    # The root may have fewer children than a level expands: then the first child stands in, and is worth nothing.
    missing = max(0, width - path_probs.shape[1])
    best, chosen = torch.nn.functional.pad(best, (0, missing)), torch.nn.functional.pad(chosen, (0, missing))
    better = (growth.path_probs[:, None, 1:end] >= best[..., None]).sum(-1) - 1
    expanded = (best > 0.0) & (better < limits[0, :, None]) & (limits[1, :, None] > level)
    growth.frontier[following] = (chosen + begin).int()
    growth.frontier_path_probs[following] = torch.where(expanded, best, 0.0)
    growth.next_tokens.copy_(growth.tokens[:, begin:end].gather(1, chosen))
    above = chosen // growth.breadth
    growth.sources.copy_(above + places * torch.arange(sequences, device=above.device)[:, None])
    row = 1 + (level - 1) * width
    # At the first level all are the root's children.
    tail_parents[:, row : row + width] = above + (row - width) if level > 1 else above * 0


def _weigh(growth: Growth, limits: Tensor, level: int) -> None:
    """Set what the next level is worth, given its frontiers."""
    parts = (growth.frontier_path_probs[(level + 1) % 2] * MASS_UNITS + 0.5).int().sum(1)
    grows = (limits[0] > 0) & (limits[1] > level)
    growth.worth[level + 1] = torch.where(grows, parts - int(growth.least_mass * MASS_UNITS), 0).sum()


def make_kept(growth: Growth, nodes: int) -> Tensor:
    """Room for the root and the `nodes` likeliest items of each tree, which `keep` writes: [B, 1 + 3 * N] int32,
    N = min(1 + nodes, C): how many rows there are, then tokens, parents (rows), and the bits of the float32 scores."""
    sequences, items = growth.path_probs.shape
    columns = 1 + 3 * min(1 + nodes, items)
    return torch.zeros(sequences, columns, dtype=torch.int32, device=growth.path_probs.device)


def keep(growth: Growth, kept: Tensor) -> None:
    """Write each tree's best items to `kept`, [B, 1 + 3 * N] int32 of `make_kept`: likeliest first, so that
    parents come before children. What follows a tree's last row is undefined."""
    if kept.is_cuda:
        from tree_kernels.growth import triton_backend

        triton_backend.keep(growth, kept)
        return
    sequences, items = growth.path_probs.shape
    rows = (kept.shape[1] - 1) // 3
    order = growth.path_probs.sort(dim=1, descending=True, stable=True).indices[:, :rows]
    row_of = torch.zeros(sequences, items, dtype=torch.int32, device=order.device)
    row_of.scatter_(1, order, torch.arange(rows, dtype=torch.int32, device=order.device).expand(sequences, -1))
    parents = row_of.gather(1, growth.parents.gather(1, order).long())
    there = (growth.path_probs > 0.0).sum(1, keepdim=True).clamp(max=rows).int()
    scores = growth.scores.gather(1, order).view(torch.int32)
    kept.copy_(torch.cat([there, growth.tokens.gather(1, order), parents, scores], dim=1))


def _most_probable(
    logits: Tensor, temperatures: Tensor, count: int, token_ids: Tensor | None, ranks: VocabularyRanks | None
) -> tuple[Tensor, Tensor]:
    """Tokens [R, M] int32 and probabilities [R, M] float32, falling; 0 where logits are NaN."""
    scaled = (logits.float().view(len(temperatures), -1, logits.shape[1]) / temperatures[:, None, None]).flatten(0, 1)
    values, places = scaled.topk(min(count, logits.shape[1]), dim=-1)
    log_mass = scaled.logsumexp(-1, keepdim=True)
    if ranks is not None:
        known = values.shape[1]
        # All are exact in fp64.
        own = torch.cat([values.double(), places.double() + ranks.rank * logits.shape[1], log_mass.double()], dim=1)
        parts = ranks.joined(own).view(len(own), ranks.size, -1)
        values, best = parts[..., :known].flatten(1).float().topk(min(count, ranks.size * known), dim=-1)
        places = parts[..., known:-1].flatten(1).gather(1, best).long()
        log_mass = parts[..., -1].float().logsumexp(-1, keepdim=True)
    probs = (values - log_mass).exp().nan_to_num(0.0)
    return (places.int() if token_ids is None else token_ids[places]), probs


def _filtered(probs: Tensor, gumbel_max: GumbelMax) -> tuple[Tensor, Tensor, Tensor]:
    """Apply filters to falling probabilities [B, F, M], in the target's order: min_p, top_k, top_p. Returns those of
    the tokens that are kept, [B, F, M], what the rest holds, [B, F, 1], and which are kept."""
    known = probs.shape[2]
    place = torch.arange(known, device=probs.device)
    first = probs[..., :1]
    top_k = torch.where(gumbel_max.top_k > 0, gumbel_max.top_k, known)[:, None, None]
    # The first one always stays; those that would stay come first, since probabilities fall.
    stays = ((probs >= gumbel_max.min_p[:, None, None] * first) | (place == 0)) & (place < top_k) & (first > 0.0)
    cut = stays.sum(-1, keepdim=True) < known
    total = torch.where(cut, torch.where(stays, probs, 0.0).sum(-1, keepdim=True), 1.0)
    before = probs.cumsum(-1) - probs
    top_p = gumbel_max.top_p[:, None, None]
    stays &= (top_p >= 1.0) | (place == 0) | (before < top_p * total)
    mass = torch.where(stays, probs, 0.0).sum(-1, keepdim=True)
    cut = stays.sum(-1, keepdim=True) < known
    none = ~stays[..., :1]
    rest = torch.where(none, 1.0, torch.where(cut, 0.0, (1.0 - mass).clamp(min=0.0)))
    return torch.where(cut & ~none, probs / mass, probs), rest, stays
