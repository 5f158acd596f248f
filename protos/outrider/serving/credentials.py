"""TLS and mutual TLS for a server, read from PEM files and read again when they change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.settings import SettingsError


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. No certificate means plain text; `client_ca` makes client certificates required."""

    certificate: str = ""
    key: str = ""
    client_ca: str = ""

    def check(self) -> None:
        """Raise `SettingsError` for an unreadable file, or a set weaker than it looks."""
        if bool(self.certificate) != bool(self.key):
            raise SettingsError("a TLS certificate needs its key, and a key its certificate")
        if self.client_ca and not self.certificate:
            raise SettingsError("client certificates need TLS: give a certificate and a key too")
        for path in filter(None, (self.certificate, self.key, self.client_ca)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise SettingsError(f"{path}: {error.strerror}") from None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials that follow renewed files, or None for plain text."""
        self.check()
        if not self.certificate:
            return None
        reader = _CertificateReader(self)
        return grpc.dynamic_ssl_server_credentials(
            reader.configuration(), reader.configuration, require_client_authentication=bool(self.client_ca)
        )


class _CertificateReader:
    """Reads the files once per change. gRPC asks before each handshake, from a thread of its own."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp: tuple[int, ...] = ()
        self._configuration: grpc.ServerCertificateConfiguration | None = None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        paths = [Path(path) for path in (self._files.certificate, self._files.key, self._files.client_ca) if path]
        try:
            stamp = tuple(path.stat().st_mtime_ns for path in paths)
            if self._configuration is None or stamp != self._stamp:
                key, chain = Path(self._files.key).read_bytes(), Path(self._files.certificate).read_bytes()
                roots = Path(self._files.client_ca).read_bytes() if self._files.client_ca else None
                self._configuration = grpc.ssl_server_certificate_configuration([(key, chain)], roots)
                self._stamp = stamp
        except OSError:
            # Half-way through a renewal: what was read before still holds.
            if self._configuration is None:
                raise
        return self._configuration
