"""The target's hidden states on their way to a drafter that asked for them: of committed tokens, and each one once.

The states of a pass's committed rows come from `hidden_states.encoding` as bytes. Here the last ones of every sequence
are kept for a draft that connects late, and what the draft has not heard goes out.
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
    """What the drafter reads of every sequence. Belongs to the engine's thread.

    A token's state is known once a pass has read it, which the root's has not: after a commit that leaves L tokens,
    those of 0 .. L - 2 are. A sequence that lost its pages is read again, and what it yields again is passed over.
    """

    def __init__(self, runner: ModelRunner, keep: int) -> None:
        """`keep` vectors of every sequence stay here, the newest. Where the runner knows the draft's head from the
        start, they are kept from the start, so that even the first draft to connect finds them."""
        self._runner = runner
        self._asked_keep = self._keep = keep
        self._wanted: FeatureRequest | None = None
        # Whether a draft is there that takes them.
        self._listening = False
        self._kept: dict[int, KeptVectors] = {}
        # Sequences that the last step read something of, and whether it said something of them.
        self._fresh: dict[int, bool] = {}
        self._encoder = FeatureEncoder()
        self.sent_vectors = self.sent_bytes = 0
        self._reported = (0, 0)
        self._head_is_named = runner.draft_head is not None
        if runner.draft_head is not None:
            layers, projection = runner.draft_head.layers, runner.draft_head.projection
            width = projection.width if projection is not None else runner.hidden_size * len(layers)
            self._follow(FeatureRequest(layers, width, projected=projection is not None))

    @property
    def kept_bytes(self) -> int:
        """Memory that vectors take, of all sequences."""
        return sum(kept.nbytes for kept in list(self._kept.values()))

    def ask(self, wanted: FeatureRequest | None) -> None:
        """A draft has connected, and wants these features, or none.

        Raises:
            NotSupported: this target cannot give them; the message says why.
        """
        self._listening = False
        if wanted is not None:
            self._find_head(wanted)
            self._check(wanted)
        self._follow(wanted)
        self._listening = wanted is not None

    def lost(self) -> None:
        """The draft is gone. What is kept waits for the next."""
        self._listening = False

    @property
    def taken(self) -> bool:
        """Whether the states of every pass are taken."""
        return self._runner.hooks is not None and self._wanted is not None and (self._listening or bool(self._keep))

    def after_launch(self, rows: int) -> StepFeatures | None:
        """Those of the pass just launched, of so many rows. None when nobody wants them. Does not wait."""
        states = self._runner.hooks.take(rows) if self._runner.hooks is not None and self.taken else None
        if states is None:
            return None
        assert self._wanted is not None
        head = self._runner.draft_head if self._wanted.projected else None
        return self._encoder.begin(states, self._wanted.dtype, head.projection if head is not None else None)

    def collect(
        self,
        items: SequenceOf[StepItem],
        states: StepFeatures | None,
        outcomes: SequenceOf[Verified | None],
        followed: Container[int],
    ) -> None:
        """Take in the states of a step's committed rows, of the sequences in `followed`.

        They are the rows of known tokens and those of the accepted path, whose tokens were appended already.
        """
        self._fresh.clear()
        if states is None or self._wanted is None:
            return
        rows: list[int] = []
        pieces: list[tuple[KeptVectors, int, int]] = []
        for item, outcome in zip(items, outcomes, strict=True):
            sequence = item.sequence
            if sequence.sequence_id not in followed:
                continue
            kept = self._kept.setdefault(sequence.sequence_id, KeptVectors())
            # Those that it had before the step.
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
        """All that is known of a sequence that a draft has just been told of."""
        kept = self._kept.get(sequence.sequence_id)
        if kept is None or not self._listening:
            return []
        kept.sent = 0
        return self._pieces(sequence.sequence_id, kept, kept.end)

    def due(
        self, followed: Container[int], commits: SequenceOf[tuple[Sequence, int]]
    ) -> tuple[list[SequenceFeatures], dict[int, Vectors]]:
        """What the draft has not heard of the sequences in `followed`: what goes ahead, and what with each commit.

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
            if sequence_id in followed and self._listening and end == kept.end and not ended:
                most = max(1, MAX_FEATURE_BYTES // kept.row_bytes) if committed else 0
                # The draft cannot place what the step committed before it hears of it.
                ahead += self._pieces(sequence_id, kept, end - max(most, committed))
                if committed:
                    # Of a step's tokens too no more than the drafter looks back at: Medusa heads at one.
                    within = min(most, self._wanted.window or most) if self._wanted else most
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
        """What is kept was computed with other weights."""
        self._kept.clear()
        self._fresh.clear()

    def _find_head(self, wanted: FeatureRequest) -> None:
        """Take the projection of a head that comes with Outrider, unless the operator has named one."""
        runner = self._runner
        if self._head_is_named or not wanted.projected:
            return
        runner.draft_head = shipped_draft_head(
            wanted.projection_fingerprint, len(runner.cache.keys), runner.hidden_size
        )
        if runner.draft_head is not None and runner.draft_head.projection is not None:
            runner.draft_head.projection.to(device=runner.device, dtype=runner.dtype)

    def _check(self, wanted: FeatureRequest) -> None:
        """Raise `NotSupported` unless this target can give what is wanted."""
        head, width = self._runner.draft_head, self._runner.hidden_size * len(wanted.layers)
        if wanted.projected:
            if head is None or head.projection is None:
                raise NotSupported(
                    "the draft wants its head's projection applied here, and no head is named: set --draft-head to the "
                    "draft's --head, or --projection draft in the draft service"
                )
            if head.layers != wanted.layers:
                raise NotSupported(f"--draft-head reads layers {head.layers}, the draft's head {wanted.layers}")
            if wanted.projection_fingerprint not in ("", head.fingerprint):
                raise NotSupported("--draft-head has other weights than the draft's head")
            width = head.projection.width
        if wanted.width != width:
            raise NotSupported(f"the draft wants features {wanted.width} wide, and here they are {width}")

    def _follow(self, wanted: FeatureRequest | None) -> None:
        if wanted is not None:
            self._runner.hook(wanted.layers)
        if _form(wanted) != _form(self._wanted):
            self._kept.clear()
        self._wanted = wanted
        # More than the drafter looks back at would be of use to nobody.
        self._keep = min(self._asked_keep, wanted.window) if wanted and wanted.window else self._asked_keep

    def _oldest(self, length: int) -> int:
        """The first token of a sequence of so many whose vector is of use to anyone."""
        assert self._wanted is not None
        if self._listening and not self._wanted.window:
            return 0
        return length - 1 - max(self._keep, self._wanted.window if self._listening else 0)

    def _pieces(self, sequence_id: int, kept: KeptVectors, end: int) -> list[SequenceFeatures]:
        """Vectors up to `end` that were not sent, in pieces of a size that a frame has room for."""
        pieces: list[SequenceFeatures] = []
        while (start := max(kept.sent, kept.begin)) < end:
            stop = min(end, start + max(1, MAX_FEATURE_BYTES // kept.row_bytes))
            pieces.append(SequenceFeatures(sequence_id, start, self._take(kept, stop)))
        return pieces

    def _take(self, kept: KeptVectors, stop: int) -> Vectors:
        """The vectors that were not sent, up to `stop`."""
        assert self._wanted is not None
        start = max(kept.sent, kept.begin)
        kept.sent = stop
        vectors = kept.vectors(start, stop, self._wanted)
        self.sent_vectors += stop - start
        self.sent_bytes += len(vectors.data) + 4 * len(vectors.scales)
        return vectors


def _rows_of(item: StepItem, outcome: Verified | None) -> tuple[int, tuple[int, ...]]:
    """The row of a sequence's root in the pass, and the accepted rows relative to it."""
    if outcome is None:
        return item.first_row, ()
    if not outcome.device_passes:
        return item.first_row, outcome.walk.accepted_rows
    # Where rows begin only the device knew. States are taken of launches of one pass.
    (only,) = outcome.device_passes
    return only.root_row, only.path


def _form(wanted: FeatureRequest | None) -> tuple[object, ...]:
    """What vectors that are kept must agree in."""
    return () if wanted is None else (wanted.layers, wanted.width, wanted.dtype, wanted.projected)
