"""`python -m draft_service`: serve drafts until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import sys

from outrider.roles import missing_for
from outrider.runtime import leave, prepare_service
from outrider.standard_streams import exit_status, prepare_standard_streams


def main() -> int:
    """Serve; returns the process's exit status."""
    if missing := missing_for("draft"):
        sys.stderr.write(f"outrider draft: error: {missing}\n")
        return 1
    prepare_service()
    # Beside a target on the same cores, threads that wait for each other make a pass many times slower, and alone a
    # second one hardly helps a head. `--threads` asks for more. OpenMP reads this as torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # gRPC reads its environment as it is imported, and nearly everything here imports it.
    from draft_service.service import run_service

    return run_service(sys.argv[1:])


if __name__ == "__main__":
    prepare_standard_streams()
    leave(exit_status(main))
