"""The MTP drafter: the target's own multi-token-prediction modules over the target's hidden states.

Each module drafts one level of the trees (`draft_service.mtp.drafting`), and the last one all deeper levels: its output
at a node is the state that the node's children read, as in vLLM and SGLang for targets with one module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draft_service.drafters.base import DrafterSpec
from draft_service.eagle.config import HeadDrafterConfig
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadDrafter
from draft_service.mtp.checkpoint import MtpCheckpoint
from draft_service.mtp.drafting import ModuleDrafting
from draft_service.neural.cuda_graphs.drafting import drafting_on
from draft_service.neural.tree_drafting import TreeDrafting
from outrider.model_store import model_source
from outrider.sampling import VerificationMode
from outrider.settings import SettingsError, setting
from outrider.wire.frames import FeatureRequest


@dataclass(frozen=True)
class MtpConfig(HeadDrafterConfig):
    """Settings of the MTP drafter: flags, environment (`OUTRIDER_MTP_*`) or the `[mtp]` table."""

    base_model: str = setting(
        "",
        "target whose checkpoint holds the modules: a name from `outrider model list`, a folder, or a hub id; "
        "safetensors only",
    )
    num_modules: int = setting(
        0, "modules that draft, each a level of the trees and the last one all that follow; 0 takes all there are", ge=0
    )


class MtpDrafter(HeadDrafter):
    """See `MtpConfig` for the settings."""

    name = "mtp"

    def __init__(self, config: MtpConfig) -> None:
        """Reads the modules' configuration; `start` loads their weights. Raises `SettingsError` if no target is named,
        or its modules cannot be captured, `NotSupported` if they are not supported, or fewer, and `UnknownModel`."""
        if not config.base_model:
            raise SettingsError(
                "the mtp drafter needs its target's checkpoint: --base-model names a folder or a hub id"
            )
        self._checkpoint = MtpCheckpoint(model_source(config.base_model), config.num_modules)
        shape, *others = self._checkpoint.configs
        if others and config.cuda_graphs:
            raise SettingsError(
                f"{1 + len(others)} modules cannot be captured: leave cuda_graphs off, or take one (num_modules 1)"
            )
        request = FeatureRequest(
            shape.feature_layers or (), shape.hidden_size, config.feature_dtype, window=config.feature_window
        )
        self._modules: list[EagleHead] = []
        super().__init__(config, shape, request)
        # Its own target's: modules of another model of the same sizes fit too.
        self.tokenizer_fingerprint = self._checkpoint.tokenizer_fingerprint()

    def _load_head(self, token_map: Sequence[int] | None) -> EagleHead:
        self._modules = self._checkpoint.load(self._place, self._config.tree.num_steps, token_map=token_map)
        return self._modules[0]

    def _load(self) -> TreeDrafting:
        first, config = self._load_network(), self._config
        if len(self._modules) == 1:
            return drafting_on(first, config)
        for module in self._modules[1:]:
            module.prepare(int8=config.head_weights == "int8")
        return ModuleDrafting(self._modules, config, chained=self._checkpoint.chained)

    def _first_batches(self) -> Iterable[tuple[VerificationMode, int, int]]:
        # With fewer rows not every module drafts.
        least = len(self._modules)
        return ((mode, count, max(rows, least)) for mode, count, rows in super()._first_batches())


SPEC = DrafterSpec("mtp", MtpConfig, MtpDrafter)
