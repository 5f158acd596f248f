"""`python -m draft_service`: serve drafts until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import sys

from outrider.runtime import leave, prepare_service


def main() -> int:
    """Serve; returns the process's exit status."""
    prepare_service()
    # Beside a target on the same cores, threads that wait for each other make a pass many times slower, and alone a
    # second one hardly helps a head. `--threads` asks for more. OpenMP reads this as torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # gRPC reads its environment as it is imported, and nearly everything here imports it.
    from draft_service.service import run_service

    return run_service(sys.argv[1:])


if __name__ == "__main__":
    leave(main())
