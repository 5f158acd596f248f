"""A quick check that the hub of models and heads answers; its library would try for half a minute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.runtime import in_daemon_thread

# For the hub's first response. Chosen, not measured: many round trips around the world.
_HUB_SECONDS = 5.0


# What loading reads of a model. Pickled weights and code are not fetched.
MODEL_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Second copies of the weights: other formats in folders, and Mistral's own format.
IGNORED_PATTERNS = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "consolidated*")


class HubUnreachable(OSError):
    """A hub id cannot be looked up; the message has the reason."""


def check_fetchable(name: str, revision: str | None = None) -> None:
    """Raise `HubUnreachable` soon if this id, ORG/NAME, was never fetched and the hub does not answer."""
    # Imported here and below: local models need no hub.
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        reach_hub()
    except HubUnreachable as error:
        raise HubUnreachable(f"it is no folder, it was not fetched before, and {error}") from None


def model_folder(source: str) -> Path:
    """A folder, or the folder of the cache for a hub id, ORG/NAME, whose files are fetched unless they are there.
    Raises `OSError` where the hub does not have it or does not answer, and `ValueError` for no name of a hub."""
    if Path(source).is_dir():
        return Path(source)
    check_fetchable(source)
    return downloaded(source)


def downloaded(
    name: str,
    revision: str | None = None,
    patterns: Sequence[str] = MODEL_PATTERNS,
    ignored: Sequence[str] = IGNORED_PATTERNS,
) -> Path:
    """The folder of the cache that now has a hub id's files of these patterns. Raises what the hub's library does."""
    from huggingface_hub import constants, snapshot_download

    folder = snapshot_download(
        name,
        revision=revision,
        endpoint=constants.ENDPOINT,
        allow_patterns=list(patterns),
        ignore_patterns=list(ignored),
    )
    return Path(folder)


def reach_hub() -> None:
    """Raise `HubUnreachable` unless the hub answers soon."""
    import httpx
    from huggingface_hub import constants, get_session

    # Its own timeout is not enough: name resolution has none, and each address of a host has its own.
    answer = in_daemon_thread(lambda: get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS), "hub")
    try:
        answer.result(_HUB_SECONDS)
    except (httpx.HTTPError, TimeoutError) as error:
        reason = error if answer.done() else f"nothing came within {_HUB_SECONDS:.0f} s"
        raise HubUnreachable(f"{constants.ENDPOINT} does not answer ({reason})") from None
