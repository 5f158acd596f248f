"""Whole steps by the definition: a loop over sequences and rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.logit_shaping.layout import unpack_shaping
from tree_kernels.logit_shaping.reference import mask_row, shape_row
from tree_kernels.logit_shaping.types import StepToShape
from tree_kernels.verification.records import unpack_parameters


def shape(step: StepToShape, table: Tensor, out: Tensor, max_sequences: int) -> None:
    """See `DeviceShaper.shape`; `out` [R, V] fp32 is written."""
    out.copy_(step.logits[:, : out.shape[1]])
    tokens, page_size, *tables, page_table = step.texts
    starts, prefixes, first_pages = (each.tolist() for each in tables)
    records = unpack_parameters(step.parameters.cpu().numpy(), max_sequences)[: len(prefixes)]
    for b, record in enumerate(records):
        if not (record.rows and record.shaping):
            continue
        shaping = unpack_shaping(table[record.shaping - 1].cpu().numpy())
        first = record.first_row
        keys = torch.arange(prefixes[b] + first - starts[b] + 1, device=page_table.device)
        pages = page_table[first_pages[b] + keys // page_size]
        text = tokens[(pages * page_size + keys % page_size).long()].long()
        for row in range(record.rows):
            path: list[int] = []
            at = row
            while at > 0:
                path.insert(0, int(step.token_ids[first + at]))
                at = at - 1 if record.is_chain else int(step.parents[first + at])
            after = torch.cat([text, torch.tensor(path, dtype=torch.int64, device=text.device)])
            mask, logits = int(step.mask_rows[first + row]), step.logits[first + row, : out.shape[1]]
            shaped = shape_row(logits, shaping, after, holds=mask >= 0)
            out[first + row] = mask_row(shaped, step.masks[abs(mask) - 1]) if mask else shaped
