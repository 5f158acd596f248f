"""A compose stack for tests: finds an engine, finds or makes the images, brings everything up and takes it down.

Registries are tried first. On a machine that reaches Debian's mirror but no registry, the base image is made with
debootstrap and Prometheus comes from Debian's package, so that the same compose file runs there too.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from waits import HUNG_SECONDS

from outrider.ports import free_port

ROOT = Path(__file__).parent.parent
PROJECT = "outrider-test"
BASE = "python:3.11-slim-bookworm"
PROMETHEUS = "prom/prometheus:v3.5.0"
LOCAL_BASE = "outrider-test/base:bookworm"
LOCAL_PROMETHEUS = "outrider-test/prometheus:debian"
HEALTHY_SECONDS = 420
SERVICES = ("draft", "target", "gateway", "prometheus")
# Of each replica; compose.yaml has none by itself.
LIMITS = {"OUTRIDER_CPUS": "1.5", "OUTRIDER_MEMORY": "6g", "OUTRIDER_DRAFT_CPUS": "1.25", "OUTRIDER_DRAFT_MEMORY": "2g"}
# The address is an argument of the build: one that changed had Docker install every dependency again.
WHEELS_PORT = 41873
NEEDS = """make test-compose needs a running Docker engine that this user may use, with `docker compose` or
docker-compose 1.29, and python:3.11-slim-bookworm from a registry; or, run as root, debootstrap instead of the latter.
On Debian 12: apt-get install docker.io docker-compose debootstrap iptables, and start dockerd."""


class StackFailed(AssertionError):
    """The stack cannot be brought up; the message says what is missing, or holds the end of the log."""


def run(
    *command: str,
    env: dict[str, str] | None = None,
    stdin: bytes | None = None,
    timeout: float = 900,
    errors: bool = False,
) -> str:
    """Standard output of a command, with `errors` also the other. Raises `StackFailed` with both when it fails."""
    done = subprocess.run(command, cwd=ROOT, env=env, input=stdin, capture_output=True, timeout=timeout)
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").splitlines()[-25:]
        raise StackFailed(f"{' '.join(command)} failed:\n" + "\n".join(said))
    return (done.stdout + done.stderr if errors else done.stdout).decode()


def works(*command: str, timeout: float = 60) -> bool:
    """Whether a command is there and succeeds."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=timeout).returncode == 0
    return False


def compose_command() -> list[str]:
    """How compose is called here: as `OUTRIDER_TEST_COMPOSE` says, else the plugin before docker-compose 1.29. Raises
    `StackFailed` without an engine or without compose."""
    if not works("docker", "info"):
        raise StackFailed(NEEDS)
    asked = os.environ.get("OUTRIDER_TEST_COMPOSE", "").split()
    for command in [asked] if asked else (["docker", "compose"], ["/usr/bin/docker-compose"], ["docker-compose"]):
        if works(*command, "version"):
            return command
    raise StackFailed(f"{' '.join(asked)} does not work, which OUTRIDER_TEST_COMPOSE names" if asked else NEEDS)


def image(name: str) -> bool:
    """Whether an image is here, or can be pulled."""
    return works("docker", "image", "inspect", name) or works("docker", "pull", "--quiet", name, timeout=300)


def base_image() -> str:
    """The image to build on. Raises `StackFailed` when there is no way to one."""
    if works("docker", "image", "inspect", LOCAL_BASE):
        return LOCAL_BASE
    if image(BASE):
        return BASE
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise StackFailed(NEEDS)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        packages = "python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root))
        # What this machine trusts, a proxy's certificate perhaps, the build must trust as well.
        bundle = Path("/etc/ssl/certs/ca-certificates.crt")
        if bundle.exists():
            shutil.copy(bundle, root / "etc/ssl/certs/ca-certificates.crt")
        archive = Path(scratch) / "root.tar"
        run("tar", "-C", str(root), "-cf", str(archive), ".")
        run("docker", "import", str(archive), LOCAL_BASE)
    return LOCAL_BASE


