"""MTP modules on disk: loaded from the checkpoint of their target. safetensors only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.checkpoints.weights import Weights
from draft_service.eagle.checkpoint import make_head
from draft_service.eagle.deepseek_layers import Router
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.mtp.layouts import MtpLayout, mtp_config, mtp_layout, mtp_names


def read_mtp_config(source: str | Path) -> HeadConfig:
    """What the first MTP module of a target is, without loading its weights.

    Args:
        source: the target's folder with config.json and safetensors, or a hub id, of which only files that hold the
            module are fetched.

    Raises:
        HeadRefused: it has no such module, or one that is not served; the message says why.
    """
    return _mtp(Weights(source))[1]


def load_mtp(
    source: str | Path,
    *,
    token_map: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> EagleHead:
    """Load the first MTP module of a target as a head, in any layout of `draft_service.mtp.layouts`.

    Embedding and lm_head are the target's where the module has none of its own.

    Args:
        source: see `read_mtp_config`.
        token_map: target token ids, the only ones that the head shall say.

    Raises:
        HeadRefused: see `read_mtp_config`; or its weights do not fit config.json.
    """
    weights = Weights(source)
    layout, config, names = _mtp(weights)
    tensors = weights.tensors(names)
    if layout.state_first:
        state, embedding = tensors["fc.weight"].chunk(2, dim=1)
        tensors["fc.weight"] = torch.cat([embedding, state], dim=1)
    head = make_head(config, tensors, TargetCheckpoint(source), token_map).to(device=device, dtype=dtype)
    for name, module in head.named_modules():
        if isinstance(module, Router):
            module.to_exact(tensors[f"{name}.e_score_correction_bias"])
    return head


def _mtp(weights: Weights) -> tuple[MtpLayout, HeadConfig, dict[str, str]]:
    """Layout of the first MTP module, what it is, and its weights' neutral and published names."""
    layout = mtp_layout(weights.config, weights.names)
    names = mtp_names(layout, weights.names)
    return layout, mtp_config(weights.config, weights.shapes(names)), names
