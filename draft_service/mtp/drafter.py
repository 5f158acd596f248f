"""The MTP drafter: the target's own multi-token-prediction module over the target's last hidden state.

One module drafts every level of a tree: what it makes of a node is the state that the node's children read, as in vLLM
and SGLang for targets with one module. Of several modules the first drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_service.drafters.base import DrafterSpec
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadDrafter
from draft_service.mtp.checkpoint import load_mtp, read_mtp_config
from draft_service.mtp.config import MtpConfig
from outrider.model_store import model_source
from outrider.settings import SettingsError
from outrider.wire.frames import FeatureRequest


class MtpDrafter(HeadDrafter):
    """See `MtpConfig` for what can be set."""

    name = "mtp"

    def __init__(self, config: MtpConfig, head: EagleHead | None = None) -> None:
        """Reads the module's configuration; its weights follow in `start`, unless the module is given, as `head`.

        Raises:
            SettingsError: no target is named, or its experts cannot be captured.
            NotSupported: the target has no such module, or one that is not served.
            UnknownModel: there is no such target.
        """
        if head is None and not config.base_model:
            raise SettingsError(
                "the mtp drafter needs its target's checkpoint: --base-model names a folder or a hub id"
            )
        self._config = config
        self._source = model_source(config.base_model) if head is None else ""
        shape = read_mtp_config(self._source) if head is None else head.config
        if shape.experts is not None and config.cuda_graphs:
            raise SettingsError("a mixture of experts cannot be captured: leave cuda_graphs off")
        request = FeatureRequest(
            shape.feature_layers or (), shape.hidden_size, config.feature_dtype, window=config.feature_window
        )
        super().__init__(config, shape, request, head)

    def _loaded(self, token_map: Sequence[int] | None) -> EagleHead:
        dtype = getattr(torch, self._config.dtype)
        return load_mtp(self._source, token_map=token_map, dtype=dtype, device=self._config.device)


SPEC = DrafterSpec("mtp", MtpConfig, lambda config, _: MtpDrafter(config))
"""Named in `DRAFTERS`."""
