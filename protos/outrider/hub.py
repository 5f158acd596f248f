"""Whether the hub of models and heads answers, asked before its library does, which tries for half a minute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

# For the hub's first answer. Chosen, not measured: many round trips around the world.
_HUB_SECONDS = 5.0


class HubUnreachable(OSError):
    """A hub id cannot be looked up; the message says why."""


def check_fetchable(name: str, revision: str | None = None) -> None:
    """Raise `HubUnreachable` soon where this id, ORG/NAME, was never fetched and the hub does not answer."""
    # Only here, and in the functions below: what is at hand needs no hub.
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        reach_hub()
    except HubUnreachable as error:
        raise HubUnreachable(f"it is no folder, it was not fetched before, and {error}") from None


def reach_hub() -> None:
    """Raise `HubUnreachable` unless the hub answers soon."""
    import httpx
    from huggingface_hub import constants, get_session

    try:
        _within(_HUB_SECONDS, lambda: get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS))
    except (httpx.HTTPError, TimeoutError) as error:
        raise HubUnreachable(f"{constants.ENDPOINT} does not answer ({error})") from None


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Raise what `call` raises, or `TimeoutError`. Timeouts of its own are not enough: a name's look-up has none, and
    each address of a host has one."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            call()
        # Raised again by the one who waits.
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run, name="hub", daemon=True).start()
    try:
        failure = ended.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"nothing came within {seconds:.0f} s") from None
    if failure is not None:
        raise failure
