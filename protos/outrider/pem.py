"""Checks of PEM files before they are used: gRPC would only report that a handshake or the binding of a port failed."""

from __future__ import annotations

import ssl
from os import PathLike

from outrider.settings import SettingsError, read_bytes


def check_authority(path: str | PathLike[str]) -> None:
    """Raise `SettingsError` unless the file can be read and holds certificates."""
    read_bytes(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise SettingsError(f"{path}: holds no PEM certificate") from None


def check_pair(certificate: str | PathLike[str], key: str | PathLike[str]) -> None:
    """Raise `SettingsError` unless the files can be read and hold a certificate and its key, without a password."""
    for path in (certificate, key):
        read_bytes(path)
    try:
        # A password would be asked for at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        reason = error.reason or "no PEM file of one"
        raise SettingsError(f"{certificate} and {key} are no certificate and its key: {reason}") from None
