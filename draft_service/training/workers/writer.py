"""One of several text writers: `python -m draft_service.training.workers.writer SETTINGS NUMBER SECONDS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from draft_service.training.config import TrainingConfig
from outrider.devices import choose_device
from outrider.distillation import TeacherSettings, load_teacher
from outrider.runtime import collect_seldom, configure_logging
from outrider.settings import SettingsError


def main(arguments: Sequence[str]) -> int:
    """Write until stopped; returns the exit status, 1 on failure."""
    settings, number, seconds = arguments
    config = TrainingConfig(**json.loads(settings))
    configure_logging(config.log_level)
    collect_seldom()
    # Late: PyTorch takes seconds to import.
    from draft_service.training.corpus import Corpus
    from draft_service.training.writing import write_here

    corpus = Corpus(config.run_folder / "text")
    try:
        # Writers are distributed over the devices in turn.
        device = config.devices[int(number) % len(config.devices)]
        choose_device(device)
        teacher = load_teacher(config.teacher, TeacherSettings(config.model, device, config.dtype))
        write_here(teacher, config, corpus, float(seconds), lambda: None, int(number))
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
