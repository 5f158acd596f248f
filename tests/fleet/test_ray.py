"""The application of Ray Serve for real: several raylets on this machine, tiny models on processors."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from engine_harness import plain, request
from other_weights import other_weights
from ray_cluster import FleetCluster, fleet_cluster
from scripted_service import byte_tokenizer
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from outrider.runtime import end_tasks
from outrider.weight_updates import RunningRequests
from outrider_client.client import Client

pytest.importorskip("ray", reason="needs outrider[ray]")

from outrider_ray.weights import RolloutFailed, update_weights

pytestmark = [
    pytest.mark.ray,
    # One cluster for all, in the order of the file: each test goes on where the one before it ended.
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
PROMPTS = [[(11 * i + 7 * j) % 200 + 3 for j in range(12)] for i in range(6)]
TOKENS = 48


@dataclass
class Load:
    """Requests one after the other from several clients, and what became of each."""

    http: httpx.AsyncClient
    model: str
    answers: Counter[tuple[int, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    async def ask(self, prompt: int) -> str:
        body = {"model": self.model, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "temperature": 0}
        answer = await self.http.post("/v1/completions", json={**body, "ignore_eos": True})
        if answer.status_code != 200:
            raise RuntimeError(answer.json()["error"]["message"])
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def _client(self, number: int, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            prompt = number % len(PROMPTS)
            try:
                self.answers[prompt, await self.ask(prompt)] += 1
            except RuntimeError as error:
                self.failures.append(str(error))
            number += 1

    @contextlib.asynccontextmanager
    async def running(self, clients: int = 6, pause: float = 0.0) -> AsyncIterator[None]:
        """Each waits for `pause` seconds between an answer and the next request."""
        tasks = [asyncio.create_task(self._client(number, pause)) for number in range(clients)]
        try:
            yield
        finally:
            ended = [task for task in tasks if task.done()]
            await end_tasks(*tasks)
            # One ends only by an answer that is neither right nor an error in our form.
            for task in ended:
                task.result()

    async def more(self, answers: int = 20) -> None:
        """Return when so many more were answered."""
        wanted = self.answers.total() + answers
        async with asyncio.timeout(2 * HUNG_SECONDS):
            while self.answers.total() < wanted:
                await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Models:
    """Two sets of weights of one model, and what plain decoding makes of the prompts with each."""

    folder: Path
    first: list[str]
    second: list[str]


@pytest.fixture(scope="module")
def models(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    other, tokenizer = other_weights(tiny_model), byte_tokenizer()
    tiny_model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    other.save_pretrained(folder / "checkpoints" / "step-1")

    def texts(model: PreTrainedModel) -> list[str]:
        return [tokenizer.decode(plain(model, request(prompt, TOKENS)), skip_special_tokens=True) for prompt in PROMPTS]

    return Models(folder, texts(tiny_model), texts(other))


@pytest.fixture(scope="module")
def cluster() -> Iterator[FleetCluster]:
    with fleet_cluster() as running:
        yield running


def application(models: Models, targets: dict[str, Any]) -> dict[str, Any]:
    """The application with one draft and one gateway on the head; `targets` is how targets are scaled."""
    target = {
        "model": str(models.folder / "tiny"),
        "dtype": "float32",
        "threads": 1,
        # A tiny model is faster than any draft.
        "row_budget": "all",
        "draft_wait_ms": 200,
        "weights_folder": str(models.folder / "checkpoints"),
        "weights_without_token": True,
    }
    on_head = {"num_cpus": 0.1, "resources": {"front": 1}}
    return {
        "import_path": "outrider_ray.application:fleet",
        "runtime_env": {"env_vars": {"GRPC_ENABLE_FORK_SUPPORT": "0"}},
        "args": {"target": target, "draft": {"drafter": "trie"}, "gateway": {"health_seconds": 0.2}},
        "autoscaling_policy": {
            "policy_function": "outrider_ray.scaling:FleetScaling",
            # Most of a request's time is outside of a tiny model.
            "policy_kwargs": {"requests": 0.5},
        },
        "deployments": [
            {"name": "Target", "ray_actor_options": {"num_cpus": 0.1, "resources": {"target": 1}}, **targets},
            {"name": "Draft", "num_replicas": 1, "ray_actor_options": on_head},
            {"name": "Gateway", "num_replicas": 1, "ray_actor_options": on_head},
        ],
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def load(cluster: FleetCluster, models: Models) -> AsyncIterator[Load]:
    """The application with one target, and room for another."""
    cluster.add_node()
    cluster.add_node()
    scaled = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 15}
    cluster.deploy(application(models, {"autoscaling_config": {**scaled, "look_back_period_s": 5}}))
    async with httpx.AsyncClient(base_url=cluster.serve, timeout=HUNG_SECONDS) as http:
        found = Load(http, str(models.folder / "tiny"))
        await until_targets(found, 1)
        yield found


async def healthy(load: Load) -> list[str]:
    """Addresses of the targets that the gateway sends requests to."""
    answer = await load.http.get("/health/ready")
    return [address for address, is_healthy in answer.json()["targets"].items() if is_healthy]


async def until_targets(load: Load, count: int) -> list[str]:
    async with asyncio.timeout(2 * HUNG_SECONDS):
        while len(found := await healthy(load)) != count:
            await asyncio.sleep(0.5)
    return found


async def until_drafted(address: str) -> None:
    async with asyncio.timeout(HUNG_SECONDS), Client.connect(address) as client:
        while not (await client.info()).draft_connected:
            await asyncio.sleep(0.1)


async def test_answers_are_those_of_plain_decoding(load: Load, models: Models) -> None:
    (target,) = await healthy(load)
    await until_drafted(target)
    assert [await load.ask(number) for number in range(len(PROMPTS))] == models.first


async def test_targets_find_a_draft_that_was_started_again(load: Load, models: Models) -> None:
    (target,) = await healthy(load)
    (draft,) = [each for each in psutil.process_iter(["cmdline"]) if _is_ours(each, "draft_service")]
    draft.kill()
    async with asyncio.timeout(HUNG_SECONDS), Client.connect(target) as client:
        while (await client.info()).draft_connected:
            await asyncio.sleep(0.05)
    assert [await load.ask(number) for number in range(len(PROMPTS))] == models.first
    # On another port.
    await until_drafted(target)


async def test_targets_are_added_and_removed_with_the_load(load: Load, models: Models) -> None:
    async with load.running():
        await load.more()
        await until_targets(load, 2)
        await load.more()
    async with load.running(clients=1, pause=1.0):
        # It is too little for two targets. Its answers go on.
        await until_targets(load, 1)
        await load.more(3)
    assert not load.failures and load.answers and set(load.answers) <= set(enumerate(models.first))


async def test_weights_are_rolled_out_under_load(load: Load, models: Models, cluster: FleetCluster) -> None:
    async with load.running():
        await until_targets(load, 2)
        change = partial(update_weights, cluster.dashboard, running=RunningRequests.DRAIN, timeout=HUNG_SECONDS)
        with pytest.raises(RolloutFailed, match="no application 'other'"):
            await asyncio.to_thread(change, "step-1", application="other")
        await asyncio.to_thread(change, "step-1")
        load.answers.clear()
        # What had begun before ends with the weights that it began with.
        await load.more()
        await until_targets(load, 2)
        load.answers.clear()
        await load.more()
    assert not load.failures
    assert load.answers and set(load.answers) <= set(enumerate(models.second))


async def test_a_node_is_killed_under_load(load: Load, models: Models, cluster: FleetCluster) -> None:
    async with load.running():
        lost, _ = await until_targets(load, 2)
        load.answers.clear()
        nodes = {node: _listens_on(node, lost) for node in cluster.cluster.worker_nodes}
        (node,) = [node for node, is_here in nodes.items() if is_here]
        cluster.kill_node(node)
        await until_targets(load, 1)
        await load.more()
        cluster.add_node()
        # In place of the lost one, with the weights that the application names.
        await until_targets(load, 2)
        await load.more()
    # An answer is whole and right, or an error that names its reason; a request without a token was sent again.
    assert load.answers and set(load.answers) <= set(enumerate(models.second))
    assert len(load.failures) <= 6 and all(load.failures)


def _is_ours(process: psutil.Process, module: str) -> bool:
    """Whether it runs a service that was started by this test's cluster."""
    if module not in (process.info["cmdline"] or []):
        return False
    return psutil.Process().pid in [parent.pid for parent in process.parents()]


def _listens_on(node: Any, address: str) -> bool:
    port = int(address.rpartition(":")[2])
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in raylet.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(each.laddr.port == port for each in process.net_connections("tcp") if each.status == "LISTEN"):
                return True
    return False
