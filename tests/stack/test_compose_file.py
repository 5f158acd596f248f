"""The compose file as it stands: settings that exist, containers that are locked in, images that are pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import yaml
from compose_stack import ROOT
from waits import HUNG_SECONDS

from draft_service.config import DraftConfig
from draft_service.eagle.config import EagleConfig
from draft_service.ngram.config import TrieConfig
from outrider.settings import load
from outrider_gateway.config import GatewayConfig
from target_service.config import TargetConfig

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
STACK = ROOT / "target_service" / "stack"
DEFAULT = re.compile(r"\$\{(\w+):?-([^}]*)\}")


def filled(value: Any) -> Any:
    """The value with every variable at its default."""
    if isinstance(value, str):
        return DEFAULT.sub(lambda variable: variable[2], value)
    if isinstance(value, list):
        return [filled(entry) for entry in value]
    return {key: filled(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration[:-1])


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_locked_in(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # What others wait for gives up one day, and then `make up` says why.
    assert service["restart"] == ("on-failure:3" if name == "model" else "on-failure")
    assert service["logging"]["options"]["max-size"]
    assert "privileged" not in service
    assert all(filled(port).startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", ["target", "target-gpu", "draft", "gateway", "model"])
def test_our_containers_are_nobody_in_particular(name: str) -> None:
    user, _, group = SERVICES[name]["user"].partition(":")
    assert int(user) == int(group) >= 10000
    assert f"--uid {user}" in (STACK / "Dockerfile").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_by_a_variable_with_a_default(name: str) -> None:
    image = SERVICES[name]["image"]
    assert image.startswith("${")
    assert re.search(r":(v?\d+\.\d+\.\d+|local)$", filled(image))


@pytest.mark.parametrize(
    ("name", "section", "config"),
    [
        ("target", "target", TargetConfig),
        ("target-gpu", "target", TargetConfig),
        ("draft", "draft", DraftConfig),
        ("draft", "trie", TrieConfig),
        ("draft", "eagle", EagleConfig),
        ("gateway", "gateway", GatewayConfig),
    ],
)
def test_environments_are_settings(name: str, section: str, config: type[Any]) -> None:
    environment = filled(SERVICES[name]["environment"])
    loaded = load(config, section, None, environment)
    assert loaded != config()


@pytest.mark.parametrize(
    ("name", "section", "config"),
    [("target", "target", TargetConfig), ("draft", "draft", DraftConfig), ("gateway", "gateway", GatewayConfig)],
)
def test_containers_outlive_their_draining(name: str, section: str, config: type[Any]) -> None:
    drain = load(config, section, None, filled(SERVICES[name]["environment"])).drain_seconds
    assert seconds(SERVICES[name]["stop_grace_period"]) > drain + 5


@pytest.mark.parametrize("name", ["target", "target-gpu", "draft"])
def test_health_checks_call_the_module_with_the_service_port(name: str) -> None:
    service = SERVICES[name]
    listen = next(value for key, value in service["environment"].items() if key.endswith("_LISTEN"))
    command = service["healthcheck"]["test"]
    assert command[:4] == ["CMD", "python", "-m", "outrider.healthcheck"]
    assert command[4].rpartition(":")[2] == listen.rpartition(":")[2]


def test_the_gateway_answers_for_its_own_health() -> None:
    service = SERVICES["gateway"]
    port = service["environment"]["OUTRIDER_GATEWAY_LISTEN"].rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/health'" in service["healthcheck"]["test"][-1]
    assert filled(service["ports"]) == [f"127.0.0.1:8000:{port}"]
    assert service["mem_limit"]


@pytest.mark.parametrize("more", ["", "llm.example,.lan"])
def test_the_gateway_answers_to_its_name_inside(more: str) -> None:
    hosts = SERVICES["gateway"]["environment"]["OUTRIDER_GATEWAY_ALLOW_HOST"]
    assert filled(hosts) == hosts.replace("${OUTRIDER_HTTP_HOSTS:-}", "")
    environment = {"OUTRIDER_GATEWAY_ALLOW_HOST": hosts.replace("${OUTRIDER_HTTP_HOSTS:-}", more)}
    loaded = load(GatewayConfig, "gateway", None, environment)
    assert loaded.hosts == ("gateway", *filter(None, more.split(",")))


def test_the_draft_is_on_the_inner_network_only() -> None:
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    assert SERVICES["draft"]["networks"] == ["inside"]
    assert "ports" not in SERVICES["draft"]


def test_extras_come_with_their_profile_only() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert {name for name, asked in profiles.items() if not asked} == {
        "model",
        "draft",
        "target",
        "gateway",
        "prometheus",
    }
    assert profiles["target-gpu"] == ["gpu"]
    assert profiles["grafana"] == profiles["jaeger"] == ["observability"]
    devices = SERVICES["target-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] if not source.startswith(".") else (ROOT / source).exists()


def test_the_image_gets_what_the_wheel_needs() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (STACK / "Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists()
        assert any(source == path or source.startswith(f"{path}/") for path in kept)


def test_requirements_are_the_projects() -> None:
    done = subprocess.run(
        [sys.executable, str(STACK / "requirements.py"), "target"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert any(line.startswith("torch") for line in done.stdout.splitlines())
    assert any(line.startswith("gguf") for line in done.stdout.splitlines())


TOKENS = ("compose.yaml", "target_service/stack/tokens.yaml")


def test_tokens_are_a_secret() -> None:
    more = yaml.safe_load((ROOT / TOKENS[1]).read_text())
    assert set(more["secrets"]) == {"tokens"}
    for name in ("target", "target-gpu"):
        environment = more["services"][name]["environment"]
        loaded = load(TargetConfig, "target", None, environment)
        assert loaded.auth_tokens == "/run/secrets/tokens" and more["services"][name]["secrets"] == ["tokens"]


def composes() -> list[list[str]]:
    """Each compose that is installed, the plugin and docker-compose 1.29."""
    found = [["docker", "compose"]] if shutil.which("docker") and _is_there(["docker", "compose"]) else []
    standalone = "/usr/bin/docker-compose" if os.path.exists("/usr/bin/docker-compose") else "docker-compose"
    return [*found, [standalone]] if shutil.which(standalone) else found


def _is_there(command: list[str]) -> bool:
    return subprocess.run([*command, "version"], capture_output=True, timeout=HUNG_SECONDS).returncode == 0


@pytest.mark.skipif(not composes(), reason="no compose is installed")
@pytest.mark.parametrize("command", composes(), ids=" ".join)
@pytest.mark.parametrize("files", [TOKENS[:1], TOKENS], ids=["alone", "tokens"])
def test_compose_itself_accepts_the_files(command: list[str], files: tuple[str, ...]) -> None:
    named = [word for file in files for word in ("--file", file)]
    done = subprocess.run(
        [*command, *named, "config", "--quiet"],
        cwd=ROOT,
        env={**os.environ, "OUTRIDER_TOKENS": "pyproject.toml"},
        capture_output=True,
        text=True,
        timeout=HUNG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
