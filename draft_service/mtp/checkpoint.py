"""MTP modules, loaded from the checkpoint of their target. safetensors only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.checkpoints.files import check_shapes
from draft_service.checkpoints.target import EMBEDDING, LM_HEAD, TargetCheckpoint
from draft_service.eagle.checkpoint import make_head
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.mtp.layouts import modules_of, mtp_config, mtp_layout, mtp_names
from outrider.heads import HeadRefused
from outrider.weights import Weights

# safetensors' names of supported types; others are those of quantised weights.
_FLOATS = ("F32", "F16", "BF16")


class MtpCheckpoint:
    """The MTP modules of a target that draft, in the order of their depths; see `draft_service.mtp.layouts`. `configs`
    has their configurations; `chained` ones read the output of the one before, not the target's state."""

    def __init__(self, source: str | Path, num_modules: int = 0) -> None:
        """Reads and checks the configuration of `num_modules` modules, or of all for 0, without loading weights.

        `source` is the target's folder with config.json and safetensors, or a hub id, of which only files that hold
        modules are fetched. Raises `HeadRefused` if there are fewer modules, or they are not supported.
        """
        self._weights, self._target = Weights(source), TargetCheckpoint(source)
        config, names = self._weights.config, self._weights.names
        self._layout = mtp_layout(config, names)
        self.chained = self._layout.chained
        count = modules_of(self._layout, config, names, num_modules)
        # Of each module: neutral name -> published name.
        self._names = [mtp_names(self._layout, names, module) for module in range(count)]
        self.configs = tuple(self._checked(own) for own in self._names)
        if len({(one.num_kv_heads, one.head_dim) for one in self.configs}) > 1:
            raise HeadRefused("MTP modules whose keys differ in shape are not served together: num_modules 1 takes one")

    def tokenizer_fingerprint(self) -> str:
        """The fingerprint of the target's tokenizer; empty without one. Raises `HeadRefused` for one that cannot be
        read."""
        return self._target.fingerprint()

    def load(self, most: int | None = None, *, token_map: Sequence[int] | None = None) -> list[EagleHead]:
        """Load the modules as heads, in fp32 on the CPU: the first `most`, or all for None. Modules without an
        embedding or lm_head of their own share the target's. A `token_map` of target ids limits the draft
        vocabulary."""
        heads: list[EagleHead] = []
        for config, names in [*zip(self.configs, self._names, strict=True)][:most]:
            tensors = self._weights.tensors(names)
            if self._layout.state_first:
                state, embedding = tensors["fc.weight"].chunk(2, dim=1)
                tensors["fc.weight"] = torch.cat([embedding, state], dim=1)
            head = make_head(config, tensors, self._target, token_map)
            for name, part in ((EMBEDDING, "embed_tokens"), (LM_HEAD, "lm_head")):
                other = next((i for i, own in enumerate(self._names[: len(heads)]) if name not in own), None)
                if name not in names and other is not None:
                    setattr(head, part, getattr(heads[other], part))
            heads.append(head)
        return heads

    def _checked(self, names: dict[str, str]) -> HeadConfig:
        """The configuration of the module with these weights, which are checked."""
        weights = self._weights
        for name in names.values():
            if (kind := weights.kind(name)) not in _FLOATS:
                raise HeadRefused(f"an MTP module with quantised weights ({name} is {kind}) is not served")
        shapes = weights.shapes(names)
        config = mtp_config(self._layout, weights.config, shapes)
        for shared in {EMBEDDING, LM_HEAD} - names.keys():
            shapes[shared] = weights.shape(self._target.name_of(shared))
        with torch.device("meta"):
            check_shapes(EagleHead(config), shapes)
        return config
