"""A draft link that asks for features, remembers every vector it gets, and holds the target to the rules of sending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from engine_harness import ScriptedDraft
from torch import Tensor

from draft_service.drafters.hidden_states import read_vectors
from outrider.drafting.events import Connected, Disconnected, Opened
from outrider.wire.frames import (
    MAX_FEATURE_BYTES,
    DraftInfo,
    FeatureRequest,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    TreeLimits,
    Vectors,
)


@dataclass
class FeatureLink(ScriptedDraft):
    """`got[id][position]` is the vector of a token since the sequence was last opened; `opened_at` its length then."""

    wanted: FeatureRequest = field(kw_only=True)
    connects: bool = field(default=True, kw_only=True)
    got: dict[int, dict[int, Tensor]] = field(default_factory=dict, kw_only=True)
    opened_at: dict[int, int] = field(default_factory=dict, kw_only=True)
    tokens: dict[int, list[int]] = field(default_factory=dict, kw_only=True)
    steps_without: int = field(default=0, kw_only=True)
    # Whether vectors may be missing between others.
    gaps: bool = field(default=False, kw_only=True)
    # Tokens at the beginning of every sequence whose vectors it says that it does not need.
    features_from: int = field(default=0, kw_only=True)

    def connect(self) -> None:
        if self.connects:
            self.events.receive(Connected(DraftInfo("reader", 0, "", TreeLimits(), 1 << 20, "0", self.wanted)))
        self.connects = True

    def disconnect(self) -> None:
        self.events.receive(Disconnected("a test took the draft away"))
        self._tokens.clear()

    def open(self, sequence: OpenSequence) -> None:
        self.tokens[sequence.sequence_id] = list(sequence.token_ids)
        self.got[sequence.sequence_id], self.opened_at[sequence.sequence_id] = {}, len(sequence.token_ids)
        super().open(sequence)
        self.events.receive(Opened(sequence.sequence_id, self.features_from))

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        for one in features:
            self._take(one.sequence_id, one.position, one.vectors)

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        for advance in advances:
            tokens = self.tokens[advance.sequence_id]
            tokens += advance.token_ids
            if advance.features is None:
                self.steps_without += 1
            else:
                self._take(advance.sequence_id, len(tokens) - 1 - advance.features.rows, advance.features)
        super().advance(advances)

    def _take(self, sequence_id: int, position: int, vectors: Vectors) -> None:
        got = self.got[sequence_id]
        assert vectors.rows and len(vectors.data) <= MAX_FEATURE_BYTES
        assert vectors.width == self.wanted.width and vectors.dtype == self.wanted.dtype
        # Nothing twice, nothing left out, nothing for the root or past it.
        following = max(got, default=position - 1) + 1
        assert position == following or (self.gaps and position > following)
        assert position >= 0 and position + vectors.rows <= len(self.tokens[sequence_id]) - 1
        for place, vector in enumerate(read_vectors(vectors), start=position):
            got[place] = vector

    def begins(self, sequence_id: int) -> int:
        """The first token that came with a vector."""
        return min(self.got[sequence_id])

    def stacked(self, sequence_id: int) -> Tensor:
        """[n, width], from the first to the last that came."""
        return torch.stack(list(self.got[sequence_id].values()))
