"""Tree attention over a paged KV cache: `plan` once per step, `run` once per layer."""

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan, plan_integers
from tree_kernels.attention.dispatch import Backend, TreeAttention
from tree_kernels.attention.reference import attend, sequence_mask, sequence_slots
from tree_kernels.attention.tree_mask import ancestor_mask
from tree_kernels.attention.variant import PLAIN, AttentionVariant

__all__ = [
    "PLAIN",
    "AttentionBatch",
    "AttentionPlan",
    "AttentionVariant",
    "Backend",
    "TreeAttention",
    "ancestor_mask",
    "attend",
    "plan_integers",
    "sequence_mask",
    "sequence_slots",
]
