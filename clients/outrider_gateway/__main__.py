"""`python -m outrider_gateway`: serve HTTP in front of target services until a signal ends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from outrider.roles import missing_for
from outrider.runtime import configure_logging, prepare_grpc, run
from outrider.settings import CommandParser, SettingsError, add_flags, load, settings_file
from outrider.standard_streams import exit_status, prepare_standard_streams
from outrider_gateway.config import GatewayConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; returns the process's exit status: 2 for settings that cannot work."""
    prepare_grpc()
    # gRPC reads its environment as it is imported, which the client's options do.
    from outrider_client.terminal.options import AccessOptions

    description = "An OpenAI-compatible HTTP server in front of one target service or several."
    parser = CommandParser(prog="outrider gateway", description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (default: OUTRIDER_CONFIG)")
    add_flags(parser, GatewayConfig)
    flags = parser.parse_args(argv)
    path = settings_file(flags)
    try:
        config = load(GatewayConfig, "gateway", flags, os.environ, path)
        # The section and the environment of every client, but for the one setting that is not about access; here they
        # are how the gateway itself reaches its targets.
        variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_CLIENT_TARGET"}
        access = load(AccessOptions, "client", None, variables, path)
        if missing := missing_for("gateway"):
            raise SettingsError(missing)
        if not config.targets:
            raise SettingsError("--target: names no target")
        configure_logging(config.log_level)
        from outrider_gateway.server import GatewayServer, serve

        if config.processes > 1:
            from outrider_gateway.workers.parent import GatewayParent

            return run(serve(config, lambda: GatewayParent(config, access, config.processes)))
        return run(serve(config, lambda: GatewayServer(config, access)))
    except SettingsError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2


if __name__ == "__main__":
    prepare_standard_streams()
    sys.exit(exit_status(main))
