"""`python -m target_service`: load a model and serve it until told to stop."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider.runtime import configure_logging, prepare_grpc, run, switch_threads_often
from outrider.settings import CONFIG_VARIABLE, SettingsError, add_flags, load
from target_service.config import TargetConfig

_DESCRIPTION = """Serve a model over gRPC, with speculative decoding when a draft service is given.

Every setting may also come from the environment (OUTRIDER_TARGET_MAX_RUNNING=8) or from the [target] table of the
file that --config or OUTRIDER_CONFIG names. Flags win over the environment, the environment over the file.
"""
_EPILOG = """exit status: 0 after SIGTERM or SIGINT, 1 when the model cannot be served or the engine died, 2 for
settings that cannot work."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m target_service",
        usage="%(prog)s [--config FILE] [--model MODEL] [--listen ADDRESS] [--draft ADDRESS] [setting ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a [target] table")
    add_flags(parser, TargetConfig)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, load, serve; returns the exit status."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    named = os.environ.get(CONFIG_VARIABLE)
    prepare_grpc()
    switch_threads_often()
    # Imported late: gRPC reads its environment as it is imported, and a typing error should not wait for torch.
    from target_service.preflight import EngineRefused, check_settings, engine_stands_apart

    try:
        config = load(TargetConfig, "target", flags, os.environ, flags.config or (Path(named) if named else None))
        check_settings(config)
        configure_logging(config.log_level)
    except SettingsError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    from outrider.errors import OutriderError

    try:
        return _serve_apart(config) if engine_stands_apart(config) else _serve_shared(config)
    except EngineRefused as refusal:
        parser.exit(refusal.status, f"{parser.prog}: {refusal.reason}\n")
    except (SettingsError, OutriderError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


@contextmanager
def _answering_scrapes(config: TargetConfig) -> Iterator[None]:
    """Answer scrapes while a model loads, with what is known of the process: one that loads is up, and not ready."""
    if not config.metrics_listen:
        yield
        return
    from outrider.telemetry.registry import MetricsServer

    metrics = MetricsServer(config.metrics_listen, ())
    try:
        yield
    finally:
        metrics.close()


def _serve_shared(config: TargetConfig) -> int:
    with _answering_scrapes(config):
        from target_service.assembly import load_model
        from target_service.lifecycle import serve

        runner = load_model(config)
    return run(serve(config, runner))


def _serve_apart(config: TargetConfig) -> int:
    from target_service.engine_process.client import EngineLink

    # Before there are threads here, of which the other process would know nothing.
    link = EngineLink(config)
    with _answering_scrapes(config):
        # Imported while the other process loads the model.
        from transformers import AutoTokenizer

        from target_service.lifecycle import serve_engine
        from target_service.model.loading.store import resolve

        link.wait_until_ready()
        link.use_tokenizer(AutoTokenizer.from_pretrained(str(resolve(config.model))))
    return run(serve_engine(config, link))


if __name__ == "__main__":
    sys.exit(main())
