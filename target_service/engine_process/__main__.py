"""`python -m target_service.engine_process FD`: the engine of a service that runs in another process."""

from __future__ import annotations

import sys

from outrider.runtime import switch_threads_often
from target_service.assembly import load_engine
from target_service.engine_process.server import serve_engine

if __name__ == "__main__":
    switch_threads_often()
    sys.exit(serve_engine(int(sys.argv[1]), load_engine))
