"""The definition: one row's logits, shaped and masked."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.logit_shaping.layout import LARGEST, Shaping


def shape_row(logits: Tensor, shaping: Shaping, text: Tensor, *, holds: bool = True) -> Tensor:
    """Logits [V] of any floating dtype in fp32, shaped for the token after `text` [tokens] int64: prompt, output and,
    in a tree, the row's path; without `holds` no token is held back. New memory."""
    values = logits.to(torch.float32, copy=True)
    generated = text[shaping.prompt_length :]
    if shaping.biases:
        tokens = torch.tensor(list(shaping.biases), device=values.device)
        values[tokens] += torch.tensor(list(shaping.biases.values()), device=values.device)
    if shaping.repetition != 1:
        seen = torch.unique(text)
        wide = values[seen].double()
        scaled = torch.where(wide > 0, wide / shaping.repetition, wide * shaping.repetition)
        # Any finite penalty is legal; an infinite logit would make the distribution undefined.
        values[seen] = scaled.clamp(-LARGEST, LARGEST).float()
    if shaping.penalises:
        tokens, times = torch.unique(generated, return_counts=True)
        presence, frequency = (torch.tensor(each, dtype=torch.float32) for each in shaping[1:3])
        values[tokens] -= (presence.double() + frequency.double() * times.double().cpu()).float().to(values.device)
    if holds and len(generated) < shaping.min_tokens:
        values[torch.tensor(tuple(shaping.held), dtype=torch.int64, device=values.device)] = -torch.inf
    return values


def mask_row(logits: Tensor, words: Tensor) -> Tensor:
    """Logits [V] fp32 with no probability for tokens that a mask does not allow: bit `token % 32` of `words[token //
    32]`, int32 [V / 32, rounded up]. What is no finite number stays, so that it is noticed. New memory."""
    token = torch.arange(len(logits), device=logits.device)
    allowed = (words[token // 32] >> (token % 32) & 1).bool()
    return torch.where(allowed | logits.isnan() | logits.isposinf(), logits, -torch.inf)
