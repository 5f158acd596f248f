"""The layout of a node table, and what both backends compute with it.

A table, int32 [TABLE]: base, count, then five arrays of `NODES`: tokens, parents, ends, depths, costs. The tree was
made when the sequence had `base` tokens, 1 at least, and its root, place 0, is the last of these; `count` places are
used, and 0 is no tree. Nodes are in depth-first order: parents[i] < i, and below node i are i + 1 up to ends[i] - 1.
Siblings' tokens differ. Depths count from the root. A node's cost is -log2(probability of its path from the root) *
`COST_OF_HALVING`, an integer that rises by 1 at least along every edge; the root costs 0.

Where the table does not hold the sequence's last token, but the one before it, its tree is realigned: of the children
of that one's node, C is the likeliest (of the smallest cost, then place). What is below C hangs below the root, as if
the last token stood in C's place, for `SUBSTITUTION_COST` more than it costs below C.

Where the table does not hold the last token, or holds nothing below it, and is `MAX_PATH` tokens old at most, it also
reuses: what is below the likeliest other node of that token that has anything below it hangs below the root, for
`REUSE_COST` more than it costs below that node, and in no other way.

What is realigned may have the tokens of what is reused, and the chain, which is not merged with them, those of either.
Walks that match a target's own choices tolerate that: they go on below the first, thus likelier row of that token, and
the output is the same.

A table that holds nothing below the last token, or not that token, or no tree, may have a tree of recycled tokens
beside it, rooted at the last token (`recycling`): the chain is merged with it, realigned and reused nodes are not.

Rows of a pass are the nodes with the smallest keys: cost * `KEYS_PER_COST` + the node's number, its place in the
table, `recycling.FIRST` + its place in the recycled tree, or `NODES` + its place in the chain that was looked up. A
node's key is above its parent's, so what is chosen is a tree, and no two nodes of a sequence have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

# Places of a table, its root included, and tokens that are looked up at most: together 1,023 candidates. A draft one
# pass behind does not know which of many outcomes will be verified next. By simulation over recorded answers, with 23
# rows a pass, 1,007 nodes make 7 % more tokens than 239, and 479 make 6 % more
# (`benchmarks/results/2026-11-25-cpu-table-sizes.md`).
NODES = 1008
LOOKUP = 15
# Rows that one sequence gets beside its root at most, and how deep below the root the deepest may stand.
KEPT = 63
MAX_PATH = 47
# What a halving of the chance costs. Costs are integers, so that every device ranks them alike.
COST_OF_HALVING = 4096
# A path that costs this much or more is never chosen.
MOST_COST = 1 << 16
# The highest probability of a node: none is certain, whatever its score.
MOST_CHANCE = 0.98
KEYS_PER_COST = 1024
# Above the key of whatever may be chosen.
NO_KEY = MOST_COST * KEYS_PER_COST
# What nodes cost beyond their own costs where the last token is taken to stand in the place of the likeliest, or
# anywhere else: of the chances that served best on recorded answers, INSTEAD and ELSEWHERE of
# `benchmarks/running_ahead/walk.py`.
SUBSTITUTION_COST = REUSE_COST = round(-math.log2(0.3) * COST_OF_HALVING)
# Integers of a table, and where in it the arrays begin.
TABLE = 2 + 5 * NODES
TOKENS, PARENTS, ENDS, DEPTHS, COSTS = (2 + NODES * array for array in range(5))
# Counts of a sequence's best candidates whose expected tokens are reported.
PROSPECTS = (1, 3, 7, 15, 31, 63)
# The report of a pass: figures, then tokens, then accepted rows.
REPORT_TOKENS = 15
REPORT_ROWS = REPORT_TOKENS + MAX_PATH + 1
REPORT = REPORT_ROWS + MAX_PATH
# Tokens of a run that is looked up at most, and how far back it is looked for.
LONGEST = 8
WINDOW = 8192
# Of tokens that are looked up, by the length of the run before them, from 0 on: how often the first is right, and each
# one behind a right one. Smoothed from 27 answers of SmolLM2-135M-Instruct to prompts of seven tasks.
RIGHT = (
    (0.0, 0.0), (0.2, 0.6), (0.45, 0.65), (0.6, 0.7), (0.7, 0.72), (0.72, 0.75), (0.75, 0.77), (0.78, 0.8), (0.92, 0.94)
)  # fmt: skip
FIRST_COST = tuple(round(-math.log2(first) * COST_OF_HALVING) if first else 0 for first, _ in RIGHT)
NEXT_COST = tuple(round(-math.log2(following) * COST_OF_HALVING) if following else 1 for _, following in RIGHT)
# A chance of one, and how many costs have the same chance, where chances are added up.
SURE = 1 << 20
COSTS_PER_CHANCE = 64
# Of one token: the unit of expected tokens in a report.
EXPECTED_UNIT = 1024


class ReportField(IntEnum):
    """Where in the report of a pass its figures stand; see `NodeTable.reports`. Zeros follow the `PROSPECTS`.

    Expected tokens are chances of paths, in 1/`EXPECTED_UNIT`, added up and rounded down as a whole.
    """

    ACCEPTED = 0  # rows
    DRAFTED = 1  # rows
    # Those that are nodes of the table, also where lookup drafts the same, and of a realigned tree.
    DRAFTED_FROM_TABLE = 2
    EXPECTED = 3  # tokens that drafted rows are expected to bring
    FIRST_ROW = 4
    ACCEPTED_FROM_TABLE = 5  # rows that are nodes of the table
    EXPECTED_FROM_TABLE = 6  # tokens that rows of the table are expected to bring
    # And what the best `PROSPECTS` candidates of the sequence would, whether or not there was room for them.
    FIRST_PROSPECT = 7


class SuffixMatch(NamedTuple):
    """Tokens that end a text and occur in it before: how many, and the place after that occurrence. 0 and the last
    place where there are none."""

    length: int
    end: int


def longest_run(text: Sequence[int]) -> SuffixMatch:
    """The longest run, up to `LONGEST`, that ends the text and occurs in its last `WINDOW` tokens before; of equally
    long ones the last. What followed it is drafted, and repeated from there on at the end of the text, so that a loop
    stays a loop."""
    end = len(text) - 1
    best = SuffixMatch(0, end)
    for j in range(max(0, end - WINDOW), end):
        run = 0
        while run < LONGEST and run <= j and text[j - run] == text[end - run]:
            run += 1
        if run and run >= best.length:
            best = SuffixMatch(run, j + 1)
    return best


def link_of(parent_row: int, depth: int, of_table: bool) -> int:
    """Where a kept candidate hangs, in one integer: its parent's row, its depth below the root, and whether it is a
    node of the table."""
    return int(of_table) << 16 | depth << 8 | parent_row
