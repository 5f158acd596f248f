"""The `outrider` command."""

from outrider_client.cli.app import main as main
