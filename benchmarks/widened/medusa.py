"""Writes Medusa heads of a small model for the same model in a larger shape (`benchmarks.widened.model`).

    python -m benchmarks.widened.medusa HEADS MODEL OUT_HEADS [--device cuda]

MODEL is the folder of the large model. The state after its last norm is the small model's, followed by zeros; so a
residual block is put in the first dimensions, and adds nothing to the others.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.widened.model import CannotWiden, DecoderShape, Widening
from draft_service.checkpoints.files import fill
from draft_service.eagle.head import IN_FP32
from draft_service.medusa.checkpoint import MedusaCheckpoint, save_heads
from draft_service.medusa.head import MedusaHead
from outrider.heads import head_source


def widen_medusa(source: str, wide_model: Path, folder: Path, device: str, dtype: torch.dtype) -> MedusaHead:
    """Write the heads for `wide_model`, the folder of a widened model, and return them, on the CPU.

    Raises:
        CannotWiden: the large model is narrower than the heads.
    """
    small = MedusaCheckpoint(source).load()
    shape = DecoderShape.of_model(json.loads((wide_model / "config.json").read_text()))
    target = str(wide_model.resolve())
    config = replace(small.config, target_hidden_size=shape.hidden, target=target, target_layers=shape.layers)
    wide = MedusaHead(config, small.token_ids, replace(IN_FP32, dtype=dtype))
    fill(wide.slots(), wide_heads(small, shape, device, dtype))
    save_heads(wide, folder)
    return wide.eval()


def wide_heads(small: MedusaHead, shape: DecoderShape, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of the large heads, on the CPU. Raises `CannotWiden`."""
    width = small.config.target_hidden_size
    if width > shape.hidden:
        raise CannotWiden(f"hidden: {width} does not fit into {shape.hidden}")
    widening = Widening(replace(shape, hidden=width), shape, device, dtype)
    tensors = {}
    for name, weight in small.weights().items():
        if name.endswith(".bias"):
            wide = widening.zeros(shape.hidden)
            wide[:width] = weight
        elif name.endswith(".linear.weight"):
            live = widening.live
            wide = widening.matrix(weight, (shape.hidden, shape.hidden), live, live, live)
        else:
            wide = widening.lm_head(weight)
        tensors[name] = wide.cpu()
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="folder of the small model's Medusa heads, or a hub id")
    parser.add_argument("model", type=Path, help="folder of the large model")
    parser.add_argument("out_heads", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    widen_medusa(str(head_source(options.heads)), options.model, options.out_heads, options.device, dtype)


if __name__ == "__main__":
    main()
