"""`python -m target_service.engine_process FD`: runs the engine for the serving process at the other end of FD."""

from __future__ import annotations

import sys

from outrider.runtime import collect_seldom, leave, switch_threads_often
from target_service.engine_process.server import build, serve_engine

if __name__ == "__main__":
    collect_seldom()
    switch_threads_often()
    leave(serve_engine(int(sys.argv[1]), build))
