"""Settings of the proposer. Each default lives here and nowhere else."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from outrider.addresses import address_problem
from outrider.drafting.link import ChannelTls, LinkOptions, bearer_metadata
from outrider.errors import InvalidField
from outrider.settings import Settings, SettingsError, load, setting
from outrider.wire.frames import DEFAULT_TENANT
from outrider.wire.trees import name_from_pb

# Our part of vLLM's `additional_config`, which every worker gets, also of another machine.
KEY = "outrider"


@dataclass(frozen=True)
class ProposerConfig(Settings):
    """Everything that the proposer takes, from `additional_config={"outrider": {...}}` or from the environment of the
    workers (`OUTRIDER_VLLM_*`). The former wins. Raises `SettingsError` for values outside their limits."""

    draft: str = setting("127.0.0.1:50052", "draft service: HOST:PORT, unix:PATH, or several with commas between them")
    # A head on a GPU of the same host answers within some 2.5 ms (docs/operate.md), a trie sooner: twice that. It is
    # about a step of an 8B model too, so a wait is paid back by one accepted token.
    wait_ms: float = setting(5.0, "bound of the wait for drafts in a step", ge=0, le=1000)
    failures_to_open: int = setting(3, "late answers in a row after which the draft is not waited for", ge=1)
    tenant: str = setting(DEFAULT_TENANT, "tenant whose trie is drafted from, and learns")
    corpus: str = setting("", "shared corpus to draft from too; none when empty")
    token: str = setting("", "file with the token that the draft service asks for; none when empty")
    tls_ca: str = setting("", "PEM roots for the draft service's certificate; plain text when empty")
    tls_certificate: str = setting("", "PEM certificate chain shown to the draft service")
    tls_key: str = setting("", "PEM private key of that certificate")
    log_seconds: float = setting(60.0, "time between two log lines with counts; none at 0", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.draft.split(","):
            # Blanks are for between several.
            problem = address_problem(address.strip() if "," in self.draft else address)
            if problem is not None:
                raise SettingsError(f"draft: {problem}")
        for field in ("tenant", "corpus"):
            try:
                name_from_pb(getattr(self, field), field)
            except InvalidField as error:
                raise SettingsError(str(error)) from None
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("tls_certificate and tls_key go together")
        if self.tls_certificate and not self.tls_ca:
            raise SettingsError("tls_certificate needs tls_ca")

    @classmethod
    def of(cls, additional_config: object, environment: Mapping[str, str]) -> ProposerConfig:
        """From vLLM's `additional_config`, which may be anything, and the environment. Raises `SettingsError` for a
        setting that does not exist or does not parse."""
        given: Any = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise SettingsError(f"additional_config[{KEY!r}] is not a mapping of settings")
        known = sorted(field.name for field in fields(cls))
        if unknown := sorted(set(given) - set(known)):
            raise SettingsError(f"{KEY} has no setting {unknown[0]!r}; it has {', '.join(known)}")
        # Read from the environment alone: files have no such table.
        return load(cls, "vllm", argparse.Namespace(**given), environment)

    @property
    def wait_seconds(self) -> float:
        return self.wait_ms / 1000

    def link_options(self) -> LinkOptions:
        """How the draft service is called. Raises `SettingsError` for files that cannot be read."""
        metadata = bearer_metadata(self.token)
        tls = ChannelTls.of_files(self.tls_ca, self.tls_key, self.tls_certificate) if self.tls_ca else None
        return LinkOptions(metadata=metadata, tls=tls)
