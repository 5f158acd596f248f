"""The base of drafters that run a head over the target's features, with trees that grow as EAGLE-2's do.

Entry i of a sequence's cache pairs the feature of token i with the embedding of token i + 1 at rotary position i, and
predicts token i + 2. With L tokens there are L - 1 features and as many entries; the last one predicts the root's
children. Entries of committed tokens come from the target's features; those of a tree's nodes come from the head's, and
are overwritten by the next entries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.checkpoints.vocabulary import read_token_map
from draft_service.drafters.base import DraftSequence
from draft_service.drafters.hidden_states import FeatureWindow, window_of
from draft_service.eagle.config import HeadDrafterConfig
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import LayeredShape
from draft_service.neural.devices import launching_on
from draft_service.neural.network import Network, RowOutput
from draft_service.neural.tree_drafting import Extension
from draft_service.neural_drafter import CachingDrafter
from outrider.wire.frames import FeatureRequest
from tree_kernels.device_event import DeviceEvent
from tree_models.layers.paged import CacheShape, PagedPass


class HeadNetwork:
    """A head as `neural.network.Network`."""

    successors = 1

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self.cache_shapes: Sequence[CacheShape] = head.cache_shapes
        self.dtype, self.device = head.embedding.dtype, head.embedding.device
        ids = head.token_ids
        self.token_ids = None if ids is None else ids.cpu().numpy().astype(np.int32)

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,
        positions: Tensor,
        step: PagedPass,
        sources: Tensor | None = None,
    ) -> RowOutput:
        """See `Network.forward_rows`; carried are features [R, H]."""
        assert carried is not None, "an EAGLE head reads features"
        output: RowOutput = self._head(token_ids, carried, positions, step, sources)
        return output

    def logits(self, lm_input: Tensor) -> Tensor:
        return self._head.logits(lm_input)


class Staging:
    """Concatenates rows in a reused buffer on the host, pinned for asynchronous copies to a GPU."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._on_gpu = dtype, device.type == "cuda"
        self._buffer = torch.empty(0, 0, dtype=dtype)
        self._copied = DeviceEvent(on_gpu=self._on_gpu)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """[rows of all pieces, width] on the host, in the buffer's type. Valid until the next call."""
        rows, width = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
        self._copied.wait()
        if rows > self._buffer.shape[0] or width != self._buffer.shape[1]:
            capacity = 1 << (rows - 1).bit_length()
            self._buffer = torch.empty(capacity, width, dtype=self._dtype, pin_memory=self._on_gpu)
        return torch.cat(list(pieces), out=self._buffer[:rows])

    def sent(self) -> None:
        """Mark that every copy of the last joined rows has been launched."""
        self._copied.record()


class HeadDrafter(CachingDrafter):
    """See `HeadDrafterConfig` for the settings, and `FeatureDrafter` for how features arrive."""

    _config: HeadDrafterConfig

    def __init__(self, config: HeadDrafterConfig, shape: LayeredShape, features: FeatureRequest) -> None:
        """`shape` is the head's, which `_load_head` returns at the start. Raises `SettingsError` for a device that does
        not exist."""
        super().__init__(config, config.tree, shape.vocab_size, config.max_context)
        self.tokenizer_fingerprint = shape.tokenizer_fingerprint
        self.features = features

    def open(self, sequence: DraftSequence) -> None:
        sequence.features = FeatureWindow(self.features.width, self._config.feature_window)
        super().open(sequence)

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """See `FeatureDrafter.absorb`."""
        # An entry needs the token after its feature's.
        paired = [one for one in sequences if window_of(one).end < len(one.token_ids)]
        for one in paired:
            self._resume(one)
        with launching_on(self.device):
            self._extend_cache([one for one in paired if self._has_room(one, len(window_of(one)))])

    def stats(self) -> Mapping[str, float]:
        read, missed = f"{self.name}_feature_rows_total", f"{self.name}_missing_features_total"
        return {**super().stats(), read: self._rows, missed: self._misses}

    @abstractmethod
    def _load_head(self, token_map: Sequence[int] | None) -> EagleHead:
        """Load the head on its device. `token_map` limits its vocabulary to these target ids."""

    def _load_network(self) -> Network:
        self._head = self._load_head(read_token_map(self._config.token_map))
        self._head.prepare(int8=self._config.head_weights == "int8")
        network = HeadNetwork(self._head)
        self._staging = Staging(network.dtype, network.device)
        return network

    def _ready(self, sequence: DraftSequence) -> bool:
        """Whether the features up to the token before the root are there, and the cache has room."""
        self._resume(sequence)
        known, window = len(sequence.token_ids) - 1, window_of(sequence)
        if window.end != known or not (len(window) or sequence.state.entries):
            self._misses += 1
            return False
        return self._has_room(sequence, len(window))

    def _owner(self, sequence: DraftSequence) -> str:
        # What a head reads is of the target's weights.
        return f"{sequence.stream}:{sequence.model_version}:{sequence.tenant}"

    def _resume(self, sequence: DraftSequence) -> bool:
        resumed = super()._resume(sequence)
        if resumed:
            window_of(sequence).skip_to(sequence.state.entries)
        return resumed

    @torch.inference_mode()
    def _extend_cache(self, sequences: Sequence[DraftSequence]) -> None:
        waiting = [(sequence, window) for sequence in sequences if len(window := window_of(sequence))]
        if not waiting:
            return
        extensions: list[Extension] = []
        pieces: list[Tensor] = []
        for sequence, window in waiting:
            # The entry after a vector's token is that of the next one.
            tokens = sequence.token_ids[window.begin + 1 : window.end + 1]
            begin, taken = window.pop_vectors()
            pieces += taken
            extensions.append(Extension(sequence.state, tokens, begin))
        # For one copy to the device, and one pass of the projection.
        vectors, device = self._staging.join(pieces), self.drafting.network.device
        features = vectors if self.features.projected else self._head.project(vectors.to(device, non_blocking=True))
        self._rows += len(vectors)
        self.drafting.extend(extensions, features)
        self._staging.sent()
        self._publish([sequence for sequence, _ in waiting])