def prometheus_image(base: str) -> str:
    """Prometheus, from a registry or from Debian's package."""
    if base != LOCAL_BASE and image(PROMETHEUS):
        return PROMETHEUS
    recipe = (ROOT / "tests/stack/prometheus.Dockerfile").read_bytes()
    # BuildKit is not everywhere; the recipe is read from standard input, so that nothing else is sent.
    run("docker", "build", "--network=host", f"--build-arg=BASE={base}", "--tag", LOCAL_PROMETHEUS, "-", stdin=recipe)
    return LOCAL_PROMETHEUS


@contextmanager
def wheels_over_http() -> Iterator[str]:
    """The address of a folder of wheels that pip uses here, if it does, served to the build for its duration."""
    folder = Path(os.environ.get("PIP_FIND_LINKS", ""))
    if not os.environ.get("PIP_FIND_LINKS") or not folder.is_dir():
        yield ""
        return
    handler = functools.partial(_QuietHandler, directory=str(folder))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler)
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Test output is for tests."""


def healthy(container: dict[str, Any]) -> bool:
    state = container["State"]
    return bool(state["Running"] and state["Health"]["Status"] == "healthy")


class ComposeStack:
    """Target, draft, gateway and Prometheus from `compose.yaml`, on free ports."""

    def __init__(self) -> None:
        self._compose = compose_command()
        base = base_image()
        self.port, self.http_port, self.prometheus_port = free_port(), free_port(), free_port()
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "OUTRIDER_IMAGE": "outrider-test/outrider:local",
            "OUTRIDER_BASE": base,
            "OUTRIDER_BUILD_NETWORK": "host",
            # Only in fp32 is an answer without drafts the same token for token on a CPU.
            "OUTRIDER_DTYPE": "float32",
            **LIMITS,
            "OUTRIDER_PORT": str(self.port),
            "OUTRIDER_HTTP_PORT": str(self.http_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "PROMETHEUS_IMAGE": prometheus_image(base),
        }

    def compose(self, *arguments: str, timeout: float = 900, **variables: str) -> str:
        """What compose prints. `variables` are other values of `compose.yaml`'s, for this call alone."""
        environment = {**self._environment, **variables}
        return run(*self._compose, "--file", "compose.yaml", *arguments, env=environment, timeout=timeout)

    def up(self) -> None:
        """Build, start, and wait until everything is healthy."""
        # Prometheus answers for five minutes with the last figures of a run that has just ended.
        self.down()
        works("docker", "volume", "rm", f"{PROJECT}_prometheus")
        with wheels_over_http() as wheels:
            self._environment["OUTRIDER_FIND_LINKS"] = wheels
            if wheels:
                self._environment["OUTRIDER_TORCH_INDEX"] = ""
            self.compose("build", "draft", timeout=1800)
        self.compose("up", "--detach", "--no-build", "model", *SERVICES)
        self.wait_until_healthy(*SERVICES)

    def wait_until_healthy(self, *services: str) -> None:
        """Until every container of these services is. Raises `StackFailed` with the logs after a time."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        waiting = list(services)
        while waiting:
            waiting = [name for name in waiting if not all(map(healthy, self.containers(name)))]
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--tail=15")
                raise StackFailed(f"{', '.join(waiting)} did not become healthy:\n{logs}")
            time.sleep(2)

    def down(self) -> None:
        """Stop and remove all but the volumes and the images, of which the next run uses all but the figures again."""
        self.compose("down", "--remove-orphans", timeout=180)

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's one container."""
        [found] = self.containers(service)
        return found

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine says of each container of a service that runs or has run."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids))
        return found

    def prometheus(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of Prometheus's API."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=HUNG_SECONDS) as response:
            return json.load(response)["data"]

    def values(self, expression: str) -> list[float]:
        """The samples an instant query returns."""
        result: Sequence[dict[str, Any]] = self.prometheus("query", query=expression)["result"]
        return [float(sample["value"][1]) for sample in result]
