"""Lossless verification of token trees: its parameters, its definition, and its kernels."""

from tree_kernels.verification.dispatch import DeviceVerifier, Verdicts
from tree_kernels.verification.kv_move import move_accepted, move_kv
from tree_kernels.verification.records import (
    MAX_SUPPORT,
    MODE,
    POSITION,
    RECORD,
    ROWS,
    Mode,
    RowsToVerify,
    pack_distributions,
    pack_parameters,
    parameter_count,
    records_of,
    unpack_distributions,
    unpack_parameters,
)
from tree_kernels.verification.walks import (
    CoinChance,
    Walk,
    coupled_token,
    match_walk,
    rejection_walk,
    rejection_walk_with,
)

__all__ = [
    "MAX_SUPPORT",
    "MODE",
    "POSITION",
    "RECORD",
    "ROWS",
    "CoinChance",
    "DeviceVerifier",
    "Mode",
    "RowsToVerify",
    "Verdicts",
    "Walk",
    "coupled_token",
    "match_walk",
    "move_accepted",
    "move_kv",
    "pack_distributions",
    "pack_parameters",
    "parameter_count",
    "records_of",
    "rejection_walk",
    "rejection_walk_with",
    "unpack_distributions",
    "unpack_parameters",
]
