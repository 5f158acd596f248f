"""Limits of each tenant of a service: defaults for all, and changes by name in the tokens' file.

    tenant acme weight=4 running=32 requests_per_second=50

A line like this in the file of `--auth-tokens` changes these limits for one tenant.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from outrider.settings import SettingsError, read_text

# Metadata of a call by which its caller is known.
TENANT_KEY, TOKEN_KEY = "outrider-tenant", "authorization"
# The first word of a tenant's line; no token is that short.
TENANT_WORD = "tenant"
TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Chosen.
_MOST_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bounds of one tenant; 0 is no bound. The service's bounds hold for all tenants together."""

    weight: float = 1.0  # share relative to other tenants' weights while resources are short; 0.001 .. 1000
    running: int = 0  # sequences in one step of the engine
    waiting: int = 0  # requests without a first token
    sequences: int = 0  # open sequences: running, waiting, or between two trees of a client
    streams: int = 0  # concurrent calls
    kv_tokens: int = 0  # tokens of running sequences in the KV cache
    requests_per_second: float = 0.0  # on average
    burst: int = 0  # requests that may arrive at once after a pause
    texts: int = 0  # texts that wait for the tokenizer

    def __post_init__(self) -> None:
        if not 1 / _MOST_WEIGHT <= self.weight <= _MOST_WEIGHT:
            raise SettingsError(f"weight must be in [{1 / _MOST_WEIGHT:g}, {_MOST_WEIGHT:g}]")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(f"{field.name} must be at least 0")
        if self.requests_per_second and not self.burst:
            raise SettingsError("requests_per_second needs a burst of at least 1")


_KINDS = {field.name: float if field.type == "float" else int for field in dataclasses.fields(TenantLimits)}


class TenantTable:
    """Limits by tenant."""

    def __init__(self, default: TenantLimits | None = None, named: Mapping[str, TenantLimits] | None = None) -> None:
        """`default` is for every tenant that is not in `named`."""
        self.default = default or TenantLimits()
        self._named = dict(named or {})

    def of(self, tenant: str) -> TenantLimits:
        return self._named.get(tenant, self.default)

    @classmethod
    def from_file(cls, path: str, default: TenantLimits) -> TenantTable:
        """Read `tenant NAME limit=number ...` lines, and skip all others. An empty path has none. Raises
        `SettingsError` for an unreadable file and malformed lines."""
        if not path:
            return cls(default)
        named: dict[str, TenantLimits] = {}
        for where, words in lines_of_words(path):
            if words[0] != TENANT_WORD:
                continue
            try:
                tenant, limits = _parse(words[1:], default)
            except SettingsError as error:
                raise SettingsError(f"{where}: {error}") from None
            if tenant in named:
                raise SettingsError(f"{where}: {tenant} has a line already")
            named[tenant] = limits
        return cls(default, named)


def lines_of_words(path: str) -> Iterator[tuple[str, list[str]]]:
    """Where each line of a tokens' file stands, and its words; `#` begins a comment. Raises `SettingsError`."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield f"{path}:{number}", words


def _parse(words: list[str], default: TenantLimits) -> tuple[str, TenantLimits]:
    if not words or not TENANT_NAME.fullmatch(words[0]):
        raise SettingsError(f"expected `tenant NAME limit=number ...`, name of {TENANT_NAME.pattern}")
    changes: dict[str, float] = {}
    for word in words[1:]:
        name, equals, number = word.partition("=")
        name = name.replace("-", "_")
        if name not in _KINDS or not equals:
            raise SettingsError(f"expected limit=number, of {', '.join(_KINDS)}")
        if name in changes:
            raise SettingsError(f"{name} is given twice")
        try:
            changes[name] = _KINDS[name](number)
        except ValueError:
            raise SettingsError(f"{name} must be a number") from None
    return words[0], dataclasses.replace(default, **changes)  # type: ignore[arg-type]
