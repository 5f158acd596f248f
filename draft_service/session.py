"""One target's sequences on one `Propose` stream: which are open, at which step, and which await growth.

No gRPC and no protobuf here: the server translates, and an in-process draft calls the same methods
(`draft_service.in_process`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from draft_service.drafters.base import Drafter, DraftSequence, FeatureDrafter, most_sequences_of, tree_limits
from draft_service.drafters.grown import ArrayDrafter, GrownTrees, Pending
from draft_service.drafters.packing import signed
from draft_service.faults import DrafterFailed, FaultLog
from outrider.errors import (
    Draining,
    InvalidField,
    PermissionDenied,
    PositionOutOfRange,
    QuotaExceeded,
    SequenceExists,
    StepReplayed,
    StepSkipped,
    UnknownSequence,
    WrongVocabulary,
)
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import (
    MAX_OUTSTANDING_CREDIT,
    ROOT_ID,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
    TreeLimits,
    Vectors,
)

# A number for each stream of this process.
_STREAMS = itertools.count(1)


class SequenceAdmission:
    """Permissions and limits for opening sequences, over all streams of the service."""

    def __init__(self, max_sequences: int, vocabulary_size: int = 0, trusted_tenant: str | None = None) -> None:
        """A `vocabulary_size` of 0 accepts any. Without a `trusted_tenant`, callers may act for every tenant."""
        self._max_sequences = max_sequences
        self._vocabulary_size = vocabulary_size
        self._trusted_tenant = trusted_tenant
        self.sequences = 0
        self.draining = False

    def check_tenant(self, caller: str, tenant: str) -> None:
        """Raise `PermissionDenied` unless `caller` may act for `tenant`."""
        if self._trusted_tenant is not None and caller not in (tenant, self._trusted_tenant):
            raise PermissionDenied("the caller may not act for this tenant")

    def trusts(self, caller: str) -> bool:
        """Whether `caller` is the tenant that may act for all others."""
        return self._trusted_tenant is not None and caller == self._trusted_tenant

    def admit(self, caller: str, sequence: OpenSequence) -> None:
        """Count a new sequence, or raise the reason why it may not be opened."""
        if self.draining:
            raise Draining("the draft service is about to stop")
        self.check_tenant(caller, sequence.tenant)
        if self._vocabulary_size not in (0, sequence.vocabulary_size):
            raise WrongVocabulary(
                "draft and target have vocabularies of different sizes",
                draft=self._vocabulary_size,
                target=sequence.vocabulary_size,
            )
        if self.sequences >= self._max_sequences:
            raise QuotaExceeded("too many open sequences", limit=self._max_sequences)
        self.sequences += 1

    def release(self) -> None:
        self.sequences -= 1


@dataclass(slots=True)
class Tracked:
    """One open sequence: the drafter's view of it, and where it stands on the wire. Node ids are uint32 and never used
    twice: at 2,046 a step they suffice for any context."""

    draft: DraftSequence
    step: int
    next_node_id: int = 1

    @property
    def head(self) -> tuple[int, int, int, int]:
        """The head of its tree, see `drafters.packing.pack`."""
        draft = self.draft
        return signed(draft.sequence_id), signed(self.step), self.next_node_id, draft.vocabulary_size

    def growth(self, tree: TokenTree) -> SequenceGrowth:
        """The whole tree under fresh ids: it replaces what was sent before."""
        tree = _below(tree, self.draft.vocabulary_size)
        first = self.next_node_id
        self.next_node_id += tree.drafted
        shift = first - 1
        return SequenceGrowth(
            sequence_id=self.draft.sequence_id,
            base_step=self.step,
            first_node_id=first,
            parent_ids=tuple([parent + shift if parent else ROOT_ID for parent in tree.parents[1:]]),
            token_ids=tree.token_ids[1:],
            scores=tree.scores[1:],
            distributions={row + shift if row else ROOT_ID: drawn for row, drawn in tree.distributions.items()},
            replaces=True,
        )


class OpenedSequence(NamedTuple):
    """The answer to a target that has opened a sequence."""

    limits: TreeLimits
    # Tokens at its beginning whose features are not needed.
    features_from: int


class PackedGrowth(NamedTuple):
    """Encoded growth of some sequences: their ids, nodes of each, and the bytes of a `GrowSequences`."""

    sequence_ids: list[int]
    nodes: list[int]
    message: bytes


class ProposeSession:
    """The state of one stream. An error that `open` or `advance` raises is about one sequence, which the caller must
    close, whatever the error. `DrafterFailed`, from `absorb` and from proposing growth, names the sequences.

    Every open and every advance is answered by one growth. Growth is made when it is proposed, so a target that grants
    credit slowly gets one growth per sequence, for the newest step, and not a queue of stale ones.
    """

    def __init__(
        self, drafter: Drafter, admission: SequenceAdmission, caller: str, faults: FaultLog | None = None
    ) -> None:
        """`faults` has the bugs that are reported to no caller."""
        self._drafter = drafter
        # Tokens of the longest sequence that may be opened.
        self.max_context = drafter.max_context
        self._most = most_sequences_of(drafter)
        self._faults = faults or FaultLog(drafter.name)
        self._arrays = drafter if isinstance(drafter, ArrayDrafter) else None
        # Sequences whose whole trees are still being grown.
        self._rest: tuple[list[Tracked], Pending] | None = None
        self._admission = admission
        self._caller = caller
        self._stream = next(_STREAMS)
        self._open: dict[int, Tracked] = {}
        # Sequences that await growth, and since when (monotonic nanoseconds); oldest first.
        self._due: dict[int, int] = {}
        self.credit = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def awaits_growth(self) -> bool:
        return bool(self._due)

    @property
    def awaiting_since_ns(self) -> int:
        """Since when the oldest growth is due; now, if none is."""
        return next(iter(self._due.values()), None) or time.monotonic_ns()

    def vocabulary_of(self, sequence_id: int) -> int:
        """The vocabulary an open sequence declared. Raises `UnknownSequence`."""
        return self._find(sequence_id).draft.vocabulary_size

    def open(self, sequence: OpenSequence) -> OpenedSequence:
        """Start a sequence. Raises `SequenceExists`, `PositionOutOfRange`,
        `UnknownCorpus`, and what `SequenceAdmission.admit` raises."""
        if sequence.sequence_id in self._open:
            raise SequenceExists("the sequence was open; it is closed now")
        self._check_length(len(sequence.token_ids))
        limits = tree_limits(self._drafter.limits, sequence.limits)
        draft = DraftSequence(
            sequence_id=sequence.sequence_id,
            tenant=sequence.tenant,
            corpus=sequence.corpus,
            token_ids=list(sequence.token_ids),
            prompt_length=sequence.prompt_length,
            vocabulary_size=sequence.vocabulary_size,
            seed=sequence.seed,
            mode=sequence.mode,
            sampling=sequence.sampling,
            limits=limits,
            model_version=sequence.model_version,
            stream=self._stream,
        )
        self._admission.admit(self._caller, sequence)
        try:
            self._drafter.open(draft)
        except BaseException:
            self._admission.release()
            raise
        self._open[sequence.sequence_id] = Tracked(draft, sequence.step)
        self._due[sequence.sequence_id] = time.monotonic_ns()
        return OpenedSequence(limits, 0 if draft.features is None else draft.features.end)

    def advance(self, advance: SequenceAdvance) -> None:
        """Append what one step committed. A repetition of the last step is ignored. Raises `UnknownSequence`,
        `StepReplayed`, `StepSkipped`, `PositionOutOfRange`, and `InvalidField` for features that do not fit."""
        tracked = self._find(advance.sequence_id)
        if advance.step == tracked.step:
            return
        if advance.step < tracked.step:
            raise StepReplayed("the step lies behind", step=advance.step, expected=tracked.step + 1)
        if advance.step > tracked.step + 1:
            raise StepSkipped("a step is missing", step=advance.step, expected=tracked.step + 1)
        self._check_length(len(tracked.draft.token_ids) + len(advance.token_ids))
        tracked.step = advance.step
        tracked.draft.token_ids.extend(advance.token_ids)
        if advance.features is not None:
            position = len(tracked.draft.token_ids) - 1 - advance.features.rows
            _append(tracked.draft, advance.features, position)
        self._drafter.advance(tracked.draft, advance.token_ids)
        self._due.setdefault(advance.sequence_id, time.monotonic_ns())

    def add_features(self, features: SequenceFeatures) -> None:
        """Add features of known tokens. Raises `UnknownSequence`, and `InvalidField` for features that do not fit. When
        they complete what a tree needs, a growth is due, since no advance may follow."""
        draft = self._find(features.sequence_id).draft
        _append(draft, features.vectors, features.position)
        if draft.features is not None and draft.features.end == len(draft.token_ids) - 1:
            self._due.setdefault(features.sequence_id, time.monotonic_ns())

    def absorb(self, sequence_ids: Iterable[int]) -> None:
        """Let the drafter read the waiting features of these sequences; ids that are not open are ignored."""
        drafts = [self._open[each].draft for each in sequence_ids if each in self._open and each not in self._due]
        if drafts and isinstance(self._drafter, FeatureDrafter):
            with self._failing(drafts):
                self._drafter.absorb(drafts)

    def close(self, sequence_ids: Iterable[int]) -> None:
        """End sequences; ids that are not open are ignored. An error of the drafter is only logged: the sequence is
        over anyway, and the others go on."""
        for sequence_id in sequence_ids:
            tracked = self._open.pop(sequence_id, None)
            self._due.pop(sequence_id, None)
            if tracked is None:
                continue
            self._admission.release()
            try:
                self._drafter.close(tracked.draft)
            # A bug at one sequence must not end the stream, which may carry every request of the target.
            except Exception as error:
                self._faults.add(error)

    def end(self) -> None:
        """End every sequence: the stream is over, with close frames or without."""
        self.close(list(self._open))

    def grant(self, frames: int) -> None:
        """Allow this many more growth frames. Raises `InvalidField` past the limit."""
        if self.credit + frames > MAX_OUTSTANDING_CREDIT:
            raise InvalidField("credit.frames", f"makes more than {MAX_OUTSTANDING_CREDIT} outstanding")
        self.credit += frames

    def propose_growth(self) -> list[SequenceGrowth]:
        """One frame of growth that is due, for one credit; empty if none is due or no credit is left."""
        taken = self._take()
        return self._proposed(taken) if taken else []

    def propose_packed(self) -> PackedGrowth | list[SequenceGrowth]:
        """One frame of growth that is due, for one credit, encoded if trees are arrays; empty if none is due or no
        credit is left. A drafter whose first levels are ready sooner returns them alone; a later call returns the whole
        trees, for another credit, unless other growth is due by then."""
        taken = self._take()
        if not taken:
            return self._propose_rest()
        self._rest = None
        drafts = [tracked.draft for tracked in taken]
        if self._arrays is None or any(draft.mode is VerificationMode.REJECTION for draft in drafts):
            return self._proposed(taken)
        with self._failing(drafts, credit=1):
            pending = self._arrays.start_trees(drafts)
            growth = self._packed(taken, pending.wait(pending.early))
        if pending.early:
            self._rest = taken, pending
        return growth

    def _propose_rest(self) -> PackedGrowth | list[SequenceGrowth]:
        if self._rest is None or not self.credit or self._due:
            return []
        (taken, pending), self._rest = self._rest, None
        ended = any(self._open.get(tracked.draft.sequence_id) is not tracked for tracked in taken)
        if ended or not pending.fresh():
            return []
        self.credit -= 1
        with self._failing([tracked.draft for tracked in taken], credit=1):
            return self._packed(taken, pending.fetch())

    def _proposed(self, taken: Sequence[Tracked]) -> list[SequenceGrowth]:
        drafts = [tracked.draft for tracked in taken]
        with self._failing(drafts, credit=1):
            trees = self._drafter.propose(drafts)
            _check_trees(self._drafter.name, trees, len(drafts))
            return [tracked.growth(tree) for tracked, tree in zip(taken, trees, strict=True)]

    @contextmanager
    def _failing(self, drafts: Sequence[DraftSequence], credit: int = 0) -> Iterator[None]:
        """Any exception is `DrafterFailed` for these sequences; returns the credit of the frame that does not come,
        which the target still counts."""
        try:
            yield
        except Exception as error:
            self.credit += credit
            raise DrafterFailed([draft.sequence_id for draft in drafts], error) from error

    def _packed(self, taken: Sequence[Tracked], grown: GrownTrees) -> PackedGrowth | list[SequenceGrowth]:
        packed = grown.packed([tracked.head for tracked in taken])
        if packed is None:
            return [tracked.growth(tree) for tracked, tree in zip(taken, grown.as_trees(), strict=True)]
        nodes, message = packed
        for tracked, count in zip(taken, nodes, strict=True):
            tracked.next_node_id += count
        return PackedGrowth([tracked.draft.sequence_id for tracked in taken], nodes, message)

    def _take(self) -> list[Tracked]:
        """The sequences of the next frame, for one credit."""
        if not self._due or not self.credit:
            return []
        self.credit -= 1
        taken = [self._open[sequence_id] for sequence_id in itertools.islice(self._due, self._most)]
        for tracked in taken:
            del self._due[tracked.draft.sequence_id]
        return taken

    def _find(self, sequence_id: int) -> Tracked:
        tracked = self._open.get(sequence_id)
        if tracked is None:
            raise UnknownSequence("the sequence is not open on this stream")
        return tracked

    def _check_length(self, length: int) -> None:
        if length > self.max_context:
            raise PositionOutOfRange("the sequence is longer than the drafter follows", limit=self.max_context)


def _below(tree: TokenTree, vocabulary_size: int) -> TokenTree:
    """The tree without tokens past the target's vocabulary, and without their subtrees. A drafter for any vocabulary
    may have learnt from a target with a larger one."""
    if max(tree.token_ids) < vocabulary_size:
        return tree
    rows = {0: 0}
    for row in range(1, len(tree)):
        if tree.parents[row] in rows and tree.token_ids[row] < vocabulary_size:
            rows[row] = len(rows)
    return TokenTree(
        token_ids=tuple(tree.token_ids[row] for row in rows),
        parents=tuple(rows[tree.parents[row]] for row in rows),
        scores=tuple(tree.scores[row] for row in rows),
    )


def _check_trees(drafter: str, trees: object, count: int) -> None:
    """Raise `TypeError` or `ValueError` for a result of `Drafter.propose` that is not one tree for each sequence."""
    wanted = f"{count} tree{'s' if count != 1 else ''}"
    if not isinstance(trees, list | tuple):
        raise TypeError(f"{drafter}.propose returned {type(trees).__name__}, not {wanted}")
    if len(trees) != count:
        raise ValueError(f"{drafter}.propose returned {len(trees)} trees, not {wanted}")
    for place, tree in enumerate(trees):
        if not isinstance(tree, TokenTree):
            raise TypeError(f"{drafter}.propose returned {type(tree).__name__} in place {place}, not a TokenTree")


def _append(draft: DraftSequence, vectors: Vectors, position: int) -> None:
    """Add features to a sequence's window, if they fit its tokens."""
    if draft.features is None:
        raise InvalidField("features", "were not asked for")
    # Imported here: drafters without features run without PyTorch.
    from draft_service.drafters.hidden_states import read_vectors

    known = len(draft.token_ids) - 1
    if position < 0 or position + vectors.rows > known:
        raise InvalidField("features", f"{vectors.rows} from token {position} on, and {known} tokens can have one")
    # A sequence that began behind a known prefix needs none of those; a prompt's are megabytes.
    if position + vectors.rows > draft.features.end:
        draft.features.append(read_vectors(vectors), position)
