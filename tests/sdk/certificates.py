"""Certificates for tests: an authority, and a server's and a client's that it signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files. Unless `make` was given other names, the server's names `outrider.test` and no address."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    @classmethod
    def make(cls, folder: Path, names: str = "DNS:outrider.test") -> Certificates:
        """Sign a fresh set, good for two days."""
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        authority = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key")
        _openssl("req", "-x509", *curve, "-subj", "/CN=ca", "-keyout", folder / "ca.key", "-out", folder / "ca.pem")
        for name in ("server", "client"):
            files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
            extensions = ("-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:false")
            _openssl("req", "-x509", *curve, *authority, "-subj", f"/CN={name}", *extensions, *files)
        return cls(*(folder / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")))


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
