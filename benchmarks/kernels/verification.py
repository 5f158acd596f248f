"""Verification on one GPU: microseconds of everything in a verify step after the logits, and of the KV move.

    python -m benchmarks.kernels.verification [--json FILE]

Every case has random inputs, checks the kernels against the loop over sequences, then replays a CUDA graph of several
calls. Times are medians over replays, divided by the calls; the spread is the distance between the quartiles. Logits
are bf16 and the same in all calls; up to 64 rows they fit into L2, as after the model's last product. `torch.argmax`
beside them is what a step of plain greedy decoding would call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from tree_kernels.verification import DeviceVerifier, Mode, RowsToVerify, Verdicts, move_accepted

DEVICE = torch.device("cuda")
_CALLS = 20
DISTRIBUTIONS = {
    "greedy": RowsToVerify(0, 0),
    "coupled": RowsToVerify(0, 0, Mode.COUPLED, 7, 1000),
    "coupled, top_k 20, top_p 0.95": RowsToVerify(0, 0, Mode.COUPLED, 7, 1000, top_k=20, top_p=0.95),
    "coupled, top_p 0.9": RowsToVerify(0, 0, Mode.COUPLED, 7, 1000, top_p=0.9),
    "rejection": RowsToVerify(0, 0, Mode.REJECTION, 7, 1000),
    "rejection, top_p 0.9": RowsToVerify(0, 0, Mode.REJECTION, 7, 1000, top_p=0.9),
}


@dataclass(frozen=True)
class VerificationCase:
    """`sequences` trees of `rows` rows each. Logits are `text`, by Zipf's law (1.5) as words are, or `flat`: normal."""

    distribution: str
    rows: int
    vocabulary: int
    sequences: int = 1
    logits: str = "text"


def cases() -> list[VerificationCase]:
    found = [
        VerificationCase(distribution, rows, v)
        for distribution in DISTRIBUTIONS
        for v in (49152, 128256)
        for rows in (1, 16, 64)
    ]
    found += [VerificationCase(distribution, 8, 128256, sequences=32) for distribution in DISTRIBUTIONS]
    return [
        *found,
        VerificationCase("coupled, top_p 0.9", 1, 128256, logits="flat"),
        VerificationCase("coupled, top_p 0.9", 64, 128256, 1, "flat"),
    ]


def draw(case: VerificationCase) -> tuple[Tensor, Tensor, Tensor, list[RowsToVerify]]:
    """Logits [R, V], token ids and parents [R] of random trees of likely tokens, and the rows to verify."""
    total = case.rows * case.sequences
    if case.logits == "flat":
        logits = torch.randn(total, case.vocabulary, device=DEVICE)
    else:
        order = torch.rand(total, case.vocabulary, device=DEVICE).argsort(-1)
        logits = -1.5 * torch.log(order.float() + 2.0)
    logits = logits.bfloat16()
    parents = [int(torch.randint(row, ())) if row else 0 for _ in range(case.sequences) for row in range(case.rows)]
    best = logits.topk(min(64, case.rows)).indices.tolist()
    tokens: list[int] = []
    for row, parent in enumerate(parents):
        root = row - row % case.rows
        own = parents[root:row].count(parent)
        tokens.append(best[root + parent][own % len(best[0])])
    integers = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (tokens, parents)]
    to_verify = [
        DISTRIBUTIONS[case.distribution]._replace(first_row=b * case.rows, rows=case.rows)
        for b in range(case.sequences)
    ]
    return logits, integers[0], integers[1], to_verify


def time_us(call: Callable[[], object], replays: int = 21) -> tuple[float, float]:
    """Median and quartile distance of one call in a captured graph, in microseconds."""
    return captured_us([call] * _CALLS, replays)


def accepted(verdicts: Verdicts, to_verify: list[RowsToVerify]) -> list[tuple[list[int], int]]:
    """Accepted rows and next token of each sequence."""
    rows, counts = verdicts.accepted_rows.tolist(), verdicts.accepted_counts.tolist()
    return [
        (rows[one.first_row : one.first_row + count], token)
        for one, count, token in zip(to_verify, counts, verdicts.next_tokens.tolist(), strict=True)
    ]


def run_case(case: VerificationCase) -> dict[str, Any]:
    logits, token_ids, parents, to_verify = draw(case)

    def verifier(backend: Any) -> Callable[[], Verdicts]:
        made = DeviceVerifier(DEVICE, case.vocabulary, case.sequences, len(logits), backend)
        parameters = torch.from_numpy(made.pack(to_verify)).to(DEVICE)
        if case.distribution == "greedy":
            return lambda: made.greedy(logits, token_ids, parents, parameters)
        filtered = to_verify[0].filtered
        return lambda: made.sampled(logits, token_ids, parents, parameters, filtered=filtered)

    ours = verifier("triton")
    expected, actual = accepted(verifier("torch")(), to_verify), accepted(ours(), to_verify)
    us, spread = time_us(ours)
    found = {**asdict(case), "correct": expected == actual, "us": us, "spread_us": spread}
    if case.distribution == "greedy":
        found["argmax_us"] = time_us(lambda: logits.argmax(-1))[0]
    return found


def run_move(moving: int) -> dict[str, Any]:
    """32 layers of 8 heads of 128 in bf16; each of 8 sequences accepts `moving` rows, none of them in place."""
    rows, sequences = 16, 8
    made = DeviceVerifier(DEVICE, 1000, sequences, rows * sequences)
    to_verify = [RowsToVerify(b * rows, rows) for b in range(sequences)]
    parameters = torch.from_numpy(made.pack(to_verify)).to(DEVICE)
    host = torch.zeros(2 * sequences + rows * sequences, dtype=torch.int32)
    host[:sequences] = moving
    for b in range(sequences):
        host[2 * sequences + b * rows :][:moving] = torch.arange(2, 2 + moving)
    verdicts = Verdicts.over(host.to(DEVICE), sequences)
    keys, values = (torch.randn(32, 64, 16, 8, 128, device=DEVICE).bfloat16() for _ in range(2))
    slots = torch.randperm(64 * 16, device=DEVICE)[: rows * sequences].int()
    us, spread = time_us(lambda: move_accepted(keys, values, slots, parameters, verdicts))
    return {"operation": "kv move", "sequences": sequences, "moving": moving, "us": us, "spread_us": spread}


def line(found: dict[str, Any]) -> str:
    if "operation" in found:
        what = f"{found['moving']} rows of each of {found['sequences']} sequences, 32 layers"
        return f"kv move, {what} | {found['us']:6.1f} +-{found['spread_us']:.1f} us"
    beside = f" | torch.argmax alone {found['argmax_us']:.1f}" if "argmax_us" in found else ""
    wrong = "" if found["correct"] else " | DIFFERS from the reference"
    return (
        f"{found['distribution']:30s} {found['sequences']:3d} x {found['rows']:3d} rows, V {found['vocabulary']:6d}, "
        f"{found['logits']} | {found['us']:6.1f} +-{found['spread_us']:.1f} us{beside}{wrong}"
    )


def main() -> int:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for case in cases():
        results.append(run_case(case))
        show(line(results[-1]))
    for moving in (0, 1, 4):
        results.append(run_move(moving))
        show(line(results[-1]))
    write_json(options.json, {"machine": describe(), "cases": results})
    return int(not all(found.get("correct", True) for found in results))


if __name__ == "__main__":
    sys.exit(main())
