"""Other weights for all targets of an application, replica after replica: for loops of reinforcement learning."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from outrider.weight_updates import RunningRequests

# What Serve takes with the applications; the rest of its answer are states.
_OF_THE_CLUSTER = ("proxy_location", "http_options", "grpc_options", "target_capacity")


class RolloutFailed(Exception):
    """Weights that not all targets serve: the reason that Serve gives."""


def update_weights(
    dashboard: str,
    folder: str,
    *,
    application: str = "outrider",
    running: RunningRequests = RunningRequests.CONTINUE,
    timeout: float = 3600.0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Have every target serve the weights in `folder`, and return once all do. Serve exchanges a fifth of the replicas
    at a time, one at least; those get no further requests meanwhile, and running ones go on as `running` says. Replicas
    that start later load the same weights before they take requests.

    It sets the deployment's `user_config`, as `serve deploy` with a changed file would. Two callers at once may undo
    each other's change.

    Args:
        dashboard: http://HOST:PORT of Ray's dashboard.
        folder: below `weights_folder` of every target's machine; another than the one that is served, which is not
            read again.
        timeout: seconds until all targets should serve them.

    Raises:
        RolloutFailed: no such application, a target that refuses the weights, or the time is over; some targets may
            serve them.
        OSError: the dashboard cannot be reached.
    """
    url = dashboard.rstrip("/") + "/api/serve/applications/"
    details = _call(url)
    if application not in details["applications"]:
        raise RolloutFailed(f"there is no application {application!r}")
    _call(url, _with_weights(details, application, {"weights": folder, "running": running.value}))
    deadline = time.monotonic() + timeout
    while True:
        state = _call(url)["applications"].get(application, {})
        target = state.get("deployments", {}).get("Target", {})
        config = (target.get("deployment_config") or {}).get("user_config") or {}
        if config.get("weights") == folder:
            if state["status"] == "RUNNING" and target["status"] == "HEALTHY":
                return
            if state["status"] in ("DEPLOY_FAILED", "UNHEALTHY") or target["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise RolloutFailed(f"not all targets serve {folder}: {target.get('message') or state.get('message')}")
        if time.monotonic() > deadline:
            raise RolloutFailed(f"after {timeout:g} s not all targets serve {folder}")
        sleep(1.0)


def _with_weights(details: dict[str, Any], application: str, user_config: dict[str, str]) -> dict[str, Any]:
    """The configuration that is deployed, of all applications, with these weights."""
    configs = []
    for name, state in details["applications"].items():
        config = state.get("deployed_app_config")
        if config is None:
            raise RolloutFailed(f"the application {name!r} was not deployed from a config file")
        if name == application:
            deployments = {each["name"]: each for each in config.get("deployments", [])}
            deployments["Target"] = {"name": "Target", **deployments.get("Target", {}), "user_config": user_config}
            config = {**config, "deployments": list(deployments.values())}
        configs.append(config)
    cluster = {name: details[name] for name in _OF_THE_CLUSTER if details.get(name) is not None}
    return {**cluster, "applications": configs}


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of Serve's REST interface. Raises `RolloutFailed` for one that is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"content-type": "application/json"}, method="GET" if body is None else "PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise RolloutFailed(f"{url}: {error.code}: {error.read().decode(errors='replace')[:2000]}") from None
    return json.loads(text) if text else None
