"""Which callers the targets know, asked before anything else of a request is looked at. The gateway has no keys."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from outrider.admission.newest_waits import NewestWaits
from outrider.errors import InvalidField, OutriderError, PermissionDenied, Unauthenticated
from outrider.log_limit import LogLimit
from outrider_client.failures import AWAY
from outrider_gateway.caller import HttpCaller
from outrider_gateway.failures import GatewayFailed, Refused, TooMany, refusal
from outrider_gateway.targets import Targets

logger = logging.getLogger(__name__)
# Callers remembered, of each kind: some hundred bytes each.
_REMEMBERED = 4096
# Longer than a target delays a refusal.
_ASK_SECONDS = 15.0
# A caller's tenant, or what makes its refusal: an exception is raised once.
Found = str | Callable[[], Refused]


class Remembered:
    """What was last found out, for so many seconds and so many keys."""

    def __init__(self, seconds: float, most: int, clock: Callable[[], float]) -> None:
        self._seconds, self._most, self._clock = seconds, most, clock
        self._entries: OrderedDict[bytes, tuple[Found, float]] = OrderedDict()

    def get(self, key: bytes) -> Found | None:
        value, until = self._entries.get(key, (None, 0.0))
        return value if self._clock() < until else None

    def put(self, key: bytes, value: Found) -> None:
        self._entries[key] = value, self._clock() + self._seconds
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def forget(self, key: bytes) -> None:
        self._entries.pop(key, None)


class KnownCallers:
    """Asks targets for the tenants of callers, each caller once in a while."""

    def __init__(self, targets: Targets, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._targets = targets
        # How long an answer holds. A token that is revoked meanwhile is still refused by the target, for each request;
        # one that was given out meanwhile is refused here for so long. Chosen.
        self._tenants = Remembered(60.0, _REMEMBERED, clock)
        self._refusals = Remembered(2.0, _REMEMBERED, clock)
        self._asking: dict[bytes, asyncio.Task[Found]] = {}
        # Questions at once, far fewer than the streams of a connection to a target: those about wrong tokens are
        # answered late.
        self._waits = NewestWaits(32)
        self._failures = LogLimit()

    async def tenant(self, caller: HttpCaller) -> str:
        """The tenant that the targets know the caller as. Raises `Refused` as they do."""
        key = _key(caller)
        found = self._tenants.get(key) or self._refusals.get(key)
        if found is None:
            # One question for all who wait for its answer, which those do not end who leave.
            if key not in self._asking:
                self._asking[key] = task = asyncio.create_task(self._ask_in_turn(key, caller))
                task.add_done_callback(lambda _: self._asking.pop(key, None))
            found = await asyncio.shield(self._asking[key])
        if isinstance(found, str):
            return found
        raise found()

    def refused(self, caller: HttpCaller) -> None:
        """A target did not know the caller any more."""
        self._tenants.forget(_key(caller))

    async def _ask_in_turn(self, key: bytes, caller: HttpCaller) -> Found:
        try:
            async with self._waits.within(_ASK_SECONDS):
                return await self._ask(key, caller)
        except TimeoutError:
            return partial(TooMany, "too many callers that are not known yet")

    async def _ask(self, key: bytes, caller: HttpCaller) -> Found:
        """The first answer that a target gives in the caller's name, or why none knows it."""
        found: Found = self._targets.unavailable
        for target in self._targets.preferred(caller.key("")):
            client = target.client.acting_for(token=caller.token, tenant=caller.tenant)
            try:
                info = await client.info(_ASK_SECONDS)
            except AWAY as error:
                target.leave_out(error)
            except OutriderError as error:
                found = partial(refusal, error, {"input": ""})
                # Refusals that the same caller gets again.
                if isinstance(error, (Unauthenticated, PermissionDenied, InvalidField)):
                    self._refusals.put(key, found)
            except Exception as error:
                # An answer that cannot be read, for example; another target's may be sound.
                if self._failures.due() is not None:
                    logger.error("a target could not be asked about a caller", exc_info=error)
                found = GatewayFailed
            else:
                self._refusals.forget(key)
                # Older targets do not report it; then the caller stands for itself.
                tenant = info.tenant or key.hex()
                self._tenants.put(key, tenant)
                return tenant
        return found


def _key(caller: HttpCaller) -> bytes:
    """Instead of the token itself, of which no further copy is kept."""
    return hashlib.blake2b(caller.key("").encode(), digest_size=16).digest()
