"""The token tree: candidate continuations in topological order, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from outrider.errors import InvalidField

# A 64-bit word of ancestor mask covers 64 rows; kernels take at most four words.
MAX_ROWS = 256
MAX_DISTRIBUTION_SUPPORT = 64
MAX_DISTRIBUTION_WEIGHT = 65535


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The distribution that the children of a node were drawn from: integer weights on a truncated support.
    `token_ids[i]` has probability `weights[i] / sum(weights)`, exactly, on both sides of the wire."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]

    def check(self, vocabulary_size: int, field_path: str) -> None:
        """Raise `InvalidField` unless ids are distinct and in range and weights are in 1..65535."""
        if not self.token_ids or len(self.token_ids) > MAX_DISTRIBUTION_SUPPORT:
            raise InvalidField(f"{field_path}.token_ids", f"needs 1 to {MAX_DISTRIBUTION_SUPPORT} entries")
        if len(self.weights) != len(self.token_ids):
            raise InvalidField(f"{field_path}.weights", f"needs {len(self.token_ids)} entries, has {len(self.weights)}")
        if len(set(self.token_ids)) != len(self.token_ids):
            raise InvalidField(f"{field_path}.token_ids", "holds a token twice")
        for i, token in enumerate(self.token_ids):
            if not 0 <= token < vocabulary_size:
                raise InvalidField(f"{field_path}.token_ids[{i}]", f"is not below {vocabulary_size}")
        for i, weight in enumerate(self.weights):
            if not 1 <= weight <= MAX_DISTRIBUTION_WEIGHT:
                raise InvalidField(f"{field_path}.weights[{i}]", f"is not in 1..{MAX_DISTRIBUTION_WEIGHT}")


@dataclass(frozen=True)
class TokenTree:
    """Candidate continuations of a sequence.

    Row 0 is the root (the last committed token). `parents[i] < i`; siblings carry different tokens;
    `scores[i]` is the drafter's probability that row i is accepted given that its parent is.
    Rows are in draw order: of two siblings, the lower row was drawn first.

    The constructor does not check; every tree from outside is made by `TokenTree.checked`.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    # By row of the parent; used only by VerificationMode.REJECTION.
    distributions: dict[int, DraftDistribution] = field(default_factory=dict)

    @classmethod
    def root_only(cls, token_id: int) -> TokenTree:
        """The tree of plain decoding: one row, no draft."""
        return cls((token_id,), (0,), (1.0,))

    @classmethod
    def checked(
        cls,
        token_ids: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float] = (),
        distributions: dict[int, DraftDistribution] | None = None,
        *,
        vocabulary_size: int,
        max_rows: int = MAX_ROWS,
        field_path: str = "tree",
    ) -> TokenTree:
        """Build a tree from untrusted parts. Raises `InvalidField` with the path of the first wrong part. O(rows)."""
        rows = len(token_ids)
        if not 1 <= rows <= max_rows:
            raise InvalidField(f"{field_path}.token_ids", f"needs 1 to {max_rows} rows, has {rows}")
        if len(parents) != rows:
            raise InvalidField(f"{field_path}.parents", f"needs {rows} entries, has {len(parents)}")
        if len(scores) not in (0, rows):
            raise InvalidField(f"{field_path}.scores", f"needs none or {rows} entries, has {len(scores)}")
        siblings: set[tuple[int, int]] = set()
        for i, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            if not 0 <= token < vocabulary_size:
                raise InvalidField(f"{field_path}.token_ids[{i}]", f"is not below {vocabulary_size}")
            if not (0 <= parent < i or i == parent == 0):
                raise InvalidField(f"{field_path}.parents[{i}]", f"must lie before row {i}")
            if (parent, token) in siblings:
                raise InvalidField(f"{field_path}.token_ids[{i}]", f"repeats a child of row {parent}")
            if i:
                # Row 0 is no child, so a child of the root may have the root's own token.
                siblings.add((parent, token))
        for i, score in enumerate(scores):
            # Written so that NaN fails.
            if not 0.0 <= score <= 1.0:
                raise InvalidField(f"{field_path}.scores[{i}]", "is not in [0, 1]")
        distributions = dict(distributions or {})
        for row, distribution in distributions.items():
            if not 0 <= row < rows:
                raise InvalidField(f"{field_path}.distributions", f"names row {row} of {rows}")
            distribution.check(vocabulary_size, f"{field_path}.distributions[{row}]")
        for i in range(1, rows):
            parent_distribution = distributions.get(parents[i])
            if parent_distribution is not None and token_ids[i] not in parent_distribution.token_ids:
                raise InvalidField(f"{field_path}.token_ids[{i}]", "is outside its parent's distribution")
        return cls(tuple(token_ids), tuple(parents), tuple(scores) or (1.0,) * rows, distributions)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def drafted(self) -> int:
        """Rows below the root."""
        return len(self.token_ids) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each row from the root."""
        depths = [0] * len(self)
        for i in range(1, len(self)):
            depths[i] = depths[self.parents[i]] + 1
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Child rows of each row, in draw order."""
        children: list[list[int]] = [[] for _ in self.token_ids]
        for i in range(1, len(self)):
            children[self.parents[i]].append(i)
        return tuple(map(tuple, children))

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row's parent is the row before it, so that causal attention fits the tree."""
        return all(self.parents[i] == i - 1 for i in range(1, len(self)))


class VerifiedTree(NamedTuple):
    """What one step verified, for display: row 0 is the root, the last token before it, and `parents[i]` the row of row
    i's parent. `accepted_rows` became output, from the root's child down. A plain step has the root alone."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted_rows: tuple[int, ...]
