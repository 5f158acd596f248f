"""Serve's own list of a deployment's replicas, as the addresses of the services that they run."""

from __future__ import annotations

import logging
from typing import Any

from outrider.log_limit import LogLimit

logger = logging.getLogger(__name__)


class RunningReplicas:
    """An `AddressSource`: the services of a deployment's running replicas. Those that start, stop or exchange their
    weights are not among them."""

    def __init__(self, name: str, handle: Any) -> None:
        """`handle` is a `ray.serve.handle.DeploymentHandle` of the deployment `name`, whose replicas have an
        `address`."""
        self._name = name
        self._handle = handle
        self._failures = LogLimit()

    def __str__(self) -> str:
        return f"the deployment {self._name}"

    async def addresses(self) -> list[str]:
        """HOST:PORT of each, sorted; empty where none answers."""
        try:
            answers = await self._handle.broadcast("address").results_async(
                # For all replicas to answer; they only look an address up. One on a node that has just died does not.
                timeout_s=5.0,
                return_exceptions=True,
            )
        except Exception as error:
            # Ray's errors have no base of their own: no replica, a node or the controller that is gone.
            if self._failures.due() is not None:
                logger.warning("no replica of %s is known: %r", self._name, error)
            return []
        return sorted(answer for answer in answers if isinstance(answer, str))
