"""The parts of the Ray application that need no Ray: settings, figures, the autoscaling policy, the rollout."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_service.config import DraftConfig
from draft_service.eagle.config import EagleConfig
from outrider.settings import SettingsError, load
from outrider.weight_updates import RunningRequests
from outrider_ray.config import FleetConfig, ServedWeights
from outrider_ray.figures import ServiceFigures, draft_figures, target_figures
from outrider_ray.replicas import RunningReplicas
from outrider_ray.scaling import FleetScaling
from outrider_ray.weights import RolloutFailed, update_weights
from target_service.config import TargetConfig

MODEL = {"target": {"model": "m"}}


def test_settings_reach_services_as_their_environment() -> None:
    config = FleetConfig.of({**MODEL, "draft": {"drafter": "eagle"}, "drafters": {"eagle": {"head": "h"}}})
    assert config.draft_environment() == {"OUTRIDER_DRAFT_DRAFTER": "eagle", "OUTRIDER_EAGLE_HEAD": "h"}
    more = FleetConfig.of({"target": {"model": "m", "weights-without-token": True, "kv_tokens": 4096}})
    assert more.target_environment() == {
        "OUTRIDER_TARGET_MODEL": "m",
        "OUTRIDER_TARGET_WEIGHTS_WITHOUT_TOKEN": "true",
        "OUTRIDER_TARGET_KV_TOKENS": "4096",
    }
    assert FleetConfig.of({**MODEL, "gateway": {"load_bound": 2}}).gateway_config().load_bound == 2.0


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "target is missing"),
        ({"target": "m"}, "target is not a table"),
        ({**MODEL, "drafts": {}}, "there is no 'drafts'"),
        ({"target": {"listen": ":1"}}, r"target\.listen: is set by"),
        ({"target": {"draft": "a:1"}}, r"target\.draft: is set by"),
        ({**MODEL, "gateway": {"max_runing": 1}}, "gateway: there is no setting 'max_runing'"),
        ({**MODEL, "gateway": {"max_running": 0}}, "max-running: must be at least 1"),
    ],
)
def test_settings_that_are_refused(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        FleetConfig.of(args)


def test_the_file_to_copy_names_settings_that_exist() -> None:
    stack = Path(__file__).parents[2] / "target_service/stack/ray/fleet.yaml"
    (application,) = yaml.safe_load(stack.read_text())["applications"]
    config = FleetConfig.of(application["args"])
    environment = {**config.target_environment(), **config.draft_environment()}
    load(TargetConfig, "target", None, environment)
    load(DraftConfig, "draft", None, environment)
    load(EagleConfig, "eagle", None, environment)
    FleetScaling(**application["autoscaling_policy"]["policy_kwargs"])
    deployments = {each["name"]: each for each in application["deployments"]}
    assert deployments.keys() == {"Target", "Draft", "Gateway"}
    assert ServedWeights.of(deployments["Target"]["user_config"]) is None


def test_the_weights_that_an_application_names() -> None:
    assert ServedWeights.of(None) is None and ServedWeights.of({"weights": "", "running": "drain"}) is None
    assert ServedWeights.of({"weights": "s"}) == ServedWeights("s", RunningRequests.CONTINUE)
    for wrong in ({"weights": "s", "running": "stop"}, {"weight": "s"}, {"weights": 7}):
        with pytest.raises(SettingsError, match="user_config"):
            ServedWeights.of(wrong)


@dataclass
class Served:
    """An HTTP server of one page for GET; documents that are PUT replace it by `answer`."""

    pages: list[str] = field(default_factory=list)
    put: list[Any] = field(default_factory=list)
    status: int = 200
    address: str = ""


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = found.pages.pop(0) if len(found.pages) > 1 else found.pages[0]
            self._answer(200, page)

        def do_PUT(self) -> None:
            found.put.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._answer(found.status, "" if found.status == 200 else "no")

        def _answer(self, status: int, page: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def page(**samples: float) -> str:
    return "".join(f"outrider_{name} {value}\n" for name, value in samples.items())


async def test_figures_of_a_target_are_rates_of_its_metrics(served: Served) -> None:
    passes = 'outrider_draft_passes_total{{outcome="hit"}} {}\noutrider_draft_passes_total{{outcome="miss"}} {}\n'
    served.pages = [
        page(requests_running=3, requests_waiting=2, generation_tokens_total=100) + passes.format(10, 10),
        page(requests_running=4, requests_waiting=0, generation_tokens_total=500) + passes.format(40, 20),
    ]
    times = iter((10.0, 12.0))
    figures = ServiceFigures(served.address, lambda: next(times))
    first = target_figures(*await figures.read())
    assert first == {"requests": 5.0, "tokens_per_second": 0.0, "late_share": 0.0}
    assert target_figures(*await figures.read()) == {"requests": 4.0, "tokens_per_second": 200.0, "late_share": 0.25}


async def test_figures_where_the_host_waits_for_drafts_and_of_a_draft(served: Served) -> None:
    names = ("fallback_steps_total", "spec_decode_num_drafts_total", "draft_propose_seconds_sum")
    served.pages = [page(**dict.fromkeys(names, 0)), page(**dict(zip(names, (1, 9, 0.5), strict=True)))]
    times = iter((0.0, 2.0))
    figures = ServiceFigures(served.address, lambda: next(times))
    await figures.read()
    read = await figures.read()
    assert target_figures(*read)["late_share"] == 0.1 and draft_figures(*read) == {"busy_share": 0.25}


@dataclass(frozen=True)
class Deployment:
    name: str


@dataclass
class Scaled:
    """What Serve tells a policy of a deployment."""

    aggregated_metrics: dict[str, dict[str, float]]
    current_num_replicas: int = 1
    target_num_replicas: int = 1
    total_num_requests: float = 0.0
    config: Any = None

    def get_target_ongoing_requests(self) -> float:
        return 8.0


TARGET, DRAFT, GATEWAY = map(Deployment, ("Target", "Draft", "Gateway"))


def replicas(scaling: FleetScaling, **contexts: Scaled) -> dict[str, float]:
    wanted, states = scaling({Deployment(name): context for name, context in contexts.items()})
    assert not states
    return {deployment.name: count for deployment, count in wanted.items()}


def test_targets_follow_their_requests_and_tokens() -> None:
    busy = Scaled({"requests": {"a": 100.0, "b": 60.0}, "tokens_per_second": {"a": 3000.0, "b": 6000.0}}, 2, 2)
    assert replicas(FleetScaling(requests=64), Target=busy) == {"Target": 2.5}
    assert replicas(FleetScaling(requests=64, tokens_per_second=3000), Target=busy) == {"Target": 3.0}
    # One that has sent no figure yet is no idle one.
    assert replicas(FleetScaling(), Target=Scaled({}, 2, 3)) == {"Target": 3.0}


@pytest.mark.parametrize(
    ("late", "busy", "wanted"),
    [(0.0, [0.5, 0.5], 2.0), (0.2, [0.3, 0.3], 3.0), (0.2, [0.1, 0.1], 0.4), (0.0, [0.9, 0.9], 3.6)],
)
def test_drafts_follow_how_late_and_how_busy_they_are(late: float, busy: list[float], wanted: float) -> None:
    target = Scaled({"requests": {"a": 64.0}, "late_share": {"a": late}})
    draft = Scaled({"busy_share": dict(zip("ab", busy, strict=True))}, 2, 2)
    assert replicas(FleetScaling(), Target=target, Draft=draft)["Draft"] == pytest.approx(wanted)


def test_gateways_follow_their_requests() -> None:
    gateway = Scaled({}, total_num_requests=24.0)
    gateway.config = gateway
    assert replicas(FleetScaling(), Gateway=gateway) == {"Gateway": 3.0}
    with pytest.raises(ValueError, match="above 0"):
        FleetScaling(requests=0)


@dataclass
class Replicas:
    """A deployment handle whose replicas answer so, or that fails."""

    answers: list[Any]
    failure: Exception | None = None

    def broadcast(self, method: str) -> Replicas:
        assert method == "address"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s and return_exceptions
        if self.failure is not None:
            raise self.failure
        return self.answers


async def test_replicas_that_answer_are_those_that_are_found() -> None:
    found = RunningReplicas("Target", Replicas(["b:1", RuntimeError("gone"), "a:1"]))
    assert await found.addresses() == ["a:1", "b:1"] and str(found) == "the deployment Target"
    assert await RunningReplicas("Target", Replicas([], TimeoutError())).addresses() == []


def details(weights: str, status: str = "RUNNING", target: str = "HEALTHY", message: str = "") -> str:
    config = {"name": "outrider", "import_path": "x:y", "deployments": [{"name": "Target", "num_replicas": 2}]}
    deployment = {"status": target, "message": message, "deployment_config": {"user_config": {"weights": weights}}}
    return json.dumps(
        {
            "proxy_location": "HeadOnly",
            "target_capacity": None,
            "applications": {
                "outrider": {
                    "status": status,
                    "deployed_app_config": config,
                    "deployments": {"Target": deployment, "Gateway": {"status": "HEALTHY"}},
                },
                "other": {"status": "RUNNING", "deployed_app_config": {"name": "other", "import_path": "a:b"}},
            },
        }
    )


def test_a_rollout_changes_only_the_weights_and_waits_for_all_targets(served: Served) -> None:
    served.pages = [details("old"), details("old"), details("new", "DEPLOYING", "UPDATING"), details("new")]
    waits: list[float] = []
    update_weights(f"http://{served.address}/", "new", running=RunningRequests.DRAIN, sleep=waits.append)
    (document,) = served.put
    first, other = document["applications"]
    assert document["proxy_location"] == "HeadOnly" and "target_capacity" not in document
    assert first["deployments"] == [
        {"name": "Target", "num_replicas": 2, "user_config": {"weights": "new", "running": "drain"}}
    ]
    assert other == {"name": "other", "import_path": "a:b"} and len(waits) == 2


def test_a_rollout_that_fails_says_why(served: Served) -> None:
    url = f"http://{served.address}"
    served.pages = [details("new", "DEPLOY_FAILED", "DEPLOY_FAILED", "a tensor is missing")]
    with pytest.raises(RolloutFailed, match="not all targets serve new: a tensor is missing"):
        update_weights(url, "new", sleep=lambda _: None)
    served.pages = [details("old")]
    with pytest.raises(RolloutFailed, match="after 0 s"):
        update_weights(url, "new", timeout=0.0, sleep=lambda _: None)
    with pytest.raises(RolloutFailed, match="no application 'theirs'"):
        update_weights(url, "new", application="theirs")
    served.status = 400
    with pytest.raises(RolloutFailed, match="400: no"):
        update_weights(url, "new")
