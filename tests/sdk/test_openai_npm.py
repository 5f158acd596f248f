"""OpenAI's own npm package against the gateway, before the real services with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sdk.openai_npm import SOURCE, ApiError, OpenAiNpm, install
from waits import HUNG_SECONDS

from outrider.sampling import SamplingParams
from outrider_client import Client
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.server import GatewayServer

# The first test waits for npm.
pytestmark = [pytest.mark.sdk, pytest.mark.asyncio(loop_scope="session")]

MESSAGES: Any = [{"role": "system", "content": "brief"}, {"role": "user", "content": "say something"}]
GATEWAY_PAGE = Path(__file__).parents[2] / "docs/gateway.md"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(services: Any) -> AsyncIterator[GatewayServer]:
    config = GatewayConfig(target=services.target, listen="127.0.0.1:0", drain_seconds=2.0)
    async with GatewayServer(config, AccessOptions()) as server:
        yield server


@pytest.fixture(scope="session")
def npm(gateway: GatewayServer) -> OpenAiNpm:
    install()
    return OpenAiNpm(f"http://{gateway.address}/v1")


@pytest.fixture
def chat(model_folder: Path) -> dict[str, Any]:
    """A request for a greedy answer."""
    return {"model": str(model_folder), "messages": MESSAGES, "max_tokens": 40, "temperature": 0}


async def plainly(services: Any, **sampling: Any) -> Any:
    """The same answer over gRPC."""
    async with Client.connect(services.target) as client:
        pairs = [(turn["role"], turn["content"]) for turn in MESSAGES]
        return await client.generate(messages=pairs, sampling=SamplingParams(**sampling)).result()


async def test_chat_says_what_grpc_says(npm: OpenAiNpm, services: Any, chat: dict[str, Any]) -> None:
    expected = await plainly(services, max_tokens=40, temperature=0.8, seed=5)
    answer = await npm.run("create", body={**chat, "temperature": 0.8, "seed": 5})
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == expected.completion_tokens
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert answer["model"] == chat["model"]


async def test_stream_says_the_same(npm: OpenAiNpm, services: Any, chat: dict[str, Any]) -> None:
    expected = await plainly(services, max_tokens=40)
    asked = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = await npm.run("stream", body=asked)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert len(chunks) > 2
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 40


async def test_the_packages_stream_helper(npm: OpenAiNpm, services: Any, chat: dict[str, Any]) -> None:
    expected = await plainly(services, max_tokens=40, logprobs=1)
    asked = {**chat, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}
    said = await npm.run("helper", body=asked)
    (choice,) = said["final"]["choices"]
    assert choice["message"]["content"] == "".join(said["pieces"]) == expected.text
    assert len(said["pieces"]) > 1
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == len(expected.token_ids)
    assert said["final"]["usage"]["completion_tokens"] == 40


async def test_logprobs_name_tokens(npm: OpenAiNpm, chat: dict[str, Any]) -> None:
    answer = await npm.run("create", body={**chat, "max_tokens": 8, "logprobs": True, "top_logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_completions(npm: OpenAiNpm, chat: dict[str, Any]) -> None:
    asked = {"model": chat["model"], "prompt": ["abab", [20, 21, 22]], "max_tokens": 6, "temperature": 0, "logprobs": 1}
    answer = await npm.run("create", "completions", asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert len(choice["logprobs"]["token_logprobs"]) == 6
    chunks = await npm.run("stream", "completions", {**asked, "stream": True})
    said = ["", ""]
    for chunk in chunks:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert said == [choice["text"] for choice in answer["choices"]]


async def test_seeded_choices_differ_and_repeat(npm: OpenAiNpm, chat: dict[str, Any]) -> None:
    asked = {**chat, "max_tokens": 12, "temperature": 1, "n": 3, "seed": 3}
    first, again = await npm.run("create", body=asked), await npm.run("create", body=asked)
    said = [choice["message"]["content"] for choice in first["choices"]]
    assert said == [choice["message"]["content"] for choice in again["choices"]]
    assert len(set(said)) == 3
    alone = await npm.run("create", body={**asked, "n": 1, "seed": 4})
    assert alone["choices"][0]["message"]["content"] == said[1]


async def test_stop_string_is_not_part_of_the_text(npm: OpenAiNpm, services: Any, chat: dict[str, Any]) -> None:
    whole = (await plainly(services, max_tokens=40)).text
    stop = whole[10:12]
    answer = await npm.run("create", body={**chat, "stop": [stop]})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]


async def test_a_prediction_is_counted_and_changes_nothing(npm: OpenAiNpm, services: Any, chat: dict[str, Any]) -> None:
    expected = await plainly(services, max_tokens=40)
    for text, right in ((expected.text, True), ("z" * 40, False)):
        for case in ("create", "stream"):
            asked: dict[str, Any] = {**chat, "prediction": {"type": "content", "content": text}}
            if case == "stream":
                asked |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await npm.run(case, body=asked)
            usage = (answer[-1] if case == "stream" else answer)["usage"]["completion_tokens_details"]
            if case == "create":
                assert answer["choices"][0]["message"]["content"] == expected.text
            # A tiny model is fast: whether a wrong one is offered at all, its row budget decides.
            assert (usage["accepted_prediction_tokens"] > 0) == right
            assert usage["rejected_prediction_tokens"] >= 0
    # Without one, nothing is said of it.
    answer = await npm.run("create", body=chat)
    assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("more", "status", "param", "code", "name"),
    [
        ({"model": "other"}, 404, "model", "model_not_found", "NotFoundError"),
        ({"temperature": 3e9}, 400, "temperature", "invalid_value", "BadRequestError"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "invalid_value", "BadRequestError"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            400,
            "messages[0].role",
            "invalid_value",
            "BadRequestError",
        ),
        ({"logit_bias": {"5000": 1}}, 400, "logit_bias[5000]", "invalid_value", "BadRequestError"),
        ({"prediction": {"type": "x", "content": ""}}, 400, "prediction.type", "invalid_value", "BadRequestError"),
    ],
)
@pytest.mark.parametrize("case", ["create", "stream"])
async def test_errors_name_the_field(
    npm: OpenAiNpm, chat: dict[str, Any], case: str, more: Any, status: int, param: str, code: str, name: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await npm.run(case, body={**chat, **more, "stream": case == "stream"})
    fields = caught.value.fields
    assert (fields["status"], fields["param"], fields["code"]) == (status, param, code)
    assert fields["name"] == name
    # What a user sends us when asking why.
    assert fields["requestID"]


async def test_wrong_tokens_are_authentication_errors(npm: OpenAiNpm) -> None:
    with pytest.raises(ApiError) as caught:
        await replace(npm, api_key="ö" * 3).run("models")
    assert caught.value.fields["status"] == 401


async def test_abort_frees_what_the_answer_held(
    npm: OpenAiNpm, gateway: GatewayServer, services: Any, chat: dict[str, Any]
) -> None:
    asked = {**chat, "max_tokens": 450, "stream": True, "ignore_eos": True, "outrider": {"speculation": False}}
    chunks = await npm.run("stream", body=asked, abortAfter=3)
    assert 3 <= len(chunks) < 450
    await services.idle()
    with pytest.raises(ApiError) as caught:
        await npm.run("abandon", body={**asked, "stream": False, "n": 16})
    assert caught.value.fields["aborted"]
    await services.idle()
    async with asyncio.timeout(HUNG_SECONDS):
        while any(target.running for target in gateway.application.targets.all):
            await asyncio.sleep(0.01)


async def test_models(npm: OpenAiNpm, chat: dict[str, Any]) -> None:
    models = await npm.run("models")
    assert [model["id"] for model in models["listed"]] == [chat["model"]]
    assert models["one"]["object"] == "model"


async def test_the_pages_example(npm: OpenAiNpm, gateway: GatewayServer, chat: dict[str, Any]) -> None:
    """That of docs/gateway.md, for another port and model."""
    found = re.search(r"```js\n(.*?)```", GATEWAY_PAGE.read_text(), re.DOTALL)
    assert found is not None and len(found[1].splitlines()) <= 10
    program = found[1].replace("127.0.0.1:8000", gateway.address).replace("smollm2-135m-instruct", chat["model"])
    # It draws at temperature 1 without a seed, and one answer may end at its first token; hardly two of them.
    said = [await npm.script("--input-type=module", "--eval", program) for _ in range(2)]
    answer = await npm.run("create", body={**chat, "messages": [{"role": "user", "content": "What is a bridge?"}]})
    assert any(said) and answer["choices"][0]["message"]["content"]


async def test_the_version_is_pinned() -> None:
    package = json.loads((SOURCE / "package.json").read_text())
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", package["dependencies"]["openai"])
    installed = {name: entry for name, entry in lock["packages"].items() if name}
    assert all("integrity" in entry and "resolved" not in entry for entry in installed.values())
