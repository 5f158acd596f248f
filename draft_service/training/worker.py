"""The processes that a run starts: `python -m draft_service.training.worker follow SETTINGS RANK STORE` trains on one
device beside the first, and `... write SETTINGS NUMBER SECONDS` is one of several writers of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from draft_service.training.config import TrainingConfig
from outrider.devices import choose_device
from outrider.distillation import TeacherSettings, load_teacher
from outrider.runtime import collect_seldom, configure_logging
from outrider.settings import SettingsError


def main(arguments: Sequence[str]) -> int:
    """Follow until dismissed, or write until stopped; returns the exit status, 1 on failure."""
    work, settings, *others = arguments
    collect_seldom()
    config = TrainingConfig(**json.loads(settings))
    configure_logging(config.log_level)
    try:
        return {"follow": _follow, "write": _write}[work](config, *others)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _follow(config: TrainingConfig, rank: str, store: str) -> int:
    # Late: PyTorch takes seconds to import.
    from draft_service.training.parallel.followers import end_with_leader, wait_for_the_end
    from draft_service.training.parallel.group import Group, GroupLost
    from draft_service.training.run import follow
    from draft_service.training.trainer import DevicesDisagree

    end_with_leader()
    group = Group(Path(store), int(rank), len(config.devices))
    try:
        follow(config, group)
    except DevicesDisagree as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except GroupLost:
        wait_for_the_end()
        return 1
    group.leave()
    return 0


def _write(config: TrainingConfig, number: str, seconds: str) -> int:
    # Late, as above.
    from draft_service.training.corpus import Corpus
    from draft_service.training.writing import write_here

    corpus = Corpus(config.run_folder / "text")
    # Writers are distributed over the devices in turn.
    device = config.devices[int(number) % len(config.devices)]
    choose_device(device)
    teacher = load_teacher(config.teacher, TeacherSettings(config.model, device, config.dtype))
    write_here(teacher, config, corpus, float(seconds), lambda: None, int(number))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
