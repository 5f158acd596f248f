"""`python -m draft_service.training`: train a head for a model; `outrider train-head` calls it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from draft_service.training.config import TrainingConfig
from outrider.consoles import error_console, output_console
from outrider.runtime import collect_seldom, configure_logging, leave, prepare_grpc
from outrider.settings import CommandParser, SettingsError, add_flags, load, settings_file
from outrider.standard_streams import exit_status, prepare_standard_streams

_PROG = "outrider train-head"
_DESCRIPTION = """Train an EAGLE-3 head, or Medusa heads, for a model that Outrider serves, without any data set.

The model writes its own prompts and answers, and the head learns to guess them, reading the model's hidden states.
The result is a folder for `outrider draft --drafter eagle --head FOLDER`, or `--drafter medusa` with --kind medusa.

Every setting may also come from the environment (OUTRIDER_TRAINING_MINUTES=10) or from the [training] table of the
file that --config or OUTRIDER_CONFIG names. Flags win over the environment, the environment over the file.
"""
_EPILOG = """exit status: 0 when the head is saved, 1 when training failed, 2 for settings that cannot work, 130 after
Ctrl-C, after which --resume goes on from the last validation."""
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and train; returns the exit status."""
    parser = CommandParser(
        prog=_PROG,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a [training] table")
    add_flags(parser, TrainingConfig)
    flags = parser.parse_args(arguments)
    prepare_grpc()
    collect_seldom()
    try:
        config = load(TrainingConfig, "training", flags, os.environ, settings_file(flags))
        configure_logging(config.log_level)
        return _train(config, [*shlex.split(_PROG), *(sys.argv[1:] if arguments is None else arguments)])
    except SettingsError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _train(config: TrainingConfig, command: Sequence[str]) -> int:
    # Late: errors in flags should not wait for the import of PyTorch.
    from draft_service.training.parallel.followers import FollowerFailed
    from draft_service.training.run import train_head
    from draft_service.training.trainer import TrainingDiverged
    from draft_service.training.writing import WriterFailed
    from outrider.heads import HeadRefused

    errors = error_console()
    try:
        folder = train_head(config, command)
    except (TrainingDiverged, WriterFailed, HeadRefused, FollowerFailed) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        if isinstance(error, FollowerFailed) and config.device.startswith("cuda"):
            # A device that waits for the lost one's gradients would block the interpreter's exit.
            os._exit(1)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    output_console().print(str(folder), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    prepare_standard_streams()
    leave(exit_status(main))
