"""Who calls: a tenant, by token when a token file is given, else by the caller's own word."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path

from outrider.errors import InvalidField, PermissionDenied, Unauthenticated
from outrider.limits import TENANT_NAME, TENANT_WORD
from outrider.settings import SettingsError
from outrider.wire.frames import DEFAULT_TENANT

TENANT_KEY = "outrider-tenant"
TOKEN_KEY = "authorization"
_MIN_TOKEN_BYTES = 16

Metadata = Iterable[tuple[str, str | bytes]]

_current: ContextVar[str] = ContextVar("outrider_tenant", default=DEFAULT_TENANT)


def current_tenant() -> str:
    """The tenant of the call being handled, as the authentication interceptor found it."""
    return _current.get()


def set_current_tenant(tenant: str) -> None:
    """For interceptors: what `current_tenant` says for the rest of this call."""
    _current.set(tenant)


class Authenticator:
    """Turns the metadata of a call into a tenant.

    With tokens: `authorization: Bearer TOKEN` is required of every caller and decides the tenant; a caller
    that also names a tenant must name that one. Without: `outrider-tenant`, or "default".
    """

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        """`tenants` maps a token to its tenant; None takes callers at their word."""
        self._tenants = None if tenants is None else {token.encode(): tenant for token, tenant in tenants.items()}

    @classmethod
    def from_file(cls, path: str) -> Authenticator:
        """Read `TOKEN TENANT` lines; `#` begins a comment, and `tenant` a line that `TenantTable` reads. An empty path
        asks for no tokens.

        Raises `SettingsError` for an unreadable file and for lines that cannot be meant.
        """
        if not path:
            return cls()
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: {error}") from None
        tenants: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#") or words[0] == TENANT_WORD:
                continue
            # The line itself stays out of the message: it may hold a secret.
            if len(words) != 2 or not TENANT_NAME.fullmatch(words[1]):
                raise SettingsError(f"{path}:{number}: expected `TOKEN TENANT`, tenant of [A-Za-z0-9._-]{{1,64}}")
            if len(words[0]) < _MIN_TOKEN_BYTES or words[0] in tenants:
                raise SettingsError(f"{path}:{number}: token is repeated or has under {_MIN_TOKEN_BYTES} characters")
            tenants[words[0]] = words[1]
        if not tenants:
            raise SettingsError(f"{path}: holds no token")
        return cls(tenants)

    @property
    def required(self) -> bool:
        """Whether callers need a token."""
        return self._tenants is not None

    def tenant(self, metadata: Metadata) -> str:
        """The caller's tenant. Raises `Unauthenticated`, `PermissionDenied`, or `InvalidField`."""
        pairs = list(metadata)
        named = [value for key, value in pairs if key == TENANT_KEY]
        for value in named:
            if not isinstance(value, str) or not TENANT_NAME.fullmatch(value):
                raise InvalidField(f"metadata.{TENANT_KEY}", "must be 1 to 64 characters of [A-Za-z0-9._-]")
        if len(set(named)) > 1:
            raise InvalidField(f"metadata.{TENANT_KEY}", "is given more than once")
        asked = str(named[0]) if named else None
        if self._tenants is None:
            return asked or DEFAULT_TENANT
        owner = self._owner([value for key, value in pairs if key == TOKEN_KEY])
        if asked is not None and asked != owner:
            raise PermissionDenied("the token belongs to another tenant")
        return owner

    def _owner(self, given: list[str | bytes]) -> str:
        token = given[0] if len(given) == 1 and isinstance(given[0], str) else ""
        scheme, _, secret = token.partition(" ")
        owner: str | None = None
        # Every token is compared, in constant time each, so that neither length of match nor rank shows.
        for known, tenant in (self._tenants or {}).items():
            if hmac.compare_digest(known, secret.encode()):
                owner = tenant
        if owner is None or scheme.lower() != "bearer":
            raise Unauthenticated("a valid `authorization: Bearer TOKEN` is required")
        return owner
