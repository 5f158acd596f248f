"""Sends the hidden states of committed tokens to a drafter that reads them, each one once.

The states of a pass's committed rows come from `hidden_states.encoding` as bytes. The newest of every sequence are kept
here for a draft that connects late.
"""

from __future__ import annotations

from collections.abc import Container
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
        self._kept: dict[int, KeptVectors] = {}
        # Sequences with new vectors of the last step, and whether it committed tokens of them.
        self._fresh: dict[int, bool] = {}
        self._encoder = FeatureEncoder(runner.device)
        self.sent_vectors = self.sent_bytes = 0
        self._reported = (0, 0)
        self._head_is_named = runner.draft_head is not None
        if runner.draft_head is not None:
            layers, projection = runner.draft_head.layers, runner.draft_head.projection
            width = projection.width if projection is not None else runner.hidden_size * len(layers)
            self._follow(FeatureRequest(layers, width, projected=projection is not None))

    @property
    def kept_bytes(self) -> int:
        """Bytes of all vectors that are kept."""
        return sum(kept.nbytes for kept in list(self._kept.values()))

    def connect(self, request: FeatureRequest | None) -> None:
        """A draft has connected that reads these features; None if it reads none.

        Raises:
            NotSupported: this target cannot provide them.
        """
        self._connected = False
        if request is not None:
            self._find_head(request)
            self._check(request)
        self._follow(request)
        self._connected = request is not None

    def disconnect(self) -> None:
        """The draft is gone. Kept vectors wait for the next one."""
        self._connected = False

    @property
    def taken(self) -> bool:
        """Whether the states of every pass are taken."""
        return self._runner.hooks is not None and self._request is not None and (self._connected or bool(self._keep))

    def after_launch(self, rows: int) -> StepFeatures | None:
        """The states of the pass just launched, of `rows` rows; None unless they are taken. Does not wait."""
        hooks = self._runner.hooks
        if hooks is None or not self.taken:
            return None
        assert self._request is not None
        head = self._runner.draft_head if self._request.projected else None
        return self._encoder.begin(hooks, rows, self._request.dtype, head.projection if head is not None else None)

    def collect(
        self,
        items: SequenceOf[StepItem],
        states: StepFeatures | None,
        outcomes: SequenceOf[Verified | None],
        followed: Container[int],
    ) -> None:
        """Keep the states of a step's committed rows, of the sequences in `followed`: rows of known tokens, and of the
        accepted path, whose tokens are appended already."""
        self._fresh.clear()
        if states is None or self._request is None:
            return
        rows: list[int] = []
        pieces: list[tuple[KeptVectors, int, int]] = []
        for item, outcome in zip(items, outcomes, strict=True):
            sequence = item.sequence
            if sequence.sequence_id not in followed:
                continue
            kept = self._kept.setdefault(sequence.sequence_id, KeptVectors())
            # Tokens before the step.
            length = len(sequence.token_ids) if outcome is None else item.start + item.known
            begin = max(item.start, kept.end, self._oldest(length))
            root_row, accepted = _rows_of(item, outcome)
            # A chunk's first row holds the token at item.start.
            of_chunk = range(root_row - (item.known - 1) + begin - item.start, root_row + 1)
            if not of_chunk:
                continue
            rows += of_chunk
            rows += [root_row + row for row in accepted]
            pieces.append((kept, begin, len(of_chunk) + len(accepted)))
            self._fresh[sequence.sequence_id] = outcome is not None
        if not rows:
            return
        encoded = states.of_rows(rows)
        row = 0
        for kept, begin, count in pieces:
            kept.append(begin, encoded[row : row + count])
            row += count

    def opened(self, sequence: Sequence) -> list[SequenceFeatures]:
        """All kept vectors of a sequence that was just opened at the draft."""
        kept = self._kept.get(sequence.sequence_id)
        if kept is None or not self._connected:
            return []
        kept.sent = 0
        return self._pieces(sequence.sequence_id, kept, kept.end)

    def due(
        self, followed: Container[int], commits: SequenceOf[tuple[Sequence, int]]
    ) -> tuple[list[SequenceFeatures], dict[int, Vectors]]:
        """Vectors of the sequences in `followed` that are to be sent: those ahead of the commits, and those with them.

        `commits` are (sequence, tokens committed) of the step that was collected last.
        """
        ahead: list[SequenceFeatures] = []
        along: dict[int, Vectors] = {}
        going_on = {sequence.sequence_id: (len(sequence.token_ids) - 1, committed) for sequence, committed in commits}
        for sequence_id, committing in self._fresh.items():
            kept = self._kept.get(sequence_id)
            if kept is None:
                continue
            end, committed = going_on.get(sequence_id, (kept.end, 0))
            ended = committing and not committed
            if sequence_id in followed and self._connected and end == kept.end and not ended:
                most = max(1, MAX_FEATURE_BYTES // kept.row_bytes) if committed else 0
                # The draft needs a commit before it can place the vectors of its tokens.
                ahead += self._pieces(sequence_id, kept, end - max(most, committed))
                if committed:
                    # No more than the drafter's window: Medusa heads read one vector.
                    within = min(most, self._request.window or most) if self._request else most
                    kept.sent = max(kept.sent, end - within)
                    along[sequence_id] = self._take(kept, end)
            kept.trim(self._keep)
        self._fresh.clear()
        return ahead, along

    def take_sent(self) -> tuple[int, int]:
        """Vectors and bytes sent since the last call."""
        reported, self._reported = self._reported, (self.sent_vectors, self.sent_bytes)
        return self.sent_vectors - reported[0], self.sent_bytes - reported[1]

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._kept.pop(sequence_id, None)

    def forget_all(self) -> None:
        """Drop every vector: they were computed with other weights."""
        self._kept.clear()
        self._fresh.clear()

    def _find_head(self, request: FeatureRequest) -> None:
        """Take the projection of a head that comes with Outrider, unless the operator has named one."""
        runner = self._runner
        if self._head_is_named or not request.projected:
            return
        runner.draft_head = shipped_draft_head(
            request.projection_fingerprint, len(runner.cache.keys), runner.hidden_size
        )
        if runner.draft_head is not None and runner.draft_head.projection is not None:
            runner.draft_head.projection.to(device=runner.device, dtype=runner.dtype)

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

    def _follow(self, request: FeatureRequest | None) -> None:
        if request is not None:
            self._runner.hook(request.layers)
        if _form(request) != _form(self._request):
            self._kept.clear()
        self._request = request
        # The drafter reads no vectors before its window.
        self._keep = self._configured_keep
        if request is not None and request.window:
            self._keep = min(self._keep, request.window)

    def _oldest(self, length: int) -> int:
        """The first token of a sequence of `length` whose vector is needed."""
        assert self._request is not None
        if self._connected and not self._request.window:
            return 0
        return length - 1 - max(self._keep, self._request.window if self._connected else 0)

    def _pieces(self, sequence_id: int, kept: KeptVectors, end: int) -> list[SequenceFeatures]:
        """The unsent vectors up to `end`, in pieces that fit a frame."""
        pieces: list[SequenceFeatures] = []
        while (start := max(kept.sent, kept.begin)) < end:
            stop = min(end, start + max(1, MAX_FEATURE_BYTES // kept.row_bytes))
            pieces.append(SequenceFeatures(sequence_id, start, self._take(kept, stop)))
        return pieces

    def _take(self, kept: KeptVectors, stop: int) -> Vectors:
        """The unsent vectors up to `stop`, which count as sent from now on."""
        assert self._request is not None
        start = max(kept.sent, kept.begin)
        kept.sent = stop
        vectors = kept.vectors(start, stop, self._request)
        self.sent_vectors += stop - start
        self.sent_bytes += len(vectors.data) + 4 * len(vectors.scales)
        return vectors


def _rows_of(item: StepItem, outcome: Verified | None) -> tuple[int, tuple[int, ...]]:
    """The row of a sequence's root in the pass, and the accepted rows relative to it."""
    if outcome is None:
        return item.first_row, ()
    if not outcome.device_passes:
        return item.first_row, outcome.walk.accepted_rows
    # The device chose where rows begin. States are only taken of launches of one pass.
    (only,) = outcome.device_passes
    return only.root_row, only.path


def _form(request: FeatureRequest | None) -> tuple[object, ...]:
    """What kept vectors must have in common with a request to be sent for it."""
    return () if request is None else (request.layers, request.width, request.dtype, request.projected)
