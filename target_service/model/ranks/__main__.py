"""`python -m target_service.model.ranks FD`: one rank, started by the leading one at the other end of FD."""

from __future__ import annotations

import sys

from target_service.model.ranks.following import follow

if __name__ == "__main__":
    follow(int(sys.argv[1]))
