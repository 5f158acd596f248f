"""A cluster of Ray on this machine, with a raylet for each node, and Serve's REST interface to deploy to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from waits import HUNG_SECONDS

from outrider.ports import free_port

APPLICATION = "outrider"
_POLL_SECONDS = 0.5
# Of what Ray gives up after a time of its own.
_TRIES = 4
# Ray's own limits, which a machine with other work would pass; and figures for the autoscaler as often as they are
# looked at.
_ENVIRONMENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    # Ray has its workers, and so their services, run behind everything else.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# The same, but read when Ray is imported.
os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "300")
_NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@dataclass
class FleetCluster:
    """`serve` is where the application answers, `dashboard` where it is deployed."""

    cluster: Any
    serve: str
    dashboard: str

    def add_node(self) -> Any:
        """A node with room for one target."""
        for left in reversed(range(_TRIES)):
            try:
                return self.cluster.add_node(resources={"target": 1}, **_NODE)
            # Ray's errors have no base of their own. Its limit here is half a minute, whatever else a machine does.
            except Exception as error:
                if not left or "timed out during startup" not in str(error):
                    raise
        raise AssertionError("the last try returns or raises")

    def kill_node(self, node: Any) -> None:
        """End a node and all that runs there at once, without a signal that could be handled."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        tree = [raylet, *raylet.children(recursive=True)]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def deploy(self, application: dict[str, Any]) -> None:
        """Deploy, and return once every replica of it runs."""
        host, _, port = self.serve.removeprefix("http://").rpartition(":")
        document = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": host, "port": int(port)},
            "applications": [{"name": APPLICATION, "route_prefix": "/", **application}],
        }
        request = urllib.request.Request(
            f"{self.dashboard}/api/serve/applications/",
            json.dumps(document).encode(),
            {"content-type": "application/json"},
            method="PUT",
        )
        # Serve itself has a minute to start in, and goes on from there when it is asked again.
        self._call(request, tries=_TRIES)
        self.wait_for(lambda state: state["status"] == "RUNNING", "it does not run")

    def _call(self, request: urllib.request.Request, tries: int) -> None:
        for left in reversed(range(tries)):
            try:
                urllib.request.urlopen(request, timeout=HUNG_SECONDS).close()
                return
            except urllib.error.HTTPError as error:
                reason = error.read().decode()
                assert left, reason

    def state(self) -> dict[str, Any]:
        """Serve's account of the application."""
        with urllib.request.urlopen(f"{self.dashboard}/api/serve/applications/", timeout=HUNG_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)["applications"].get(APPLICATION, {"status": "UNKNOWN"})
        return found

    def wait_for(self, holds: Callable[[dict[str, Any]], bool], problem: str) -> None:
        deadline = time.monotonic() + 2 * HUNG_SECONDS
        while not holds(state := self.state()):
            assert state["status"] not in ("DEPLOY_FAILED",), state
            assert time.monotonic() < deadline, (problem, state)
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def fleet_cluster() -> Iterator[FleetCluster]:
    """A cluster of a head, which has room for gateways and drafts only. All its processes end with it."""
    import ray
    from ray.cluster_utils import Cluster

    # Its sockets' paths must be short. The cluster's address is kept there too, and not where other users' is.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    own = {**_ENVIRONMENT, "RAY_TMPDIR": folder}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    os.mkdir(f"{folder}/ray")
    dashboard, door = free_port(), free_port()
    head = {**_NODE, "include_dashboard": True, "dashboard_port": dashboard, "temp_dir": f"{folder}/ray"}
    cluster, started = Cluster(), list[psutil.Process]()
    try:
        cluster.add_node(resources={"front": 8}, **head)
        started += psutil.Process().children(recursive=True)
        yield FleetCluster(cluster, f"http://127.0.0.1:{door}", f"http://127.0.0.1:{dashboard}")
    finally:
        started += psutil.Process().children(recursive=True)
        cluster.shutdown()
        ray.shutdown()
        for process in set(started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
