"""Refuses settings that cannot work before the model is loaded. Imports no model library, except for a drafter in this
process that needs one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from outrider.addresses import address_problem
from outrider.admission.prompt_limits import MOST_CONTEXT
from outrider.checkpoints.folder import Checkpoint, check_tokenizer
from outrider.checkpoints.formats import DEQUANTISED_FORMATS
from outrider.devices import check_device_name
from outrider.drafting.link import (
    IN_PASS_SCHEME,
    INPROCESS_SCHEME,
    ChannelTls,
    Connect,
    LinkOptions,
    bearer_metadata,
    prepare_draft,
    prepare_in_pass,
    runs_in_eager_passes,
)
from outrider.drafting.listed import FILE_SCHEME
from outrider.errors import OutriderError
from outrider.heads import head_source
from outrider.limits import TenantTable
from outrider.model_store import model_source
from outrider.serving import Authenticator, TlsFiles, check_free
from outrider.settings import SettingsError, comma_words
from target_service.config import TargetConfig
from target_service.model.loading.hub import PullFailed, fetch_head
from target_service.model.loading.store import resolve
from target_service.shared_prompts import read_shared_prompts

# Characters of a name that a model is served under. Chosen: hub ids have at most 96, and the gateway takes more.
_MOST_NAME = 256


class EngineRefused(Exception):
    """No engine can run with these settings; the process should exit with `status`."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def check_settings(config: TargetConfig) -> None:
    """Raise `SettingsError` for settings that contradict each other, and files that cannot be used."""
    check_device_name(config.device)
    if config.lookup_tokens > 0 and not config.captures:
        raise SettingsError("--lookup-tokens: needs captured steps on a GPU; elsewhere there is --draft inprocess:trie")
    if config.drafts_in_passes:
        _check_in_pass(config)
    for name in config.served_names:
        # Such as control characters and bytes that are no UTF-8, which no message can carry.
        if config.served_model_name and (not name.isprintable() or len(name) > _MOST_NAME):
            raise SettingsError(
                f"--served-model-name: {name[:40]!a} is no name of 1 to {_MOST_NAME} printable characters"
            )
    if config.max_context > MOST_CONTEXT:
        raise SettingsError(f"--max-context: must be at most {MOST_CONTEXT}")
    for flag, folder in (("--weights-folder", config.weights_folder), ("--weights-staging", config.weights_staging)):
        if folder and not Path(folder).is_dir():
            raise SettingsError(f"{flag}: there is no folder {folder}")
    read_shared_prompts(config.shared_prompts)
    _check_draft(config.draft)
    TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca).check()
    Authenticator.from_file(config.auth_tokens)
    TenantTable.from_file(config.auth_tokens, config.tenant_limits)
    link_options(config)
    # Loading a model takes long, and is of no use if the service cannot listen.
    check_free(config.listen)


def link_options(config: TargetConfig) -> LinkOptions:
    """Options of the link to the draft service. Raises `SettingsError` for files that cannot be used."""
    metadata = bearer_metadata(config.draft_token)
    tls = None
    if config.draft_tls_ca:
        if bool(config.draft_tls_certificate) != bool(config.draft_tls_key):
            raise SettingsError("--draft-tls-certificate and --draft-tls-key go together")
        tls = ChannelTls.of_files(config.draft_tls_ca, config.draft_tls_key, config.draft_tls_certificate)
    elif config.draft_tls_certificate or config.draft_tls_key:
        raise SettingsError("--draft-tls-certificate needs --draft-tls-ca")
    return LinkOptions(
        metadata=metadata,
        tls=tls,
        max_message_bytes=config.max_message_bytes,
        busy_poll_seconds=config.draft_link_busy_poll_ms / 1e3,
    )


def prepared_draft(config: TargetConfig) -> Connect | None:
    """The function that connects the draft; None without one, or where the target's own passes draft. Call it before
    the model is loaded, which takes long: a drafter in this process is created here, so that bad settings or heads are
    refused at once.

    Raises `EngineRefused`.
    """
    if not config.speculates:
        return None
    try:
        options = link_options(config)
        if config.drafts_in_passes:
            prepare_in_pass(config.draft, config.model)
            return None
        connect = prepare_draft(config.draft, options)
        if config.link_apart and not config.draft.startswith(INPROCESS_SCHEME):
            from outrider.drafting.link_process import LinkProcess

            return partial(LinkProcess, config.draft, options=options)
        return connect
    except SettingsError as error:
        raise EngineRefused(2, f"error: --draft: {error}") from None


def check_sources(config: TargetConfig) -> None:
    """Fetch the draft's head and the model if they are on a hub. Raises `EngineRefused` if either is not available, or
    the model's folder is not whole."""
    check_head(config.draft_head, config.model)
    try:
        check_tokenizer(Checkpoint.of_folder(resolve(config.model), DEQUANTISED_FORMATS).folder)
    except (OSError, ValueError) as error:
        raise EngineRefused(1, f"cannot serve {config.model}: {error}") from None


def check_head(head: str, model: str) -> None:
    """Fetch the head that a draft of `model` runs, if it is on a hub. Raises `EngineRefused` if it is not available."""
    # A model's own MTP module comes with it.
    if head in ("", model):
        return
    try:
        source = model_source(head) if "@" in head else head_source(head)
        if not Path(source).is_dir():
            fetch_head(source)
        elif not (Path(source) / "config.json").is_file():
            raise FileNotFoundError("there is no config.json in this folder")
    except (OutriderError, PullFailed) as error:
        # Their messages name the head.
        raise EngineRefused(2, f"error: --draft-head: {error}") from None
    except (OSError, ValueError) as error:
        raise EngineRefused(2, f"error: --draft-head: {head}: {error}") from None


def _check_in_pass(config: TargetConfig) -> None:
    """Raise `SettingsError` where no pass can draft."""
    eager = config.device == "cpu" and runs_in_eager_passes(config.draft)
    needed = {
        "needs captured steps on a GPU; elsewhere there is --draft inprocess:DRAFTER": not (config.captures or eager),
        "not with --batch-invariant, whose drafts are chains that the host cuts": config.batch_invariant,
        "not with --draft-head: it reads the states itself": bool(config.draft_head),
    }
    for problem, is_there in needed.items():
        if is_there:
            raise SettingsError(f"--draft {IN_PASS_SCHEME} {problem}")


def _check_draft(draft: str) -> None:
    """Raise `SettingsError` unless `draft` is a list of addresses with commas, file:PATH, or a drafter behind its
    scheme."""
    for scheme in (INPROCESS_SCHEME, IN_PASS_SCHEME):
        if draft.startswith(scheme):
            if not draft.removeprefix(scheme).strip():
                raise SettingsError(f"--draft: {draft!r} names no drafter: {scheme}DRAFTER")
            return
    if draft.startswith(FILE_SCHEME):
        # `prepare_draft` reads the file.
        return
    for one in comma_words(draft):
        problem = address_problem(one)
        if problem is not None:
            raise SettingsError(f"--draft: {problem}; inprocess:DRAFTER needs no address")
