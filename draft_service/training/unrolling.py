"""A head's predictions for every row of a text at every depth: Medusa heads in one pass, an EAGLE head step by step.

For EAGLE this is EAGLE-3's training-time test (arXiv 2503.01840): the head reads its own features, as in drafting.

Row i of step 0 pairs the target's feature of token i with token i + 1, at rotary position i. Row i of step s pairs the
feature that row i of step s - 1 put out with token i + 1 + s, at position i + s: it is the s-th node below the root
i + 1 of a draft whose first s guesses were right. It attends to what that node would: the target's rows 0 .. i, the
rows i of earlier steps, and itself.

Medusa's head s predicts the same token i + 2 + s for row i, from the target's feature of token i alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from draft_service.eagle.head import EagleHead
from draft_service.medusa.head import MedusaHead
from tree_models.layers.paged import UncachedPass
from tree_models.spec import AttentionSpec

# The heads that can be trained.
Head = EagleHead | MedusaHead


def lm_inputs(head: Head, states: Tensor, token_ids: Tensor, steps: int) -> Tensor:
    """Inputs of the lm_heads for every row of every step: [steps, B, L, H]. Arguments as in `unroll`; of Medusa heads
    the first `steps` are run."""
    if isinstance(head, MedusaHead):
        return head.lm_input(states)[:steps]
    return unroll(head, states, token_ids, steps)


def lm_heads(head: Head) -> tuple[Tensor, ...]:
    """Weights [V', H] of each step's lm_head, or of the one for all steps."""
    if isinstance(head, MedusaHead):
        return tuple(one.weight for one in head.lm_heads)
    return (head.lm_head.weight,)


def unroll(head: EagleHead, states: Tensor, token_ids: Tensor, steps: int) -> Tensor:
    """Inputs of `EagleHead.logits` for every row of every step: [steps, B, L, H]. Rows whose token would be past the
    end of the text read token 0; their output is meaningless. `states` [B, L, F * W] are the target's hidden states,
    `token_ids` [B, L] int64."""
    length = token_ids.shape[1]
    positions = torch.arange(length, device=token_ids.device).expand_as(token_ids).flatten()
    spec = head.layer_specs[0].attention
    window = spec.window if isinstance(spec, AttentionSpec) else None
    attention = UnrolledAttention(len(token_ids), length, token_ids.device, window)
    features = head.project(states).flatten(0, 1)
    lm_input = []
    for step in range(steps):
        shifted = functional.pad(token_ids[:, 1 + step :], (0, min(1 + step, length)))
        output = head(shifted.flatten(), features, positions + step, attention)
        features = output.carried
        lm_input.append(output.lm_input.unflatten(0, token_ids.shape))
        attention.next_step()
    return torch.stack(lm_input)


class UnrolledAttention(UncachedPass):
    """Attention over the keys of all steps so far: causal over those of step 0, row by row over the later ones, and of
    both those within a window if there is one. The keys of all steps are concatenated under one mask, which a fused
    kernel takes: no scores are stored, and the masked work is small beside the head's matrix products."""

    def __init__(self, texts: int, length: int, device: torch.device, window: int | None = None) -> None:
        self._step, self._shape, self._window = 0, (texts, length), window
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        # [L, (step + 1) * L]
        self._mask = self._seen(device)

    def next_step(self) -> None:
        """Move on to the next step, once every layer has attended."""
        self._step += 1
        self._mask = self._seen(self._mask.device)

    def _seen(self, device: torch.device) -> Tensor:
        """[L, (step + 1) * L] the keys that each row sees, those of step 0 first."""
        rows = torch.arange(self._shape[1], device=device)
        before = rows[None] <= rows[:, None]
        if self._window is not None:
            before &= rows[None] > rows[:, None] + self._step - self._window
        # A row of each step stands one behind that of the step before.
        within = [self._window is None or step > self._step - self._window for step in range(1, self._step + 1)]
        diagonal = rows[None] == rows[:, None]
        return torch.cat([before, *(diagonal & seen for seen in within)], dim=1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [B * L, Hq, D], key and value [B * L, Hkv, D] -> [B * L, Hq, D]."""
        query, key, value = (part.view(*self._shape, *part.shape[1:]) for part in (query, key, value))
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        group = query.shape[2] // key.shape[2]
        # Repeated, since kernels that take a mask do not take grouped heads.
        keys.append(key.repeat_interleave(group, dim=2).transpose(1, 2))
        values.append(value.repeat_interleave(group, dim=2).transpose(1, 2))
        rows = query.transpose(1, 2)
        # A new head's window is as long as its longest text, and hides nothing in step 0.
        if self._step == 0 and (self._window is None or self._window >= self._shape[1]):
            out = functional.scaled_dot_product_attention(rows, keys[0], values[0], is_causal=True, scale=scaling)
        else:
            with _kernels_that_take_masks(query.device):
                out = functional.scaled_dot_product_attention(
                    rows, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=self._mask, scale=scaling
                )
        return out.transpose(1, 2).flatten(0, 1)


@contextlib.contextmanager
def _kernels_that_take_masks(device: torch.device) -> Iterator[None]:
    """Prefer the memory-efficient kernel on a GPU: the other fused ones take no mask, or give no gradient with one."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield
