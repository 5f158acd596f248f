"""Tree attention over a paged KV cache: `plan` once per step, `run` once per layer."""

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan, plan_integers
from tree_kernels.attention.dispatch import Backend, TreeAttention
from tree_kernels.attention.reference import attend, sequence_mask, sequence_slots
from tree_kernels.attention.tree_mask import ancestor_mask

__all__ = [
    "AttentionBatch",
    "AttentionPlan",
    "Backend",
    "TreeAttention",
    "ancestor_mask",
    "attend",
    "plan_integers",
    "sequence_mask",
    "sequence_slots",
]
