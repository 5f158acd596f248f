"""The Kubernetes manifests: valid, locked in, and true to settings, ports, metrics and alerts of the services.

The base is read as it is; overlays are rendered by kubectl where that is installed, without a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_stack import ROOT

from draft_service.config import DraftConfig
from draft_service.eagle.config import EagleConfig
from draft_service.ngram.config import TrieConfig
from outrider.settings import load
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.discovery import target_name
from target_service.config import TargetConfig

STACK = ROOT / "target_service" / "stack"
FOLDER = STACK / "kubernetes"
OVERLAYS = ("trial", "production")
VERSION = kubernetes_validate.latest_version()
# Kinds of others, for which the package has no schemas.
OF_OTHERS = {"Certificate", "GRPCRoute", "HTTPRoute", "InferencePool", "PodMonitor", "PrometheusRule"}
SECTIONS: dict[str, type[Any]] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "trie": TrieConfig,
    "eagle": EagleConfig,
    "gateway": GatewayConfig,
    "client": AccessOptions,
}
CONFIGS = {"target": TargetConfig, "draft": DraftConfig, "gateway": GatewayConfig}
Manifest = dict[str, Any]
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl renders the overlays")


def read(path: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / path).read_text()))


BASE = [manifest for path in read("base/kustomization.yaml")[0]["resources"] for manifest in read(f"base/{path}")]


@functools.cache
def rendered(overlay: str) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(manifests: list[Manifest], *kinds: str) -> Iterator[Manifest]:
    return (manifest for manifest in manifests if manifest["kind"] in kinds)


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    return next(manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name)


def containers(workload: Manifest) -> list[Manifest]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def settings(manifests: list[Manifest], service: str) -> dict[str, str]:
    return next(
        manifest["data"]
        for manifest in of_kind(manifests, "ConfigMap")
        if manifest["metadata"]["name"].startswith(f"{service}-settings-")
    )


def base_settings(service: str) -> dict[str, str]:
    generators = read("base/kustomization.yaml")[0]["configMapGenerator"]
    literals = next(one["literals"] for one in generators if one["name"] == f"{service}-settings")
    return dict(literal.split("=", 1) for literal in literals)


@pytest.mark.parametrize("manifest", BASE, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}")
def test_the_base_is_valid(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_validator_finds_a_wrong_field() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(BASE[1]))
    wrong["spec"]["template"]["spec"]["containers"][0]["imagine"] = "outrider"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str) -> None:
    manifests = rendered(overlay)
    for manifest in manifests:
        if manifest["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
    assert {"Deployment", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= {
        manifest["kind"] for manifest in manifests
    }


@needs_kubectl
def test_every_component_renders(tmp_path: Any) -> None:
    """Those too that no overlay has."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "overlays" / "all").mkdir()
    overlay = tmp_path / "kubernetes" / "overlays" / "all" / "kustomization.yaml"
    parts = sorted(path.name for path in (FOLDER / "components").iterdir())
    overlay.write_text(
        yaml.safe_dump({"resources": ["../../base"], "components": [f"../../components/{part}" for part in parts]})
    )
    done = subprocess.run(["kubectl", "kustomize", str(overlay.parent)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifests = list(yaml.safe_load_all(done.stdout))
    pool = next(of_kind(manifests, "InferencePool"))
    target = named(manifests, "Deployment", "target")
    ports = {port["containerPort"] for container in containers(target) for port in container.get("ports", [])}
    assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports
    policy = named(manifests, "NetworkPolicy", "target")
    assert {"port": 8000} in [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_is_locked_in(overlay: str) -> None:
    for workload in of_kind(rendered(overlay), "Deployment", "StatefulSet"):
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"--uid {pod['securityContext']['runAsUser']}" in (STACK / "Dockerfile").read_text()
        for container in containers(workload):
            assert container["image"].startswith("registry.example.com/outrider:0.1.0")
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for container in containers(workload) for mount in container["volumeMounts"]}
        assert mounted == volumes


@pytest.mark.parametrize("service", CONFIGS)
def test_the_base_has_settings_of_the_services(service: str) -> None:
    values = base_settings(service)
    config = load(CONFIGS[service], service, None, values)
    assert config != CONFIGS[service]()
    workload = next(m for m in of_kind(BASE, "Deployment", "StatefulSet") if m["metadata"]["name"] == service)
    pod = workload["spec"]["template"]["spec"]
    pause = int(pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["0"])[-1])
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds + pause
    ports = {port["containerPort"] for port in pod["containers"][0]["ports"]}
    listens = {int(value.rpartition(":")[2]) for name, value in values.items() if name.endswith("_LISTEN")}
    assert ports == listens


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_name_settings_that_exist(overlay: str) -> None:
    for service in CONFIGS:
        for variable in settings(rendered(overlay), service):
            if variable == "NUMBA_CACHE_DIR":
                continue
            _, section, name = variable.split("_", 2)
            known = {field.name for field in dataclasses.fields(SECTIONS[section.lower()])}
            assert name.lower() in known, variable


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_lead_to_services(overlay: str) -> None:
    manifests = rendered(overlay)
    name = target_name(settings(manifests, "gateway")["OUTRIDER_GATEWAY_TARGET"])
    assert name is not None
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "Service")}
    assert services[name.host]["clusterIP"] == "None" and services[name.host]["ports"][0]["port"] == name.port
    draft = named(manifests, "StatefulSet", "draft")["spec"]
    replicas, port = draft.get("replicas", 1), services[draft["serviceName"]]["ports"][0]["port"]
    drafts = [f"draft-{number}.{draft['serviceName']}" for number in range(replicas)]
    assert settings(manifests, "target")["OUTRIDER_TARGET_DRAFT"] == ",".join(f"{one}:{port}" for one in drafts)
    for certificate in of_kind(manifests, "Certificate"):
        assert {name.host, *drafts} <= set(certificate["spec"]["dnsNames"])
    for route in of_kind(manifests, "HTTPRoute", "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                assert backend["port"] in {one["port"] for one in services[backend["name"]]["ports"]}
    for route in of_kind(manifests, "HTTPRoute"):
        hosts = settings(manifests, "gateway")["OUTRIDER_GATEWAY_ALLOW_HOST"].split(",")
        assert set(route["spec"]["hostnames"]) <= set(hosts)


def test_alerts_are_those_of_the_stack() -> None:
    rule = read("components/monitoring/rules.yaml")[0]
    assert rule["spec"] == yaml.safe_load((STACK / "rules.yml").read_text())


def test_jobs_have_the_names_that_alerts_and_compose_use() -> None:
    compose = yaml.safe_load((STACK / "prometheus.yml").read_text())
    jobs = {one["job_name"] for one in compose["scrape_configs"]} - {"prometheus"}
    monitors = read("components/monitoring/pod-monitors.yaml")
    named_here = {
        point["relabelings"][0]["replacement"] for one in monitors for point in one["spec"]["podMetricsEndpoints"]
    }
    assert named_here == jobs


def test_scaling_and_the_picker_go_by_metrics_that_exist() -> None:
    documented = (ROOT / "docs" / "observability.md").read_text()
    scalers = read("components/autoscaling/scalers.yaml")
    metrics = [
        one["pods"]["metric"]["name"] for scaler in scalers for one in scaler["spec"]["metrics"] if "pods" in one
    ]
    pool = (FOLDER / "components" / "inference-pool" / "pool.yaml").read_text()
    metrics += [line.split("=")[1] for line in pool.splitlines() if "-metric=" in line]
    assert len(metrics) == 5
    for metric in metrics:
        assert f"`{metric}`" in documented, metric
