"""`python -m outrider_gateway.workers DESCRIPTOR`: a worker of a gateway, started by its parent."""

from __future__ import annotations

import sys

from outrider.runtime import prepare_grpc

if __name__ == "__main__":
    prepare_grpc()
    # gRPC reads its environment as it is imported.
    from outrider_gateway.workers.worker import main

    sys.exit(main(int(sys.argv[1])))
