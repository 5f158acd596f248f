"""How many replicas there should be: an autoscaling policy of the application.

Ray sends this module by value to Serve's controller, so it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FleetScaling:
    """Targets by the requests that they have and the tokens that they generate, drafts by how late and how busy they
    are, gateways by their requests as Serve's own policy does. Serve then applies each deployment's limits, delays and
    factors."""

    def __init__(
        self,
        requests: float = 64.0,
        tokens_per_second: float = 0.0,
        late_share: float = 0.05,
        busy_share: float = 0.5,
    ) -> None:
        """Set these to what a target of yours does well.

        Args:
            requests: running and waiting ones that a target should have.
            tokens_per_second: that a target should generate; not looked at when 0.
            late_share: of passes for which the draft may be late before there should be another draft.
            busy_share: of time in which a draft should draft. One that drafts less than half of this is not why answers
                are late.

        Raises:
            ValueError: a number that nothing can be divided by.
        """
        if requests <= 0 or busy_share <= 0 or tokens_per_second < 0 or late_share < 0:
            raise ValueError("requests and busy_share are above 0, tokens_per_second and late_share not below it")
        self._requests, self._tokens_per_second = requests, tokens_per_second
        self._late_share, self._busy_share = late_share, busy_share

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, float], dict[Any, Any]]:
        """Replicas by deployment, from Serve's `AutoscalingContext` of each that is scaled. One without figures stays
        as it is."""
        by_name = {deployment.name: context for deployment, context in contexts.items()}
        wanted = {}
        for deployment, context in contexts.items():
            match deployment.name:
                case "Target":
                    wanted[deployment] = self._targets(context)
                case "Draft":
                    wanted[deployment] = self._drafts(context, by_name.get("Target"))
                case _:
                    wanted[deployment] = context.total_num_requests / context.config.get_target_ongoing_requests()
        return wanted, {}

    def _targets(self, context: Any) -> float:
        requests = _figure(context, "requests")
        if not requests:
            return float(context.target_num_replicas)
        wanted = sum(requests) / self._requests
        if self._tokens_per_second:
            wanted = max(wanted, sum(_figure(context, "tokens_per_second")) / self._tokens_per_second)
        return wanted

    def _drafts(self, context: Any, target: Any) -> float:
        busy = _figure(context, "busy_share")
        if not busy:
            return float(context.target_num_replicas)
        wanted = sum(busy) / self._busy_share
        late = _figure(target, "late_share") if target is not None else []
        is_late = bool(late) and sum(late) / len(late) > self._late_share
        if is_late and max(busy) > self._busy_share / 2:
            wanted = max(wanted, context.current_num_replicas + 1.0)
        return wanted


def _figure(context: Any, name: str) -> list[float]:
    """A figure of every replica that has sent it."""
    by_replica = (context.aggregated_metrics or {}).get(name) or {}
    return [float(value) for value in by_replica.values()]
