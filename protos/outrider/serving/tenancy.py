"""The caller of each call: a tenant, by its token when there is a token file, else by the name that it sends."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import NamedTuple

from outrider.errors import InvalidField, PermissionDenied, Unauthenticated
from outrider.limits import TENANT_KEY, TENANT_NAME, TENANT_WORD, TOKEN_KEY, lines_of_words
from outrider.settings import SettingsError
from outrider.wire.frames import DEFAULT_TENANT

# The third word of a token's line: its holder may change the service for all tenants.
OPERATOR_WORD = "operator"
# Chosen: 96 bits of randomness in base 64.
_MIN_TOKEN_BYTES = 16

Metadata = Iterable[tuple[str, str | bytes]]


class Caller(NamedTuple):
    """The caller of a call. An `operator` may change the service for all tenants."""

    tenant: str = DEFAULT_TENANT
    operator: bool = False


_UNAUTHENTICATED = Caller()
# The caller of the call being handled, as the authentication interceptor found it.
current_caller: ContextVar[Caller] = ContextVar("outrider_caller", default=_UNAUTHENTICATED)


def current_tenant() -> str:
    """The tenant of the call being handled."""
    return current_caller.get().tenant


class Authenticator:
    """Turns the metadata of a call into a tenant. With tokens: `authorization: Bearer TOKEN` is required and decides
    the tenant; a caller that also sends `outrider-tenant` must send that one. Without: `outrider-tenant`, or "default",
    and no caller is an operator."""

    def __init__(self, callers: Mapping[str, Caller] | None = None) -> None:
        """`callers` are by their tokens; None requires no tokens."""
        self._callers = None if callers is None else {token.encode(): caller for token, caller in callers.items()}

    @classmethod
    def from_file(cls, path: str) -> Authenticator:
        """Read `TOKEN TENANT` and `TOKEN TENANT operator` lines; `#` begins a comment, and `tenant` a line that
        `TenantTable` reads. An empty path requires no tokens. Raises `SettingsError`."""
        if not path:
            return cls()
        callers: dict[str, Caller] = {}
        for where, words in lines_of_words(path):
            if words[0] == TENANT_WORD:
                continue
            # The line itself stays out of the message: it may hold a secret.
            if len(words) < 2 or words[2:] not in ([], [OPERATOR_WORD]) or not TENANT_NAME.fullmatch(words[1]):
                raise SettingsError(
                    f"{where}: expected `TOKEN TENANT` or `TOKEN TENANT {OPERATOR_WORD}`, tenant of "
                    f"{TENANT_NAME.pattern}"
                )
            if len(words[0]) < _MIN_TOKEN_BYTES or words[0] in callers:
                raise SettingsError(f"{where}: token is repeated or has under {_MIN_TOKEN_BYTES} characters")
            callers[words[0]] = Caller(words[1], operator=len(words) == 3)
        if not callers:
            raise SettingsError(f"{path}: holds no token")
        return cls(callers)

    @property
    def required(self) -> bool:
        return self._callers is not None

    def caller(self, metadata: Metadata) -> Caller:
        """The caller. Raises `Unauthenticated`, `PermissionDenied`, or `InvalidField`."""
        pairs = list(metadata)
        named = [value for key, value in pairs if key == TENANT_KEY]
        for value in named:
            if not isinstance(value, str) or not TENANT_NAME.fullmatch(value):
                raise InvalidField(f"metadata.{TENANT_KEY}", "must be 1 to 64 characters of [A-Za-z0-9._-]")
        if len(set(named)) > 1:
            raise InvalidField(f"metadata.{TENANT_KEY}", "is given more than once")
        asked = str(named[0]) if named else None
        if self._callers is None:
            return Caller(asked or DEFAULT_TENANT)
        owner = self._owner([value for key, value in pairs if key == TOKEN_KEY])
        if asked is not None and asked != owner.tenant:
            raise PermissionDenied("the token belongs to another tenant")
        return owner

    def _owner(self, given: list[str | bytes]) -> Caller:
        token = given[0] if len(given) == 1 and isinstance(given[0], str) else ""
        scheme, _, secret = token.partition(" ")
        owner: Caller | None = None
        # Every token is compared, in constant time each, so that timing reveals neither match length nor position.
        for known, caller in (self._callers or {}).items():
            if hmac.compare_digest(known, secret.encode()):
                owner = caller
        if owner is None or scheme.lower() != "bearer":
            raise Unauthenticated("a valid `authorization: Bearer TOKEN` is required")
        return owner
