"""Choosing the rows of a pass on one GPU: microseconds between two passes, by sequences and drafted nodes of each.

    python -m benchmarks.kernels.node_table [--json FILE]

Every case has random trees below the last token of random texts, checks the kernels' rows against PyTorch's, then
replays a CUDA graph of `NodeTable.choose_rows`, which ranks what may follow and lays out the pass. Each draft's tree
counts as a whole: after a pass that accepted nothing, all of it may follow. Three small copies are timed too.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from target_service.execution.node_tables import build_table
from tree_kernels.node_table import Mailboxes, NodeTable, StepIntegers
from tree_kernels.node_table.layout import NODES
from tree_kernels.verification import DeviceVerifier, RowsToVerify

_CALLS = 20
_PAGE, _VOCABULARY = 16, 49152


@dataclass(frozen=True)
class NodeTableCase:
    """`sequences` of `text` tokens, each with a tree of so many `nodes`, in a pass of `rows`."""

    sequences: int
    nodes: int
    rows: int
    text: int = 1024


CASES = tuple(
    NodeTableCase(sequences, nodes, rows)
    for sequences, rows in ((1, 24), (8, 64), (32, 128), (128, 256))
    for nodes in (0, 59, 239, 479, NODES - 1)
)


class RootStep:
    """A step of roots at fixed addresses, its text, and the tables of its sequences."""

    def __init__(self, case: NodeTableCase, device: torch.device, backend: Literal["triton", "torch"]) -> None:
        generator, rng = torch.Generator().manual_seed(case.nodes), random.Random(case.nodes)
        count, pages = case.sequences, (case.text + 64) // _PAGE + 1

        def ints(values: torch.Tensor) -> torch.Tensor:
            return values.int().to(device)

        slots = count * pages * _PAGE
        tokens = torch.randint(_VOCABULARY, (slots,), generator=generator)
        roots = torch.randint(_VOCABULARY, (count,), generator=generator)
        free = case.rows - count
        packed = DeviceVerifier(device, _VOCABULARY, count, case.rows, backend).pack(
            [RowsToVerify(0, min(64, case.rows)) for _ in range(count)]
        )
        self.step = StepIntegers(
            token_ids=ints(torch.nn.functional.pad(roots, (0, free))),
            positions=ints(torch.zeros(case.rows)),
            slots=ints(torch.full((case.rows,), -1)),
            parameters=torch.from_numpy(packed).to(device),
            query_starts=ints(torch.arange(count + 1)),
            prefix_lengths=ints(torch.full((count,), case.text)),
            page_starts=ints(torch.arange(count) * pages),
            page_table=ints(torch.arange(count * pages)),
            owners=ints(torch.full((case.rows,), -1)),
            parents=ints(torch.zeros(case.rows)),
            causal=ints(torch.zeros(count)),
        )
        self.table = NodeTable(ints(tokens), _PAGE, 1 << 20, max_sequences=count, max_passes=1, backend=backend)
        mail = Mailboxes(count, device)
        for b in range(count):
            _draw(rng, int(roots[b]), case, mail.next_table(b))
            mail.put(b)
        mail.send()
        self.table.assign_slots(ints(torch.arange(count)))
        self.table.copy_tables(mail)
        self._pending = ints(torch.zeros(1))
        self._starts, self._roots = self.step.query_starts.clone(), self.step.token_ids[:count].clone()

    def begin(self) -> None:
        """Choose the rows. Repeatable: what the last call laid out begins with the same roots."""
        self.step.query_starts.copy_(self._starts)
        self.step.token_ids[: len(self._roots)].copy_(self._roots)
        self.table.choose_rows(self.step, self._pending)


def _draw(rng: random.Random, root: int, case: NodeTableCase, table: Any) -> None:
    """Write a random tree below `root`, likelier near it, as the target does."""
    nodes, scores = np.zeros((4, 1 + case.nodes), np.int32), np.ones(1 + case.nodes)
    nodes[0, 0] = root
    for i in range(1, 1 + case.nodes):
        parent = rng.randrange(max(0, i // 8 - 8), i)
        nodes[0, i], nodes[1, i], scores[i] = rng.randrange(_VOCABULARY), parent, rng.random()
        nodes[3, i], nodes[2, parent] = nodes[2, parent], i
    build_table(nodes, scores, 1 + case.nodes if case.nodes else 0, 1.0, case.text + 1, table)


def run_case(case: NodeTableCase) -> dict[str, Any]:
    """Check and time a case."""
    chosen = []
    for made in (RootStep(case, torch.device("cpu"), "torch"), RootStep(case, torch.device("cuda"), "triton")):
        made.begin()
        chosen.append([getattr(made.step, name).tolist() for name in ("token_ids", "parents", "query_starts", "slots")])
    us, spread = captured_us([made.begin] * _CALLS)
    return {**asdict(case), "correct": chosen[0] == chosen[1], "us": us, "spread_us": spread}


def main() -> int:
    options = parser_of(__doc__).parse_args()
    results = []
    for case in CASES:
        found = run_case(case)
        results.append(found)
        wrong = "" if found["correct"] else " | DIFFERS from the reference"
        show(
            f"{case.sequences:3d} sequences, {case.nodes:4d} nodes of each, {case.rows:3d} rows | {found['us']:6.1f} "
            f"+-{found['spread_us']:.1f} us{wrong}"
        )
    write_json(options.json, {"machine": describe(), "cases": results})
    return int(not all(found["correct"] for found in results))


if __name__ == "__main__":
    sys.exit(main())
