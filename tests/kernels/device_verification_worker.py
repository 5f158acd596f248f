"""Verifies many random steps by kernel and by the loop over sequences, and writes where they differ, as JSON.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from examples import is_full
from torch import Tensor
from waits import HUNG_SECONDS

from tree_kernels.verification import (
    DRAWN_BY_POSITION,
    NOT_FINITE,
    TOKEN_BITS,
    DeviceVerifier,
    Mode,
    RowsToVerify,
    Verdicts,
    coupled_token,
    move_accepted,
)
from tree_kernels.verification.torch_backend import row_distribution

INTERPRETED = not torch.cuda.is_available()
# Of combinations that take long, some in turn.
IN_TURN = INTERPRETED and not is_full()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SPARE_ROWS = 3


@dataclass
class Step:
    """One step's inputs; rows of no sequence hold NaN."""

    vocabulary: int
    logits: Tensor
    token_ids: list[int]
    parents: list[int]
    asked: list[RowsToVerify]
    distributions: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)


def choice_of(asked: RowsToVerify, logits_row: Tensor, depth: int) -> int:
    """A token after a row to draft, which may be accepted: the target's own, in REJECTION mode another draw, and in
    TYPICAL mode the likeliest."""
    if asked.mode in (Mode.GREEDY, Mode.TYPICAL) or asked.temperature == 0:
        return int(logits_row.argmax())
    return coupled_token(row_distribution(asked, logits_row), asked.seed, asked.position + depth)


