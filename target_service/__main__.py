"""`python -m target_service`: load a model and serve it until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.named_heads import named_settings
from outrider.roles import missing_for
from outrider.runtime import configure_logging, leave, prepare_service, run
from outrider.settings import CONFIG_VARIABLE, CommandParser, SettingsError, add_flags, load, settings_file
from outrider.standard_streams import exit_status, prepare_standard_streams
from target_service.config import TargetConfig

if TYPE_CHECKING:
    from target_service.lifecycle import EngineHost
    from target_service.text.tokenizer import ModelTokenizer

_DESCRIPTION = """Serve a model over gRPC, with speculative decoding when a draft service is given.

Every setting may also come from the environment (OUTRIDER_TARGET_MAX_RUNNING=8) or from the [target] table of the
file that --config or OUTRIDER_CONFIG names. Flags win over the environment, the environment over the file.
"""
_EPILOG = """exit status: 0 after SIGTERM or SIGINT, 1 when the model cannot be served or the engine died, 2 for
settings that cannot work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, load, serve; returns the exit status."""
    parser = CommandParser(
        prog="outrider target",
        usage="%(prog)s [--config FILE] [--model MODEL] [--listen ADDRESS] [--draft ADDRESS] [setting ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a [target] table")
    add_flags(parser, TargetConfig)
    flags = parser.parse_args(arguments)
    named = settings_file(flags)
    if missing := missing_for("target"):
        parser.exit(1, f"{parser.prog}: error: {missing}\n")
    prepare_service()
    # Imported late: gRPC reads its environment on import, and a typing error should not wait for torch.
    from outrider.errors import OutriderError
    from target_service.preflight import EngineRefused, check_settings

    try:
        config = load(TargetConfig, "target", flags, os.environ, named)
        config = config.with_head_of_draft(named_settings(os.environ, named))
        check_settings(config)
        configure_logging(config.log_level)
    except SettingsError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if named:
        # A drafter in this process, or in the engine's, reads its settings from the same file.
        os.environ[CONFIG_VARIABLE] = str(named)
    try:
        return _serve(config)
    except EngineRefused as refusal:
        parser.exit(refusal.status, f"{parser.prog}: {refusal.reason}\n")
    except (SettingsError, OutriderError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _serve(config: TargetConfig) -> int:
    host: EngineHost | None = None
    if config.engine_apart:
        # Started before this process has threads.
        from target_service.engine_process.client import EngineLink

        host = EngineLink(config, tokenizer=lambda: _tokenizer(config.model))
    from target_service.lifecycle import serve_engine
    from target_service.shared_engine import SharedEngine

    return run(serve_engine(config, host or SharedEngine(config)))


def _tokenizer(model: str) -> ModelTokenizer:
    from target_service.model.loading.store import resolve
    from target_service.text.loading import load_tokenizer

    return load_tokenizer(resolve(model))


if __name__ == "__main__":
    prepare_standard_streams()
    leave(exit_status(main))
