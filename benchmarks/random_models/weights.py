"""Random weights by the names of their tensors, of the same kind in every engine.

Token t is followed by token t + 7907, so that sequences that begin with
different tokens keep different ones, and rows choose different experts, whichever engine runs the shape.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

STANDARD_DEVIATION = 0.02
# Of the output embedding: large enough for a margin of dozens, small enough for bfloat16 to be finite by far.
OUTPUT_SCALE = 0.02
SHIFT = 7907
# What writes to the residual stream, under the names of checkpoints and of vLLM's layers.
_WRITERS = ("o_proj", "out_proj", "down_proj", "w2")
_EMBEDDINGS = ("embed_tokens.weight", "model.embedding.weight")


def fill(name: str, weight: Tensor, layers: int, embedding: Tensor | None = None) -> None:
    """Draw a tensor of a model of so many layers by its name, in place; for an lm_head `embedding` is the model's."""
    if weight.ndim == 1:
        # Norms are 1, biases 0.
        weight.fill_(float(name.endswith("norm.weight")))
        return
    if name.endswith("lm_head.weight") and embedding is not None:
        torch.mul(embedding.roll(SHIFT % len(embedding), dims=0), OUTPUT_SCALE, out=weight)
        return
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    if name.endswith(_EMBEDDINGS):
        weight.normal_(generator=generator)
        return
    part = name.removesuffix(".weight").removesuffix("_weight").rpartition(".")[2]
    weight.normal_(std=STANDARD_DEVIATION / (math.sqrt(2 * layers) if part in _WRITERS else 1.0), generator=generator)


@torch.no_grad()
def redraw(model: nn.Module, layers: int) -> int:
    """Draw all parameters of a loaded model of so many layers anew, in place. Returns how many."""
    named = [(name, weight.data) for name, weight in model.named_parameters() if weight.is_floating_point()]
    embedding = next((weight for name, weight in named if name.endswith(_EMBEDDINGS)), None)
    for name, weight in sorted(named, key=lambda one: one[0].endswith("lm_head.weight")):
        fill(name, weight, layers, embedding)
    return len(named)