def grow(asked: RowsToVerify, logits: Tensor, shape: str, rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose rows follow the target's choices three times in four."""
    tokens, parents, depths, children = [rng.randrange(logits.shape[1])], [0], [0], [set[int]()]
    while len(tokens) < asked.rows:
        deep = rng.random() < 0.6
        parent = len(tokens) - 1 if shape == "chain" or deep else 0 if shape == "star" else rng.randrange(len(tokens))
        right = rng.random() < 0.75
        token = choice_of(asked, logits[parent], depths[parent]) if right else rng.randrange(logits.shape[1])
        if token in children[parent]:
            token = rng.randrange(logits.shape[1])
        if token in children[parent]:
            continue
        children[parent].add(token)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        children.append(set())
    return tokens, parents


def draft_distributions(
    logits: Tensor, tokens: list[int], parents: list[int], rng: random.Random
) -> dict[int, tuple[list[int], list[int]]]:
    """Distributions of two rows in three that hold their children, likely tokens and others."""
    distributions = {}
    for row in range(len(tokens)):
        own = [tokens[child] for child in range(1, len(tokens)) if parents[child] == row]
        if len(own) > 64 or rng.random() < 0.3:
            continue
        likely = logits[row].topk(min(rng.randrange(1, 9), logits.shape[1])).indices.tolist()
        others = [] if rng.random() < 0.3 else [*likely, rng.randrange(logits.shape[1])]
        support = list(dict.fromkeys([*own, *others]))[:64]
        if support:
            rng.shuffle(support)
            distributions[row] = (support, [rng.choice((1, 7, 300, 65535)) for _ in support])
    return distributions


def logits_of(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(rows, vocabulary, generator=generator)
    if kind == "ties":
        return (noise * 2).round() / 2
    if kind == "equal":
        return torch.zeros(rows, vocabulary)
    if kind == "peaked":
        return noise * 8
    if kind == "holes":
        return torch.where(noise > 0.5, noise, -torch.inf).index_fill_(1, torch.tensor([vocabulary // 2]), 1.0)
    return noise * 3


def make_step(
    asked: list[RowsToVerify],
    *,
    vocabulary: int,
    kind: str = "usual",
    shape: str = "tree",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """`first_row` of what is asked is overwritten; every sequence is followed by some rows of nobody."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    total = sum(one.rows + SPARE_ROWS for one in asked)
    # Wider than the vocabulary by columns that must not be looked at.
    logits = torch.full((total, vocabulary + 5), float("nan"), dtype=dtype)
    step = Step(vocabulary, logits, [0] * total, [0] * total, [])
    first = 1
    for one in asked:
        one = one._replace(first_row=first)
        end = first + one.rows
        own = logits_of(kind, one.rows, vocabulary, generator).to(dtype)
        logits[first:end, :vocabulary] = own
        if one.rows:
            tokens, parents = grow(one, own, "chain" if one.is_chain else shape, rng)
            step.token_ids[first:end] = tokens
            # A chain's parents must not be read.
            step.parents[first:end] = [0] * one.rows if one.is_chain else parents
            if one.mode is Mode.REJECTION:
                distributions = draft_distributions(own.float(), tokens, parents, rng)
                step.distributions.update({first + row: distribution for row, distribution in distributions.items()})
        step.asked.append(one)
        first = end + SPARE_ROWS - 1
    step.logits = logits.to(DEVICE)
    return step


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def arguments_of(step: Step, verifier: DeviceVerifier) -> Arguments:
    integers = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (step.token_ids, step.parents)]
    # One element into a buffer, so that nothing may rely on an address of eight bytes.
    packed = torch.from_numpy(verifier.pack(step.asked))
    parameters = torch.cat([packed[:1], packed]).to(DEVICE)[1:]
    distributions = (
        torch.from_numpy(verifier.pack_distributions(step.distributions)).to(DEVICE) if step.distributions else None
    )
    return step.logits, integers[0], integers[1], parameters, distributions


Said = list[tuple[list[int], int, list[int]]]


def said(verifier: DeviceVerifier, asked: list[RowsToVerify]) -> Said:
    """Accepted rows and next token of every sequence, and of TYPICAL ones which rows are lossy."""
    verdicts = verifier.verdicts
    host = Verdicts.over(verdicts.tensor.cpu(), len(verdicts.accepted_counts))
    rows, counts, lossy = host.accepted_rows.tolist(), host.accepted_counts.tolist(), verifier.lossy_rows.tolist()
    places = [slice(one.first_row, one.first_row + count) for one, count in zip(asked, counts, strict=False)]
    return [
        (rows[at], token, lossy[at] if one.mode is Mode.TYPICAL and one.temperature > 0 else [])
        for one, at, token in zip(asked, places, host.next_tokens.tolist(), strict=False)
    ]


def verdicts_of(step: Step, backend: Any, call: str) -> Said:
    # On a GPU one size of everything, which keeps the number of kernels to compile small.
    sequences, rows = len(step.asked) + 1, len(step.token_ids) + 2 if INTERPRETED else 1024
    verifier = DeviceVerifier(DEVICE, step.vocabulary, sequences, rows, backend)
    *inputs, distributions = arguments_of(step, verifier)
    if call == "greedy":
        verifier.greedy(*inputs)
        return said(verifier, step.asked)
    filtered = any(one.filtered for one in step.asked) or not INTERPRETED
    typical = any(one.mode is Mode.TYPICAL for one in step.asked) or not INTERPRETED
    verifier.sampled(*inputs, distributions, filtered=filtered, typical=typical)
    return said(verifier, step.asked)


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 3.0},
    "temperature 0": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_k of 1": {"top_k": 1},
    "top_k of most": {"top_k": 40},
    "top_k of more than all": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p of nearly all": {"top_p": 1.0 - 1e-9},
    "top_p of nearly none": {"top_p": 1e-9},
    "min_p": {"min_p": 0.07},
    "min_p of 1": {"min_p": 1.0},
    "all": {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "min_p and top_p": {"min_p": 0.01, "top_p": 0.7},
    "top_k and top_p, hot": {"temperature": 1.5, "top_k": 30, "top_p": 0.95},
}  # fmt: skip


def drawn(mode: Mode, rows: int, seed: int, **parameters: Any) -> RowsToVerify:
    """A seed and a position that fill both words. Every other TYPICAL sequence is at its first token."""
    position = 2**32 - 2 + seed
    if mode is Mode.TYPICAL:
        parameters |= {
            "begins": position - seed % 2,
            "epsilon": (0.09, 0.4)[rows % 2],
            "delta": (0.3, 0.8)[seed // 2 % 2],
        }
    return RowsToVerify(0, rows, mode, (seed + 1) * 0x9E3779B97F4A7C15 % 2**64, position, **parameters)


def steps() -> Iterator[tuple[str, Callable[[], Step], str]]:
    """Name, step, and the call that verifies it."""
    for turn, vocabulary in enumerate((2, 50, 2048, 5003)):
        for place, kind in enumerate(("usual", "ties", "equal")):
            if IN_TURN and (turn + place) % 3 == 0:
                continue
            trees = [drawn(Mode.GREEDY, rows, rows) for rows in (1, 0, 9)]
            trees.append(trees[2]._replace(is_chain=True))
            name = f"greedy {vocabulary} {kind}"
            shape = "chain" if vocabulary == 2 else "tree"
            yield (
                name,
                lambda v=vocabulary, a=trees, k=kind, s=shape: make_step(a, vocabulary=v, kind=k, shape=s),
                "greedy",
            )
    for rows in (1, 2, 64, 65, 256) if IN_TURN else (1, 2, 64, 65, 255, 256):
        for place, shape in enumerate(("chain", "tree", "star")):
            if IN_TURN and (place + rows) % 3 == 0:
                continue
            trees = [drawn(Mode.GREEDY, rows, 1)]
            yield f"greedy {rows} {shape}", lambda a=trees, s=shape: make_step(a, vocabulary=300, shape=s), "greedy"
    kinds = (("usual", 50), ("ties", 50), ("peaked", 700), ("holes", 300))
    for i, (name, parameters) in enumerate(FILTERS.items()):
        for mode in (Mode.COUPLED, Mode.REJECTION, Mode.TYPICAL):
            # A filter cuts the same of every mode: one of three in turn.
            if IN_TURN and (i + mode) % 3:
                continue
            # The interpreter takes a second for each: one kind in turn.
            for kind, vocabulary in (kinds[(i + mode) % 4],) if INTERPRETED else kinds:
                trees = [drawn(mode, 7, 0, **parameters), drawn(mode, 1, 1, **parameters)]
                trees.append(trees[0]._replace(rows=5, is_chain=True))
                yield (
                    f"{mode.name} {name} {kind}",
                    lambda a=trees, v=vocabulary, k=kind: make_step(a, vocabulary=v, kind=k),
                    "sampled",
                )
    for mode in (Mode.COUPLED, Mode.REJECTION, Mode.TYPICAL):
        shapes = ((130 if IN_TURN else 256, "star"), (100, "chain"), (70, "tree"))
        for rows, shape in (shapes[mode % 3],) if IN_TURN else shapes:
            trees = [drawn(mode, rows, 3, temperature=0.6)]
            yield (
                f"{mode.name} {rows} {shape}",
                lambda a=trees, s=shape: make_step(a, vocabulary=400, kind="peaked", shape=s),
                "sampled",
            )
        trees = [drawn(mode, 4, 5, top_p=0.5), drawn(mode, 3, 6, top_k=4), drawn(mode, 3, 7)]
        for kind in ("usual", "equal") if mode in DRAWN_BY_POSITION else ("ties",):
            yield f"{mode.name} wide {kind}", lambda a=trees, k=kind: make_step(a, vocabulary=5003, kind=k), "sampled"
    for seed in range(4 if IN_TURN else 12 if INTERPRETED else 60):
        yield f"mixed {seed}", lambda s=seed: mixed(s), "sampled"
    if not INTERPRETED:
        yield from device_steps()


def mixed(seed: int, vocabulary: int | None = None, largest: int = 20, count: int = 5) -> Step:
    """Everything at once."""
    rng = random.Random(seed)
    asked = [
        drawn(
            rng.choice(list(Mode)), rng.choice((0, 1, rng.randrange(1, largest))), rng.randrange(1000),
            **FILTERS[rng.choice(list(FILTERS))], is_chain=rng.random() < 0.3,
        )
        for _ in range(rng.randrange(1, count))
    ]  # fmt: skip
    return make_step(
        [*asked, drawn(Mode.COUPLED, 3, seed)],
        vocabulary=vocabulary or rng.choice((23, 130, 2049, 4500)),
        kind=rng.choice(("usual", "ties", "peaked", "holes")),
        shape=rng.choice(("tree", "tree", "star")),
        dtype=rng.choice((torch.float32, torch.bfloat16, torch.float16)),
        seed=seed,
    )


def device_steps() -> Iterator[tuple[str, Callable[[], Step], str]]:
    """Real sizes, which only a GPU runs."""
    for vocabulary in (49152, 128256, 151669, 256000):
        trees = [drawn(Mode.GREEDY, rows, rows) for rows in (1, 16, 64)]
        for kind in ("usual", "ties"):
            yield (
                f"greedy {vocabulary} {kind}",
                lambda a=trees, v=vocabulary, k=kind: make_step(a, vocabulary=v, kind=k, dtype=torch.bfloat16),
                "greedy",
            )
        for seed in range(4):
            yield f"mixed {vocabulary} {seed}", lambda v=vocabulary, s=seed: mixed(s, v, 40, 8), "sampled"


def moves_differ(seed: int) -> bool:
    """Whether the kernel moves what the loop over slots does not, or the other way about."""
    step = mixed(seed)
    sequences, rows = len(step.asked), len(step.token_ids)
    verifier = DeviceVerifier(DEVICE, step.vocabulary, sequences, rows, "triton")
    *inputs, distributions = arguments_of(step, verifier)
    verdicts = verifier.sampled(*inputs, distributions)
    generator = torch.Generator().manual_seed(seed)
    pages = -(-rows // 16) + 1
    slots = torch.randperm(pages * 16, generator=generator)[:rows].to(DEVICE, torch.int32)
    if seed % 3 == 0:
        slots[::7] = -1
    # Latents have no values beside them.
    widths = (24, 0) if seed % 2 else (24, 40)
    pools = [torch.randn(3, pages, 16, 2, width, generator=generator).to(DEVICE) for width in widths]
    copies = [pool.clone() for pool in pools]
    move_accepted(pools[0], pools[1], slots, inputs[3], verdicts, "triton")
    move_accepted(copies[0], copies[1], slots, inputs[3], verdicts, "torch")
    return not all(map(torch.equal, pools, copies))


def rows_of_nothing() -> list[str]:
    """Steps whose logits are no finite numbers somewhere, and that do not say so, say what is no token, or change what
    other sequences say. A whole row, or one number of it; of the root, or of a row below."""
    # Ends this process where a kernel does not end.
    signal.alarm(int(HUNG_SECONDS))
    wrong = []
    for mode, vocabulary in itertools.product(Mode, (50, 2048)):
        for filtered in (False, True) if mode is not Mode.GREEDY else (False,):
            # Each mode with and without filters, each with one size.
            if IN_TURN and mode is not Mode.GREEDY and filtered != (vocabulary > 50) ^ (mode is Mode.REJECTION):
                continue
            parameters = {"top_k": 5, "top_p": 0.8, "min_p": 0.01} if filtered else {}
            step = make_step([drawn(mode, 3, 0, **parameters), drawn(mode, 2, 1)], vocabulary=vocabulary)
            call = "greedy" if mode is Mode.GREEDY else "sampled"
            usual = verdicts_of(step, "triton", call)
            whole = step.logits.clone()
            poisons = ((float("nan"), slice(vocabulary)), (float("-inf"), slice(vocabulary)))
            poisons = (*poisons, (float("nan"), vocabulary // 3), (float("inf"), vocabulary // 3))
            for turn, (row, (value, place)) in enumerate(itertools.product((0, 1), poisons)):
                # Rows and values in turn, as filters above.
                if IN_TURN and (turn + mode + filtered + (vocabulary > 50)) % 3:
                    continue
                step.logits.copy_(whole)
                step.logits[step.asked[0].first_row + row, place] = value
                expected, found = verdicts_of(step, "torch", call), verdicts_of(step, "triton", call)
                marked = expected[0][1] >= NOT_FINITE
                same = expected[0][0] == found[0][0] and marked == (found[0][1] >= NOT_FINITE)
                tokens = all(0 <= token & TOKEN_BITS < vocabulary for _, token, _ in found)
                if not same or not tokens or found[1:] != usual[1:] or (row == 0 and not marked):
                    wrong.append(f"{mode.name} {vocabulary} {row} {value} {place} {found} {expected}")
    signal.alarm(0)
    return wrong


def main() -> None:
    nothing = rows_of_nothing()
    wrong, accepted, lossy, drawn_walks = {}, 0, 0, 0
    for name, build, call in steps():
        step = build()
        expected, actual = verdicts_of(step, "torch", call), verdicts_of(step, "triton", call)
        accepted += sum(len(rows) for rows, _, _ in expected)
        lossy += sum(sum(rows) for _, _, rows in expected)
        drawn_walks += len(expected)
        if expected != actual:
            wrong[name] = [repr(pair) for pair in zip(expected, actual, strict=True) if pair[0] != pair[1]]
    moves = [seed for seed in range(3 if IN_TURN else 6) if moves_differ(seed)]
    found = {
        "wrong": wrong,
        "wrong_moves": moves,
        "rows_of_nothing": nothing,
        "accepted": accepted,
        "lossy": lossy,
        "walks": drawn_walks,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
