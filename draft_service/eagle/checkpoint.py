"""EAGLE heads on disk, in safetensors: loaded from any published layout, saved in that of SGLang and SpecForge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.checkpoints.files import check_weights, fill, write_folder
from draft_service.checkpoints.target import EMBEDDING, LM_HEAD, TargetCheckpoint
from draft_service.checkpoints.vocabulary import ids_of, restrict, tensors_of
from draft_service.eagle.head import IN_FP32, EagleHead
from draft_service.eagle.head_config import HeadConfig, LayeredShape
from draft_service.eagle.layouts import head_config, neutral_name, published_config, published_name
from outrider.heads import HeadRefused, weight_fingerprint
from outrider.weights import Weights
from tree_models.layers.placing import Placement
from tree_models.weights.checkpoint import TensorsInMemory


class EagleCheckpoint:
    """A head in any published layout (`draft_service.eagle.layouts`), and `config`, its configuration."""

    def __init__(self, source: str | Path, window: int = 0) -> None:
        """`source` is a folder with config.json and safetensors, or a hub id, which is fetched. Loads no weights. Its
        attention sees `window` tokens, or with 0 as many as its config.json says. Raises `HeadRefused` if the head
        cannot be read, or is not supported."""
        self._weights = Weights(source)
        names = ((neutral_name(published), published) for published in self._weights.names)
        # Neutral name -> published name.
        self._names = {name: published for name, published in names if name is not None}
        config = head_config(self._weights.config, self._weights.shapes(self._names))
        self.config = replace(config, window=window) if window else config

    def load(
        self,
        place: Placement = IN_FP32,
        *,
        target: TargetCheckpoint | None = None,
        token_map: Sequence[int] | None = None,
        kept: int = 0,
    ) -> EagleHead:
        """Load the head. Raises `HeadRefused` if it does not fit the target, or needs one and there is none.

        Args:
            place: where it lies.
            target: gives the token embedding and the lm_head that the head does not have.
            token_map: target ids to limit the draft vocabulary to (FR-Spec, arXiv 2502.14856); those that are not in
                the head's vocabulary are ignored.
            kept: layers of others that come before its own in the cache.
        """
        if target is not None:
            target.check_fits(self.config)
        return make_head(self.config, self._weights.tensors(self._names), place, target, token_map, kept)

    def projection_fingerprint(self) -> str:
        """The fingerprint of the weight that fuses hidden states, by which a target identifies its copy of the head."""
        return weight_fingerprint(self._weights.tensor(self._names["fc.weight"]))


def make_head(
    config: LayeredShape,
    tensors: dict[str, Tensor],
    place: Placement,
    target: TargetCheckpoint | None,
    token_map: Sequence[int] | None,
    kept: int = 0,
) -> EagleHead:
    """Make a head of weights by neutral name, which are modified. For `place`, `target` and `token_map` see
    `EagleCheckpoint.load`. `kept` layers of others come before its own in the cache. Raises `HeadRefused` for
    weights that are missing, left over, or of another shape than in the `config`."""
    offsets = tensors.pop("d2t", None)
    token_ids = None if offsets is None else ids_of(offsets)
    config, token_ids = restrict(config, token_ids, token_map, tensors, [LM_HEAD])
    _add_shared_weights(tensors, config, token_ids, target)
    head = EagleHead(config, token_ids, place, kept)
    if head.cuts:
        # The whole shapes first, as parts of wrong ones may fit.
        whole = EagleHead(config, token_ids, replace(IN_FP32, device=torch.device("meta"), latent=place.latent))
        check_weights(whole.slots(), TensorsInMemory(tensors).stored)
        tensors = {name: head.cuts[name].part(one) if name in head.cuts else one for name, one in tensors.items()}
    fill(head.slots(), tensors)
    return head.eval()


def save_head(
    head: EagleHead, folder: str | Path, record: Mapping[str, Any] | None = None, *, embedding: bool = False
) -> Path:
    """Write config.json, model.safetensors and, if there is a `record` of the training, training.json. The token
    embedding is the target's and left out, unless `embedding` is set. So is an lm_head that is the target's."""
    config, own = head.config, head.weights()
    assert isinstance(config, HeadConfig), "an MTP module is part of its target"
    if not embedding:
        del own[EMBEDDING]
    if config.tied_lm_head:
        del own[LM_HEAD]
    tensors = {published_name(name, config): tensor for name, tensor in own.items()}
    if head.token_ids is not None:
        tensors |= tensors_of(head.token_ids, config.vocab_size)
    return write_folder(folder, published_config(config), "model.safetensors", tensors, record)


def _add_shared_weights(
    tensors: dict[str, Tensor], config: LayeredShape, token_ids: Tensor | None, target: TargetCheckpoint | None
) -> None:
    """Add the target's embedding and lm_head where the head has none."""
    missing = [name for name in (EMBEDDING, LM_HEAD) if name not in tensors]
    if not missing:
        return
    if target is None:
        raise HeadRefused(
            f"the head has no {' and no '.join(missing)}: name its target to take them from (--embeddings)"
        )
    if config.hidden_size != config.target_hidden_size:
        raise HeadRefused(f"the head has no {missing[0]}, and the target's has another width")
    if EMBEDDING in missing:
        tensors[EMBEDDING] = target.embedding()
    if LM_HEAD in missing:
        rows = target.lm_head()
        tensors[LM_HEAD] = rows if token_ids is None else rows[token_ids]
