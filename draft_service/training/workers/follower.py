"""Training on one device beside the first: `python -m draft_service.training.workers.follower SETTINGS RANK STORE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from draft_service.training.config import TrainingConfig
from outrider.runtime import collect_seldom, configure_logging
from outrider.settings import SettingsError


def main(arguments: Sequence[str]) -> int:
    """Train until dismissed; returns the exit status, 1 on failure."""
    settings, rank, store = arguments
    collect_seldom()
    # Late: PyTorch takes seconds to import.
    from draft_service.training.parallel.followers import end_with_leader, wait_for_the_end
    from draft_service.training.parallel.group import Group, GroupLost
    from draft_service.training.run import follow
    from draft_service.training.trainer import DevicesDisagree

    end_with_leader()
    config = TrainingConfig(**json.loads(settings))
    configure_logging(config.log_level)
    group = Group(Path(store), int(rank), len(config.devices))
    try:
        follow(config, group)
    except (SettingsError, DevicesDisagree) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except GroupLost:
        wait_for_the_end()
        return 1
    group.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
