"""MTP modules, loaded from the checkpoint of their target. safetensors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draft_service.checkpoints.files import check_weights
from draft_service.checkpoints.target import EMBEDDING, LM_HEAD, TargetCheckpoint
from draft_service.eagle.checkpoint import make_head
from draft_service.eagle.head import IN_FP32, EagleHead
from draft_service.eagle.head_config import ModuleConfig
from draft_service.mtp.layouts import modules_of, mtp_config, mtp_layout, mtp_names
from outrider.heads import HeadRefused
from outrider.weights import Weights
from tree_models.layers.placing import Placement
from tree_models.spec import FamilyRefused
from tree_models.weights.checkpoint import StoredTensor
from tree_models.weights.separate_experts import separated


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
        # Of each module: name in a head -> published name.
        self._names = [mtp_names(self._layout, names, module) for module in range(count)]
        self.configs = tuple(self._checked(own) for own in self._names)

    def tokenizer_fingerprint(self) -> str:
        """The fingerprint of the target's tokenizer; empty without one. Raises `HeadRefused` for one that cannot be
        read."""
        return self._target.fingerprint()

    def load(
        self,
        place: Placement = IN_FP32,
        most: int | None = None,
        *,
        token_map: Sequence[int] | None = None,
        kept: int = 0,
    ) -> list[EagleHead]:
        """Load the modules as heads: the first `most`, or all for None. Modules without an embedding or lm_head of
        their own share the target's. A `token_map` of target ids limits the draft vocabulary. `kept` layers of others
        come before theirs in the cache."""
        heads: list[EagleHead] = []
        for config, names in [*zip(self.configs, self._names, strict=True)][:most]:
            source = separated(_Published(self._weights, names), config.names)
            tensors = {name: source.read(name) for name in source.stored}
            if self._layout.state_first:
                state, embedding = tensors["fc.weight"].chunk(2, dim=1)
                tensors["fc.weight"] = torch.cat([embedding, state], dim=1)
            before = kept + sum(len(one.layers) for one in heads)
            head = make_head(config, tensors, place, self._target, token_map, before)
            for name, part in ((EMBEDDING, "embedding"), (LM_HEAD, "lm_head")):
                other = next((i for i, own in enumerate(self._names[: len(heads)]) if name not in own), None)
                if name not in names and other is not None:
                    setattr(head, part, getattr(heads[other], part))
            heads.append(head)
        return heads

    def _checked(self, names: dict[str, str]) -> ModuleConfig:
        """The configuration of the module with these weights, which are checked."""
        config = mtp_config(self._layout, self._weights.config, names)
        every = names | {shared: self._target.name_of(shared) for shared in {EMBEDDING, LM_HEAD} - names.keys()}
        try:
            skeleton = EagleHead(config, place=replace(IN_FP32, device=torch.device("meta")))
        except FamilyRefused as refused:
            raise HeadRefused(str(refused)) from None
        source = separated(_Published(self._weights, every), config.names)
        check_weights(skeleton.slots(), source.stored)
        return config


class _Published:
    """Published tensors by other names. A `TensorSource`."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        """`names` maps the other names to published ones."""
        self._weights, self._names = weights, names
        self.stored = {name: StoredTensor(weights.shape(own), weights.kind(own)) for name, own in names.items()}

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        return self._weights.tensor(self._names[name])
