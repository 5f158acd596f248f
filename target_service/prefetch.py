"""`python -m target_service.prefetch MODEL`: fetch what `--model` names into the cache of a service."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.settings import CommandParser
from target_service.model.loading.store import pull


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when the model is in the cache, 1 otherwise."""
    parser = CommandParser(prog="python -m target_service.prefetch", description=__doc__)
    parser.add_argument("model", help="a name from `outrider model list`, a folder, or a hub id")
    model = parser.parse_args(arguments).model
    try:
        sys.stdout.write(f"{pull(model)}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{model}: {str(error).strip().splitlines()[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
