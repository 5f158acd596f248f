"""The application that Serve builds: `import_path: outrider_ray.application:fleet`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from outrider_client.local.supervisor import STOP_SECONDS
from outrider_ray.config import FleetConfig
from outrider_ray.deployments import DraftReplica, GatewayReplica, TargetReplica

# Serve takes a replica that stops off its list at once, and calls its end this much later: more than gateways and
# targets take to look at the list again.
_LEFT_OUT_SECONDS = 5.0
# A health call beside a step of seconds. A service that ended is found at the next check in any case.
_HEALTH_TIMEOUT_SECONDS = 30.0


def fleet(args: Mapping[str, Any]) -> serve.Application:
    """Targets, drafts and gateways of one model. `args` has the fields of `FleetConfig`; resources, replicas and
    autoscaling are set in the config file under the names `Target`, `Draft` and `Gateway`. Raises `SettingsError`."""
    config = FleetConfig.of(args)
    drafts = []
    if config.draft is not None:
        resources = _resources(config.draft, *config.drafters.values())
        drafts = [_deployment(DraftReplica, "Draft", resources).bind(config)]
    target = _deployment(TargetReplica, "Target", _resources(config.target)).bind(config, *drafts)
    gateway = serve.deployment(
        serve.ingress()(GatewayReplica),
        name="Gateway",
        # Beyond its own limit it answers 429, which Serve's queue would keep from it.
        max_ongoing_requests=2 * config.gateway_config().max_running,
        graceful_shutdown_timeout_s=config.gateway_config().drain_seconds,
    )
    return gateway.bind(config, target)


def _deployment(replica: type, name: str, resources: Mapping[str, float]) -> Any:
    return serve.deployment(
        replica,
        name=name,
        ray_actor_options=dict(resources),
        # Serve's calls to a replica are of its own and ours: an address, a state of health.
        max_ongoing_requests=100,
        health_check_period_s=2.0,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_wait_loop_s=_LEFT_OUT_SECONDS,
        graceful_shutdown_timeout_s=_LEFT_OUT_SECONDS + STOP_SECONDS + _LEFT_OUT_SECONDS,
    )


def _resources(*tables: Mapping[str, Any]) -> dict[str, float]:
    """What a replica with these settings reserves unless the config file says otherwise. Ranks share a host, so N of
    them are N GPUs of one bundle; drafters of one service share one."""
    on_gpu = any(str(table.get("device", "")).startswith("cuda") for table in tables)
    return {
        "num_cpus": float(max(table.get("threads") or 1 for table in tables)),
        "num_gpus": float(tables[0].get("tensor_parallel", 1)) if on_gpu else 0.0,
    }
