"""Medusa heads on disk, in safetensors: loaded from any published layout, saved in that of FasterDecoding.

- FasterDecoding's heads alone (Medusa-1): `medusa_lm_head.safetensors` with `{head}.{layer}.linear.weight`, `.bias` and
  `{head}.{layers}.weight`, the lm_head; config.json with `medusa_num_layers` and `base_model_name_or_path`. Its
  `medusa_num_heads` may be too small (2 where there are 5), so heads are counted by their weights.
- The same under `medusa_head.`, inside the target's own checkpoint (Medusa-2), whose other weights are left alone.
- vLLM: `blocks.{head}.layers.{layer}.weight`, often without bias, `lm_heads.{head}.weight`, and `token_map` [V'] for a
  vocabulary that was reduced.

What is saved says which tokens it can say as EAGLE heads do: `d2t` holds offsets, draft id i stands for i + d2t[i].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.eagle.checkpoint import RECORD
from draft_service.eagle.head_config import HeadRefused
from draft_service.eagle.target_checkpoint import TargetCheckpoint
from draft_service.eagle.weights import Weights
from draft_service.medusa.head import MedusaHead, MedusaShape, check_fits

# Heads by themselves, before the target's checkpoint that may lie beside them.
_FILES = ("medusa_lm_head.safetensors", "model.safetensors")
_PREFIX = re.compile(r"^(medusa_heads?|heads)\.(?=\d)")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
_VLLM_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_VLLM_LM_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")
_MAPS = ("d2t", "token_map")


def read_shape(source: str | Path) -> MedusaShape:
    """What the heads are, without loading their weights.

    Args:
        source: a folder with config.json and safetensors, or a hub id, which is fetched.

    Raises:
        HeadRefused: they cannot be read, or are not served; the message says why.
    """
    weights = _weights(source)
    return _shape(weights, _names(weights))


def load_heads(
    source: str | Path,
    *,
    target: TargetCheckpoint | None = None,
    token_map: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> MedusaHead:
    """Load heads of any layout.

    Args:
        source: a folder or a hub id.
        target: that the heads must fit, where it is known.
        token_map: target token ids, the only ones that the heads shall say; those that they do not know are left out.

    Raises:
        HeadRefused: see `read_shape`; or they do not fit the target.
    """
    weights = _weights(source)
    names = _names(weights)
    shape = _shape(weights, names)
    if target is not None:
        check_fits(shape, target.facts())
    token_ids = _token_ids(weights)
    tensors = {name: weights.tensor(published) for name, published in names.items()}
    if token_map is not None:
        shape, token_ids = _restrict(shape, token_ids, token_map, tensors)
    heads = MedusaHead(shape, token_ids)
    _fill(heads, tensors)
    return heads.to(device=device, dtype=dtype).requires_grad_(False).eval()


def save_heads(heads: MedusaHead, folder: str | Path, record: Mapping[str, Any] | None = None) -> Path:
    """Write config.json, medusa_lm_head.safetensors and, when there is a `record` of their training, training.json."""
    from safetensors.torch import save_file

    folder, shape = Path(folder), heads.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_PREFIX.sub("", name): tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    if heads.token_ids is not None:
        ids = heads.token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    config = {
        "model_type": "medusa",
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": shape.target,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "outrider": {
            "target": shape.target,
            "target_layers": shape.target_layers,
            "tokenizer_fingerprint": shape.tokenizer_fingerprint,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / _FILES[0]
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors lets nobody else read it, and the service that will may run as another user.
    path.chmod((folder / "config.json").stat().st_mode)
    if record is not None:
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return folder


def _weights(source: str | Path) -> Weights:
    return Weights(source, _FILES)


def neutral_name(name: str) -> tuple[int, int, str] | None:
    """Head, layer and part ("weight" or "bias" of a block, "lm_head", whose layer is -1) of a published weight; None
    for what is no part of a head."""
    name = _PREFIX.sub("", name)
    if match := _BLOCK.match(name) or _VLLM_BLOCK.match(name):
        return int(match[1]), int(match[2]), match[3]
    if match := _LM_HEAD.match(name) or _VLLM_LM_HEAD.match(name):
        return int(match[1]), -1, "lm_head"
    return None


def _names(weights: Weights) -> dict[str, str]:
    """Name in `MedusaHead` -> published name."""
    found = {part: name for name in weights.names if (part := neutral_name(name)) is not None}
    blocks = [layer for _, layer, part in found if part == "weight"]
    if not any(part == "lm_head" for _, _, part in found):
        architectures = ", ".join(map(str, weights.config.get("architectures") or ())) or "no architecture"
        raise HeadRefused(f"no Medusa heads: {architectures}, and no head's lm_head among the weights")
    layers = 1 + max(blocks, default=-1)
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
    said, hidden = weights.shape(lm_head)
    mapped = any(name in weights.names for name in _MAPS)
    if mapped and not config.get("vocab_size"):
        raise HeadRefused("the heads' vocabulary was reduced, and config.json does not say the target's vocab_size")
    return MedusaShape(
        hidden_size=hidden,
        # Heads that say every token know their vocabulary better than a config.json that may be another's.
        vocab_size=int(config["vocab_size"]) if mapped else said,
        draft_vocab_size=said,
        num_heads=num_heads,
        num_layers=num_layers,
        target=str(own.get("target") or config.get("base_model_name_or_path") or ""),
        target_layers=int(own.get("target_layers") or _layers_of_target(config)),
        tokenizer_fingerprint=str(own.get("tokenizer_fingerprint", "")),
    )


def _layers_of_target(config: Mapping[str, Any]) -> int:
    """The decoder layers that config.json names where it is the target's own, with heads beside or inside; else 0. In
    vLLM's, whose type is medusa, the same entry counts residual blocks."""
    return int(config.get("num_hidden_layers") or 0) if config.get("model_type") not in (None, "", "medusa") else 0


