"""Verification of token trees: its parameters, its definition, and its kernels."""

from tree_kernels.verification.dispatch import DeviceVerifier, Verdicts
from tree_kernels.verification.kv_move import keep_accepted, move_accepted, move_kv
from tree_kernels.verification.records import (
    DRAWN_BY_POSITION,
    NOT_FINITE,
    RECORD,
    TOKEN_BITS,
    Mode,
    RowsToVerify,
    parameter_count,
    records_of,
)
from tree_kernels.verification.typical import typical_walk
from tree_kernels.verification.walks import Chance, Walk, coupled_token, match_walk, rejection_walk

__all__ = [
    "DRAWN_BY_POSITION",
    "NOT_FINITE",
    "RECORD",
    "TOKEN_BITS",
    "Chance",
    "DeviceVerifier",
    "Mode",
    "RowsToVerify",
    "Verdicts",
    "Walk",
    "coupled_token",
    "keep_accepted",
    "match_walk",
    "move_accepted",
    "move_kv",
    "parameter_count",
    "records_of",
    "rejection_walk",
    "typical_walk",
]
