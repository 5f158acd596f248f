"""Sends the hidden states of committed tokens to a drafter that reads them, each one once.

The states of a pass's committed rows come from `hidden_states.encoding` as bytes. The newest of every sequence are kept
here for a draft that connects late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable
from collections.abc import Sequence as SequenceOf

from outrider.errors import NotSupported
from outrider.wire.frames import MAX_FEATURE_BYTES, FeatureRequest, SequenceFeatures, Vectors
from target_service.core.sequence import Sequence
from target_service.execution.batch import StepItem
from target_service.model.head_projection import shipped_draft_head
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from target_service.speculation.hidden_states.encoding import FeatureEncoder, StepFeatures
from target_service.speculation.hidden_states.kept import KeptVectors


class Features:
    """The hidden states that a drafter reads, of every sequence. Belongs to the engine's thread.

    A token's state is computed by the pass that reads it, so the root's is missing: after a commit that leaves L
    tokens, those of 0 .. L - 2 exist. States that a preempted sequence computes again are skipped.
    """

    def __init__(self, runner: ModelRunner, keep: int) -> None:
        """Keep the newest `keep` vectors of every sequence: from the start if the runner has the draft's head, else
        once a draft that reads them has connected."""
        self._runner = runner
        self._configured_keep = self._keep = keep
        self._request: FeatureRequest | None = None
        # Whether a draft that reads them is connected.
        self._connected = False
        self._kept: defaultdict[int, KeptVectors] = defaultdict(KeptVectors)
        # By opened sequence: tokens at its beginning whose vectors the draft does not need; None until the draft has
        # answered, and until then none is sent.
        self._needed_from: dict[int, int | None] = {}
        # Sequences with new vectors of the last step, and whether it committed tokens of them.
        self._fresh: dict[int, tuple[KeptVectors, bool]] = {}
        self._encoder = FeatureEncoder(runner.device)
        self.sent_vectors = self.sent_bytes = 0
        self._reported = (0, 0)
        self._head_is_named = runner.draft_head is not None
        if runner.draft_head is not None:
            layers, projection = runner.draft_head.layers, runner.draft_head.projection
            width = projection.width if projection is not None else runner.hidden_size * len(layers)
            self._set_request(FeatureRequest(layers, width, projected=projection is not None))

    @property
    def kept_bytes(self) -> int:
        return sum(kept.nbytes for kept in list(self._kept.values()))

    @property
    def window(self) -> int | None:
        """Of a sequence's last tokens, how many vectors the connected drafter reads; 0 for all, None if it reads none,
        or there is none."""
        return self._request.window if self._request is not None and self._connected else None

    @property
    def form(self) -> Hashable:
        """What vectors that were kept earlier must have in common with those of now."""
        return _form(self._request)

    def kept_of(self, sequence_id: int) -> KeptVectors | None:
        """The vectors of a sequence that are kept; None without any."""
        return self._kept.get(sequence_id)

    def restore(self, sequence_id: int, kept: KeptVectors) -> None:
        """Begin a sequence with the vectors of its first tokens, which no pass of it computes."""
        self._kept[sequence_id] = kept

    def connect(self, request: FeatureRequest | None) -> None:
        """A draft has connected that reads these features; None if it reads none. Raises `NotSupported` if this target
        cannot provide them."""
        self._connected = False
        if request is not None:
            runner = self._runner
            if request.projected and not self._head_is_named:
                # A head that comes with Outrider, since the operator has named none.
                layers, width = runner.network.layer_count, runner.hidden_size
                runner.run_head(shipped_draft_head(request.projection_fingerprint, layers, width))
            self._check(request)
        self._set_request(request)
        self._connected = request is not None

    def disconnect(self) -> None:
        """The draft is gone. Kept vectors wait for the next one."""
        self._connected = False
        self._needed_from.clear()

    @property
    def reads_every_pass(self) -> bool:
        """Whether the states of every pass are read."""
        return self._runner.hooks is not None and self._request is not None and (self._connected or bool(self._keep))

    def after_launch(self, rows: int) -> StepFeatures | None:
        """The states of the pass just launched, of `rows` rows; None unless they are read. Does not wait."""
        hooks = self._runner.hooks
        if hooks is None or not self.reads_every_pass:
            return None
        assert self._request is not None
        head = self._runner.draft_head if self._request.projected else None
        return self._encoder.encode_after_launch(
            hooks, rows, self._request.dtype, head.projection if head is not None else None
        )

    def collect(
        self,
        items: SequenceOf[StepItem],
        states: StepFeatures | None,
        outcomes: SequenceOf[Verified | None],
        open_ids: Container[int],
    ) -> None:
        """Keep the states of a step's committed rows, of the sequences in `open_ids`: rows of known tokens, and of the
        accepted path, whose tokens are appended already."""
        self._fresh.clear()
        if states is None or self._request is None:
            return
        rows: list[range] = []
        pieces: list[tuple[KeptVectors, int, int]] = []
        behind = self._behind
        for item, outcome in zip(items, outcomes, strict=True):
            sequence_id = item.sequence.sequence_id
            if sequence_id not in open_ids:
                continue
            kept = self._kept[sequence_id]
            # Tokens before the step.
            length = len(item.sequence.token_ids) if outcome is None else item.start + item.known
            begin = max(item.start, kept.end, 0 if behind is None else length - behind)
            root_row, accepted = _rows_of(item, outcome)
            # A chunk's first row holds the token at item.start.
            first_row = root_row - (item.known - 1) + begin - item.start
            if first_row > root_row:
                continue
            of_sequence = _ranges(first_row, root_row, accepted)
            rows += of_sequence
            pieces.append((kept, begin, len(of_sequence)))
            self._fresh[sequence_id] = (kept, outcome is not None)
        if not rows:
            return
        encoded, places = states.of_rows(rows)
        vectors, row_bytes, place = encoded.data.cast("B"), encoded.shape[1], 0
        for kept, begin, count in pieces:
            kept.append(begin, vectors, row_bytes, places[place : place + count])
            place += count

    def hold_vectors(self, sequence: Sequence) -> None:
        """A sequence was opened at the draft: hold its vectors until the draft's answer names those that it needs."""
        if self._connected:
            self._needed_from[sequence.sequence_id] = None

    @property
    def holds_vectors(self) -> bool:
        """Whether vectors of a sequence are held."""
        return None in self._needed_from.values()

    def release_vectors(self, sequence_id: int, features_from: int) -> list[SequenceFeatures]:
        """The vectors that were held for a sequence, without those of tokens before `features_from`, which the draft
        does not need."""
        # A draft may answer for sequences that have ended.
        if sequence_id not in self._needed_from:
            return []
        self._needed_from[sequence_id] = features_from
        kept = self._kept.get(sequence_id)
        if kept is None:
            # Of no token yet, or of those before it once its pages are found.
            return []
        kept.sent = min(features_from, kept.end)
        return self._pieces(sequence_id, kept, kept.end)

    def due(
        self, open_ids: Container[int], commits: SequenceOf[tuple[Sequence, int]]
    ) -> tuple[list[SequenceFeatures], dict[int, Vectors]]:
        """Vectors of the sequences in `open_ids` that are to be sent: those ahead of the commits, and those with them.
        `commits` are (sequence, tokens committed) of the step that was collected last."""
        ahead: list[SequenceFeatures] = []
        along: dict[int, Vectors] = {}
        going_on = {sequence.sequence_id: (sequence, committed) for sequence, committed in commits}
        request = self._request if self._connected else None
        for sequence_id, (kept, committing) in self._fresh.items():
            sequence, committed = going_on.get(sequence_id, (None, 0))
            needed_from = self._needed_from.get(sequence_id)
            wanted = request is not None and sequence_id in open_ids and needed_from is not None
            kept.sent = max(kept.sent, min(needed_from or 0, kept.end))
            # Without a commit it reads its prompt, or else it has ended.
            if wanted and sequence is None and not committing:
                ahead += self._pieces(sequence_id, kept, kept.end)
            elif request is not None and wanted and sequence is not None and len(sequence.token_ids) - 1 == kept.end:
                most = max(1, MAX_FEATURE_BYTES // kept.row_bytes)
                # The draft needs a commit before it can place the vectors of its tokens.
                if kept.unsent < kept.end - max(most, committed):
                    ahead += self._pieces(sequence_id, kept, kept.end - max(most, committed))
                # No more than the drafter's window: Medusa heads read one vector.
                kept.sent = max(kept.sent, kept.end - min(most, request.window or most))
                along[sequence_id] = kept.pop_unsent(kept.end, request)
            kept.trim(self._keep)
        self._fresh.clear()
        self._count(along.values())
        return ahead, along

    def pop_sent_counts(self) -> tuple[int, int]:
        """Vectors and bytes sent since the last call."""
        reported, self._reported = self._reported, (self.sent_vectors, self.sent_bytes)
        return self.sent_vectors - reported[0], self.sent_bytes - reported[1]

    def forget(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)
        self._fresh.pop(sequence_id, None)
        self._needed_from.pop(sequence_id, None)

    def forget_all(self) -> None:
        """Drop every vector: they were computed with other weights, or have another form than is sent now."""
        self._kept.clear()
        self._fresh.clear()

    def _check(self, request: FeatureRequest) -> None:
        """Raise `NotSupported` unless this target can provide the features."""
        head, width = self._runner.draft_head, self._runner.hidden_size * len(request.layers)
        if request.projected:
            if head is None or head.projection is None:
                raise NotSupported(
                    "the draft needs its head's projection applied here, and no head is named: set --draft-head to the "
                    "draft's --head, or --projection draft in the draft service"
                )
            if head.layers != request.layers:
                raise NotSupported(f"--draft-head reads layers {head.layers}, the draft's head {request.layers}")
            if request.projection_fingerprint not in ("", head.fingerprint):
                raise NotSupported("--draft-head has other weights than the draft's head")
            width = head.projection.width
        if request.width != width:
            raise NotSupported(f"the draft reads features {request.width} wide, and here they are {width}")

    def _set_request(self, request: FeatureRequest | None) -> None:
        if request is not None:
            self._runner.hook(request.layers)
        if _form(request) != _form(self._request):
            self.forget_all()
        self._request = request
        # The drafter reads no vectors before its window.
        self._keep = self._configured_keep
        if request is not None and request.window:
            self._keep = min(self._keep, request.window)

    @property
    def _behind(self) -> int | None:
        """Of a sequence's last tokens, the root included, how many vectors are needed; None for all."""
        assert self._request is not None
        if self._connected and not self._request.window:
            return None
        return 1 + max(self._keep, self._request.window if self._connected else 0)

    def _pieces(self, sequence_id: int, kept: KeptVectors, end: int) -> list[SequenceFeatures]:
        """The unsent vectors up to `end`, in pieces that fit a frame."""
        assert self._request is not None
        pieces: list[SequenceFeatures] = []
        while (start := kept.unsent) < end:
            # What is not cut here is sent without a copy.
            stop = kept.piece_end(start, min(end, start + max(1, MAX_FEATURE_BYTES // kept.row_bytes)))
            pieces.append(SequenceFeatures(sequence_id, start, kept.pop_unsent(stop, self._request)))
        self._count([piece.vectors for piece in pieces])
        return pieces

    def _count(self, sent: Iterable[Vectors]) -> None:
        for vectors in sent:
            self.sent_vectors += vectors.rows
            self.sent_bytes += len(vectors.data) + 4 * len(vectors.scales)


def _rows_of(item: StepItem, outcome: Verified | None) -> tuple[int, tuple[int, ...]]:
    """The row of a sequence's root in the pass, and the accepted rows relative to it."""
    if outcome is None:
        return item.first_row, ()
    if not outcome.device_passes:
        return item.first_row, outcome.walk.accepted_rows
    # The device chose where rows begin. States are only taken of launches of one pass.
    (only,) = outcome.device_passes
    return only.root_row, only.path


def _ranges(first: int, root: int, accepted: SequenceOf[int]) -> list[range]:
    """The rows `first` .. `root`, and the accepted ones, which are relative to `root`, in as few ranges as possible."""
    ranges: list[range] = []
    stop = root + 1
    for row in accepted:
        if root + row != stop:
            ranges.append(range(first, stop))
            first = root + row
        stop = root + row + 1
    ranges.append(range(first, stop))
    return ranges


def _form(request: FeatureRequest | None) -> tuple[object, ...]:
    """What kept vectors must have in common with a request to be sent for it."""
    return () if request is None else (request.layers, request.width, request.dtype, request.projected)
