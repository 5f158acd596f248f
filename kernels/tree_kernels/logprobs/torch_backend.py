"""The definition: a loop over sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.logprobs.layout import IDS, VALUES
from tree_kernels.verification.dispatch import Verdicts
from tree_kernels.verification.records import TOKEN_BITS, unpack_parameters


def gather(logits: Tensor, token_ids: Tensor, parameters: Tensor, verdicts: Verdicts, found: Tensor) -> None:
    """See `DeviceLogprobs.gather`; logits [R, V]."""
    counts, accepted, following = (
        each.tolist() for each in (verdicts.accepted_counts, verdicts.accepted_rows, verdicts.next_tokens)
    )
    for b, record in enumerate(unpack_parameters(parameters.cpu().numpy(), len(counts))):
        if not (record.rows and record.logprobs):
            continue
        first, listed = record.first_row, min(record.logprobs - 1, logits.shape[1])
        path = accepted[first : first + counts[b]]
        rows = first + torch.tensor([0, *path], device=logits.device)
        last = torch.tensor([following[b] & TOKEN_BITS], device=logits.device)
        tokens = torch.cat([token_ids[rows[1:]].long(), last.long()])
        logprobs = torch.log_softmax(logits[rows], dim=-1, dtype=torch.float32)
        # In order of their ids among equals.
        order = torch.sort(logits[rows].float(), dim=-1, descending=True, stable=True).indices[:, :listed]
        out = found[first : first + len(rows)]
        out[:, 0] = logprobs.gather(1, tokens[:, None])[:, 0].view(torch.int32)
        out[:, IDS : IDS + listed] = order.int()
        out[:, VALUES : VALUES + listed] = logprobs.gather(1, order).view(torch.int32)
