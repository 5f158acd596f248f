"""Medusa heads on disk, in safetensors: loaded from any published layout, saved in that of FasterDecoding.

- FasterDecoding's heads alone (Medusa-1): `medusa_lm_head.safetensors` with `{head}.{layer}.linear.weight`, `.bias` and
  `{head}.{layers}.weight`, the lm_head; config.json with `medusa_num_layers` and `base_model_name_or_path`. Its
  `medusa_num_heads` may be too small (2 where there are 5), so heads are counted by their weights.
- The same under `medusa_head.` in the target's own checkpoint (Medusa-2), whose other weights are ignored.
- vLLM: `blocks.{head}.layers.{layer}.weight`, often without bias, `lm_heads.{head}.weight`, and `token_map` [V'] for a
  vocabulary that was reduced.

Saved heads have their draft vocabulary as EAGLE heads do (`draft_service.checkpoints.vocabulary`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.checkpoints.facts import architectures_of
from draft_service.checkpoints.files import fill, write_folder
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.checkpoints.vocabulary import ids_of, restrict, tensors_of
from draft_service.eagle.head import IN_FP32
from draft_service.medusa.head import MedusaHead, MedusaShape
from outrider.heads import MEDUSA_FILES, HeadRefused
from outrider.weights import Weights
from tree_models.layers.placing import Placement
from tree_models.slots import specs_of

_PREFIX = re.compile(r"^(medusa_heads?|heads)\.(?=\d)")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
_VLLM_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_VLLM_LM_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


class MedusaCheckpoint:
    """Heads in any published layout, and `config`, their shape."""

    def __init__(self, source: str | Path) -> None:
        """`source` is a folder with config.json and safetensors, or a hub id, which is fetched. Loads no weights.
        Raises `HeadRefused` if the heads cannot be read, or are not supported."""
        self._weights = Weights(source, MEDUSA_FILES)
        self._names = _names(self._weights)
        self.config = _shape(self._weights, self._names)

    def load(
        self,
        place: Placement = IN_FP32,
        *,
        target: TargetCheckpoint | None = None,
        token_map: Sequence[int] | None = None,
    ) -> MedusaHead:
        """Load the heads. Raises `HeadRefused` if they do not fit the `target`. With a `token_map` of target ids only
        these are drafted; those that the heads do not have are ignored."""
        shape, tensors = self.config, self._weights.tensors(self._names)
        if target is not None:
            target.check_fits(shape)
        lm_heads = [f"heads.{head}.{shape.num_layers}.weight" for head in range(shape.num_heads)]
        shape, token_ids = restrict(shape, _token_ids(self._weights), token_map, tensors, lm_heads)
        heads = MedusaHead(shape, token_ids, place)
        slots = heads.slots()
        for name, spec in specs_of(slots).items():
            # vLLM's blocks may have no bias.
            if name.endswith(".linear.bias"):
                tensors.setdefault(name, torch.zeros(spec.shape))
        fill(slots, tensors)
        return heads.eval()


def save_heads(heads: MedusaHead, folder: str | Path, record: Mapping[str, Any] | None = None) -> Path:
    """Write config.json, medusa_lm_head.safetensors and, if there is a `record` of the training, training.json."""
    shape = heads.config
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in heads.weights().items()}
    if heads.token_ids is not None:
        tensors |= tensors_of(heads.token_ids, shape.vocab_size)
    config = {
        "model_type": "medusa",
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": shape.target,
        "hidden_size": shape.target_hidden_size,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "outrider": {
            "target": shape.target,
            "target_layers": shape.target_layers,
            "tokenizer_fingerprint": shape.tokenizer_fingerprint,
        },
    }
    return write_folder(folder, config, MEDUSA_FILES[0], tensors, record)


def neutral_name(name: str) -> tuple[int, int, str] | None:
    """Head, layer and part of a published weight; None for other weights. The part is "weight" or "bias" of a block, or
    "lm_head" with layer -1."""
    name = _PREFIX.sub("", name)
    if match := _BLOCK.match(name) or _VLLM_BLOCK.match(name):
        return int(match[1]), int(match[2]), match[3]
    if match := _LM_HEAD.match(name) or _VLLM_LM_HEAD.match(name):
        return int(match[1]), -1, "lm_head"
    return None


def _names(weights: Weights) -> dict[str, str]:
    """Name in `MedusaHead` -> published name, of all weights of heads."""
    found = {part: name for name in weights.names if (part := neutral_name(name)) is not None}
    if not any(part == "lm_head" for _, _, part in found):
        architectures = architectures_of(weights.config)
        raise HeadRefused(f"no Medusa heads: {architectures}, and no head's lm_head among the weights")
    layers = 1 + max((layer for _, layer, part in found if part == "weight"), default=-1)
    return {
        f"heads.{head}.{layers}.weight" if part == "lm_head" else f"heads.{head}.{layer}.linear.{part}": name
        for (head, layer, part), name in found.items()
    }


def _shape(weights: Weights, names: Mapping[str, str]) -> MedusaShape:
    config = weights.config
    own = config.get("outrider") or {}
    num_heads = 1 + max(int(name.split(".")[1]) for name in names)
    num_layers = max(int(name.split(".")[2]) for name in names)
    lm_head = names.get(f"heads.0.{num_layers}.weight")
    if lm_head is None:
        raise HeadRefused("the first of the heads has no lm_head")
    rows, hidden = weights.shape(lm_head)
    mapped = any(name in weights.names for name in ("d2t", "token_map"))
    if mapped and not config.get("vocab_size"):
        raise HeadRefused("the heads' vocabulary was reduced, and config.json has no vocab_size of the target")
    return MedusaShape(
        target_hidden_size=hidden,
        # With the whole vocabulary, weights are more reliable than a config.json that may be another model's.
        vocab_size=int(config["vocab_size"]) if mapped else rows,
        draft_vocab_size=rows,
        num_heads=num_heads,
        num_layers=num_layers,
        target=str(own.get("target") or config.get("base_model_name_or_path") or ""),
        target_layers=int(own.get("target_layers") or _layers_of_target(config)),
        tokenizer_fingerprint=str(own.get("tokenizer_fingerprint", "")),
    )


def _layers_of_target(config: Mapping[str, Any]) -> int:
    """The decoder layers in a config.json of the target; 0 for one of the heads alone. In vLLM's, of type medusa, the
    same entry counts residual blocks."""
    return int(config.get("num_hidden_layers") or 0) if config.get("model_type") not in (None, "", "medusa") else 0


def _token_ids(weights: Weights) -> Tensor | None:
    """[V'] target ids of the draft vocabulary; None for all."""
    if "d2t" in weights.names:
        return ids_of(weights.tensor("d2t"))
    return weights.tensor("token_map").long() if "token_map" in weights.names else None
