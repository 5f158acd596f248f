"""Moves steps on with the Triton kernels of `node_table` and writes what became of them as JSON to standard output."""

from __future__ import annotations

import json
import sys

from random_tables import CASES, shifted_by_accepted


def main() -> None:
    json.dump([shifted_by_accepted(case, place, "triton") for place, case in enumerate(CASES)], sys.stdout)


if __name__ == "__main__":
    main()
