"""The fixed trees of Medusa's code: the ranks of each head that its candidates use.

From `medusa/model/medusa_choices.py` of github.com/FasterDecoding/Medusa (Apache-2.0), where they were found by adding
the nodes accepted most often on calibration text (section 2.3.3 of arXiv 2401.10774): `mc_sim_7b_63` for Medusa-1, the
others for the Medusa-2 heads of the model in their name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers

# A word for each node: the ranks on the path from the root to it, one digit each.
_PATHS = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 "
        "004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 "
        "16 070"
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 "
        "7 030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 "
        "050 31 0020 70 14"
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 "
        "0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 "
        "013 102 0011 300 1000"
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 "
        "030 005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 "
        "009 31 102 22"
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 "
        "011 004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 "
        "0010 41 23"
    ),
}


class FixedTree(NamedTuple):
    """A fixed tree, parents first. Row 0 is the root."""

    parents: Numbers  # [1 + nodes] rows
    ranks: Numbers  # [1 + nodes] rank of each node's token among those of its depth
    depths: Numbers  # [1 + nodes]

    @property
    def depth(self) -> int:
        return int(self.depths.max())

    @classmethod
    def of(cls, paths: str) -> FixedTree:
        words = ["", *paths.split()]
        rows = {word: row for row, word in enumerate(words)}
        return cls(
            np.array([rows[word[:-1]] for word in words], np.int32),
            np.array([int(word[-1]) if word else 0 for word in words], np.int32),
            np.array([len(word) for word in words], np.int32),
        )


FIXED_TREES: Mapping[str, FixedTree] = MappingProxyType({name: FixedTree.of(paths) for name, paths in _PATHS.items()})
