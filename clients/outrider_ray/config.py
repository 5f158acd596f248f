"""What the application is built from: the `args` and the `user_config` of a Serve config file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from outrider.settings import Settings, SettingsError, load
from outrider.weight_updates import RunningRequests
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig

Config = TypeVar("Config", bound=Settings)
# What a replica sets itself.
_OF_REPLICAS = ("listen", "metrics_listen")


@dataclass(frozen=True)
class FleetConfig:
    """The settings of the services, by the names that their flags have.

    Attributes:
        target: of `outrider target`; `model` at least.
        draft: of `outrider draft`; None for an application without drafts.
        drafters: of the drafters that it runs, by section: `eagle`, `merged` and the like.
        gateway: of `outrider gateway`.
        client: how replicas and gateways reach the services: tokens and TLS, as in the section `[client]`.
    """

    target: Mapping[str, Any]
    draft: Mapping[str, Any] | None = None
    drafters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gateway: Mapping[str, Any] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `SettingsError` for settings that replicas set, and for wrong ones of gateway and client; those of the
        services are checked by the services."""
        for section, taken in (("target", (*_OF_REPLICAS, "draft")), ("draft", _OF_REPLICAS), ("gateway", ("listen",))):
            for name in taken:
                if name in (getattr(self, section) or {}):
                    raise SettingsError(f"{section}.{name}: is set by the application's replicas")
        self.gateway_config()
        self.access()

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> FleetConfig:
        """From the `args` of a Serve application. Raises `SettingsError`."""
        known = [each.name for each in fields(cls)]
        for name, value in args.items():
            if name not in known:
                raise SettingsError(f"args: there is no {name!r}; there are {', '.join(known)}")
            if not isinstance(value, Mapping) and not (name == "draft" and value is None):
                raise SettingsError(f"args: {name} is not a table of settings")
        if "target" not in args:
            raise SettingsError("args: target is missing, with a model at least")
        return cls(**args)

    def draft_environment(self) -> dict[str, str]:
        """What a draft service and its drafters find their settings in."""
        found = as_environment("draft", self.draft or {})
        for section, settings in self.drafters.items():
            found |= as_environment(section, settings)
        return found

    def target_environment(self) -> dict[str, str]:
        """What a target service finds its settings in."""
        return as_environment("target", self.target)

    def gateway_config(self) -> GatewayConfig:
        return settings_of(GatewayConfig, "gateway", {"target": "", **self.gateway})

    def access(self) -> AccessOptions:
        return settings_of(AccessOptions, "client", self.client)


@dataclass(frozen=True)
class ServedWeights:
    """The weights that all targets are to serve: the `user_config` of the deployment of targets.

    Attributes:
        folder: below `weights_folder` of every target's machine.
        running: what happens to running requests: DRAIN, ABORT or CONTINUE.
    """

    folder: str
    running: RunningRequests = RunningRequests.CONTINUE

    @classmethod
    def of(cls, user_config: Mapping[str, Any] | None) -> ServedWeights | None:
        """None where the model's own weights are served. Raises `SettingsError`."""
        given = dict(user_config or {})
        folder, running = given.pop("weights", ""), given.pop("running", RunningRequests.CONTINUE.value)
        if given:
            raise SettingsError(f"user_config: there is no {next(iter(given))!r}; there are weights and running")
        if not isinstance(folder, str) or not isinstance(running, str):
            raise SettingsError("user_config: weights and running are texts")
        try:
            return cls(folder, RunningRequests(running)) if folder else None
        except ValueError:
            raise SettingsError(f"user_config: running is drain, abort or continue, not {running!r}") from None


def settings_of(config: type[Config], section: str, values: Mapping[str, Any]) -> Config:
    """Settings from a program's table, as from a file. Raises `SettingsError`, also for names that do not exist."""
    known = {each.name for each in fields(config)}
    named = {name.replace("-", "_"): value for name, value in values.items()}
    for name in named:
        if name not in known:
            raise SettingsError(f"{section}: there is no setting {name!r}")
    return load(config, section, argparse.Namespace(**named))


def as_environment(section: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment that gives a service these settings."""

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    prefix = f"OUTRIDER_{section.upper()}_"
    return {prefix + name.replace("-", "_").upper(): text(value) for name, value in settings.items()}
