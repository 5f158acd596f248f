"""TLS and mutual TLS for a server, read from PEM files and read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.pem import check_authority, check_pair
from outrider.settings import SettingsError


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. No certificate means plain text; `client_ca` makes client certificates required."""

    certificate: str = ""
    key: str = ""
    client_ca: str = ""

    def check(self) -> None:
        """Raise `SettingsError` for an unreadable file, a set weaker than it looks, or a certificate out of date."""
        if bool(self.certificate) != bool(self.key):
            raise SettingsError("a TLS certificate needs its key, and a key its certificate")
        if self.client_ca and not self.certificate:
            raise SettingsError("client certificates need TLS: give a certificate and a key too")
        if self.client_ca:
            check_authority(self.client_ca)
        if self.certificate:
            check_pair(self.certificate, self.key)
            _check_dates(self.certificate, self.key)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials that follow renewed files, or None for plain text."""
        self.check()
        if not self.certificate:
            return None
        reader = _CertificateReader(self)
        return grpc.dynamic_ssl_server_credentials(
            reader.configuration(), reader.configuration, require_client_authentication=bool(self.client_ca)
        )


def _check_dates(certificate: str, key: str) -> None:
    """Raise `SettingsError` unless the certificate is valid today: gRPC would serve it, and clients would refuse it.
    Checked as by a client, in a handshake that trusts the certificate itself."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL.
            if error.verify_code in (9, 10):
                raise SettingsError(f"{certificate}: {error.verify_message}") from None
            # Whether clients trust it otherwise depends on them.
            return


class _CertificateReader:
    """Reads the files once per change. gRPC calls it before each handshake, from its own thread."""

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
            # In the middle of a renewal: keep the files that were read before.
            if self._configuration is None:
                raise
        return self._configuration