def _token_ids(weights: Weights) -> Tensor | None:
    """[V'] target ids."""
    if "d2t" in weights.names:
        offsets = weights.tensor("d2t").long()
        return offsets + torch.arange(len(offsets))
    return weights.tensor("token_map").long() if "token_map" in weights.names else None


def _restrict(
    shape: MedusaShape, token_ids: Tensor | None, token_map: Sequence[int], tensors: dict[str, Tensor]
) -> tuple[MedusaShape, Tensor]:
    """The heads with a smaller vocabulary; their lm_heads in `tensors` are cut in place."""
    wanted = torch.tensor(sorted(set(token_map)), dtype=torch.int64)
    known = torch.arange(shape.vocab_size) if token_ids is None else token_ids
    rows = torch.isin(known, wanted).nonzero()[:, 0]
    if not len(rows):
        raise HeadRefused("the token map names no token that the heads know")
    for head in range(shape.num_heads):
        name = f"heads.{head}.{shape.num_layers}.weight"
        if name in tensors:
            tensors[name] = tensors[name][rows]
    return replace(shape, draft_vocab_size=len(rows)), known[rows]


def _fill(heads: MedusaHead, tensors: dict[str, Tensor]) -> None:
    own = heads.state_dict()
    for name in own.keys() - tensors.keys():
        # vLLM's blocks may have none.
        if name.endswith(".linear.bias"):
            tensors[name] = torch.zeros_like(own[name])
    unknown, missing = sorted(tensors.keys() - own.keys()), sorted(own.keys() - tensors.keys())
    if unknown or missing:
        raise HeadRefused(f"weights that do not fit: unknown {unknown or 'none'}, missing {missing or 'none'}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise HeadRefused(f"{name} has shape {list(tensor.shape)}, the heads ask for {list(own[name].shape)}")
    heads.load_state_dict(tensors)
