"""Heads on disk: loaded from any published layout, saved in that of SGLang and SpecForge. safetensors only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig, HeadRefused, check_fits
from draft_service.eagle.layouts import head_config, module_name, neutral_name, published_config, published_name
from draft_service.eagle.target_checkpoint import TargetCheckpoint
from draft_service.eagle.weights import Weights
from outrider.heads import weight_fingerprint

RECORD = "training.json"
_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


def read_config(source: str | Path) -> HeadConfig:
    """What a head is, without loading its weights.

    Args:
        source: a folder with config.json and safetensors, or a hub id, which is fetched.

    Raises:
        HeadRefused: it cannot be read, or is not served; the message says why.
    """
    weights = Weights(source)
    shapes = {name: weights.shape(published) for name, published in _names(weights).items()}
    return head_config(weights.config, shapes)


def load_head(
    source: str | Path,
    *,
    target: TargetCheckpoint | None = None,
    token_map: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> EagleHead:
    """Load a head of any layout (`draft_service.eagle.layouts`).

    Args:
        source: a folder or a hub id.
        target: where the token embedding comes from, and the lm_head of a head that has none.
        token_map: target token ids, the only ones that the head shall say (FR-Spec, arXiv 2502.14856); those that it
            does not know are left out.

    Raises:
        HeadRefused: see `read_config`; or it does not fit the target, or needs a target and there is none.
    """
    weights = Weights(source)
    names = _names(weights)
    config = head_config(weights.config, {name: weights.shape(published) for name, published in names.items()})
    if target is not None:
        check_fits(config, target.facts(fingerprint=bool(config.tokenizer_fingerprint)))
    tensors = {name: weights.tensor(published) for name, published in names.items()}
    return make_head(config, tensors, target, token_map).to(device=device, dtype=dtype)


def make_head(
    config: HeadConfig, tensors: dict[str, Tensor], target: TargetCheckpoint | None, token_map: Sequence[int] | None
) -> EagleHead:
    """The head of loaded weights, in fp32 on the CPU.

    Args:
        tensors: by neutral name; they are cut and added to in place.
        target: see `load_head`.
        token_map: see `load_head`.

    Raises:
        HeadRefused: weights are missing, unknown, or of another shape than `config` says.
    """
    token_ids = _token_ids(tensors.pop("d2t", None), config)
    if token_map is not None:
        config, token_ids = _restrict(config, token_ids, token_map, tensors)
    _borrow(tensors, config, token_ids, target)
    head = EagleHead(config, token_ids)
    _fill(head, {module_name(name, config): tensor for name, tensor in tensors.items()})
    return head.requires_grad_(False).eval()


def save_head(
    head: EagleHead, folder: str | Path, record: Mapping[str, Any] | None = None, *, embedding: bool = False
) -> Path:
    """Write config.json, model.safetensors and, when there is a `record` of its training, training.json.

    The token embedding is left out unless asked for: it is the target's. So is an lm_head that is the target's.
    """
    from safetensors.torch import save_file

    folder, config = Path(folder), head.config
    folder.mkdir(parents=True, exist_ok=True)
    left_out = {name for name, left in ((_EMBEDDING, not embedding), (_LM_HEAD, config.tied_lm_head)) if left}
    tensors = {
        published_name(name, config): tensor.detach().cpu().contiguous()
        for name, tensor in head.state_dict().items()
        if name not in left_out
    }
    if head.token_ids is not None:
        ids = head.token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    (folder / "config.json").write_text(json.dumps(published_config(config), indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors lets nobody else read it, and the service that will may run as another user.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    if record is not None:
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return folder


def projection_fingerprint(source: str | Path) -> str:
    """The fingerprint of the weight that fuses hidden states, by which a target knows its copy of the head.

    Raises:
        HeadRefused: see `read_config`.
    """
    weights = Weights(source)
    return weight_fingerprint(weights.tensor(_names(weights)["fc.weight"]))


def read_token_map(path: str | Path) -> tuple[int, ...]:
    """Target token ids from a JSON list, or from a safetensors file with one tensor of integers.

    Raises:
        HeadRefused: another kind of file, or none.
    """
    from safetensors.torch import load_file

    path = Path(path)
    if path.suffix not in (".json", ".safetensors"):
        raise HeadRefused(f"{path.name}: a token map is a JSON list or a safetensors file, never a pickle")
    try:
        if path.suffix == ".json":
            return tuple(int(token) for token in json.loads(path.read_text()))
        (ids,) = load_file(path).values()
        return tuple(ids.flatten().tolist())
    except (OSError, ValueError, TypeError) as error:
        raise HeadRefused(f"{path.name} is no token map: {error}") from None


def _names(weights: Weights) -> dict[str, str]:
    """Neutral name -> published name."""
    return {name: published for published in weights.names if (name := neutral_name(published)) is not None}


def _token_ids(offsets: Tensor | None, config: HeadConfig) -> Tensor | None:
    """[V'] target ids. `d2t` holds offsets: draft id i stands for i + d2t[i]."""
    if offsets is None:
        return None
    return offsets.long() + torch.arange(config.draft_vocab_size)


def _restrict(
    config: HeadConfig, token_ids: Tensor | None, token_map: Sequence[int], tensors: dict[str, Tensor]
) -> tuple[HeadConfig, Tensor]:
    """The head with a smaller vocabulary; its lm_head in `tensors` is cut in place."""
    wanted = torch.tensor(sorted(set(token_map)), dtype=torch.int64)
    known = torch.arange(config.vocab_size) if token_ids is None else token_ids
    rows = torch.isin(known, wanted).nonzero()[:, 0]
    if not len(rows):
        raise HeadRefused("the token map names no token that the head knows")
    if _LM_HEAD in tensors:
        tensors[_LM_HEAD] = tensors[_LM_HEAD][rows]
    return replace(config, draft_vocab_size=len(rows)), known[rows]


def _borrow(
    tensors: dict[str, Tensor], config: HeadConfig, token_ids: Tensor | None, target: TargetCheckpoint | None
) -> None:
    """Take from the target what the head does not carry."""
    missing = [name for name in (_EMBEDDING, _LM_HEAD) if name not in tensors]
    if missing and target is None:
        raise HeadRefused(
            f"the head has no {' and no '.join(missing)}: name its target to take them from (--embeddings)"
        )
    if missing and target is not None and config.hidden_size != config.target_hidden_size:
        raise HeadRefused(f"the head has no {missing[0]}, and the target's has another width")
    if target is not None and _EMBEDDING in missing:
        tensors[_EMBEDDING] = target.embedding()
    if target is not None and _LM_HEAD in missing:
        rows = target.lm_head()
        tensors[_LM_HEAD] = rows if token_ids is None else rows[token_ids]


def _fill(head: EagleHead, tensors: Mapping[str, Tensor]) -> None:
    own = head.state_dict()
    unknown, missing = sorted(tensors.keys() - own.keys()), sorted(own.keys() - tensors.keys())
    if unknown or missing:
        raise HeadRefused(f"weights that do not fit: unknown {unknown or 'none'}, missing {missing or 'none'}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise HeadRefused(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(own[name].shape)}")
    head.load_state_dict(tensors)
