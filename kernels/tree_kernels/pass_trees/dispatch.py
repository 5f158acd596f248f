"""What is read of a pass before a network drafts behind it, and how its trees come into the node tables.

Nothing here waits for the device and no shape depends on data, so that all can be captured in a CUDA graph.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from tree_kernels.growth import GumbelMax
from tree_kernels.node_table.layout import KEPT
from tree_kernels.pass_trees.types import Tails, VerifiedRows

# Nodes of a tree beside its root: as many as a pass may verify of a sequence.
NODES = KEPT


def make_tails(sequences: int, levels: int, width: int, rows: int, pages: int, device: torch.device) -> Tails:
    """Room for passes of so many sequences and rows, each with so many `pages`; `levels` is L, `width` W."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    of_sequences = {"dtype": torch.float64}, {"dtype": torch.float64}, {"dtype": torch.int64}, {"dtype": torch.int64}
    return Tails(
        next_tokens=zeros(rows),
        last_rows=zeros(sequences, dtype=torch.int64),
        bases=zeros(sequences),
        roots=zeros(sequences),
        prefix_lengths=zeros(sequences),
        page_table=zeros(sequences, pages),
        slots=zeros(levels - 1, sequences, width),
        positions=zeros(levels - 1, sequences, width),
        limits=zeros(2, sequences),
        temperatures=zeros(sequences, dtype=torch.float32),
        gumbel_max=GumbelMax(zeros(sequences), zeros(sequences), *(zeros(sequences, **one) for one in of_sequences)),
    )


def read_outcome(
    rows: VerifiedRows,
    tails: Tails,
    page_size: int,
    last_position: int,
    backend: Literal["triton", "torch"] | None = None,
) -> None:
    """Write what a drafting network reads behind a verified pass, before its accepted rows are moved.

    A sequence keeps its known rows and the accepted ones below them. Behind its keys there is room in the pages that
    its record names (`room`, in keys); levels beyond that are not expanded. Sequences whose record has no `drafts`, and
    those that read on, get no tree.

    Args:
        rows: of the pass; where a sequence's record has no rows to verify, `following` is its next token.
        tails: written, for all of its B sequences; rows that are not kept keep their old `next_tokens`.
        page_size: tokens of a page.
        last_position: the network's largest position.
        backend: None is "triton" on a GPU and "torch" elsewhere.
    """
    _backend_for(rows.token_ids, backend).read_outcome(rows, tails, page_size, last_position)


def write_tables(
    kept: Tensor,
    tails: Tails,
    table_slots: Tensor,
    trust: Tensor,
    tables: Tensor,
    backend: Literal["triton", "torch"] | None = None,
) -> None:
    """Write grown trees to the node tables of their sequences.

    Args:
        kept: [B, 1 + 3 * N] int32 of `growth.make_kept`, N at most `NODES` + 1.
        tails: of the pass; sequences whose `bases` is 0 are left out.
        table_slots: [at least B] int32, the table of each sequence; -1 for none.
        trust: [1] float32, by which scores are multiplied.
        tables: [.., TABLE] int32 as in `node_table.layout`, written.
        backend: None is "triton" on a GPU and "torch" elsewhere.
    """
    _backend_for(kept, backend).write_tables(kept, tails, table_slots, trust, tables)


def _backend_for(tensor: Tensor, backend: Literal["triton", "torch"] | None):  # type: ignore[no-untyped-def]
    # Only here: Triton may be absent.
    name = backend or ("triton" if tensor.is_cuda else "torch")
    return import_module(f"tree_kernels.pass_trees.{name}_backend")
