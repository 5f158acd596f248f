"""Every SDK against the real services: the same tokens, errors, ends and noise in each language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UnknownModel
from outrider.serving import Authenticator, Caller, GrpcServer, Service, ServingOptions
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc, tree_pb2

# The first test of each language waits for its build.
pytestmark = [pytest.mark.sdk, pytest.mark.asyncio(loop_scope="session")]

VECTORS = Path(__file__).parents[1] / "protos" / "noise_vectors.json"
PROMPT = [20, 21, 22, 23, 20, 21, 22, 23, 20, 21]
GREEDY = {"ignore_eos": True, "max_tokens": 48}
# A seed that uses all 64 bits, more than a double holds.
SEEDED = {"ignore_eos": True, "max_tokens": 48, "temperature": 0.8, "top_p": 0.9, "seed": 2**63 + 11}
# Far more than any test waits for.
ENDLESS = {"ignore_eos": True, "max_tokens": 480}
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])

CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, UNIMPLEMENTED, UNAUTHENTICATED = 1, 3, 4, 5, 12, 16


class WithoutModel(target_pb2_grpc.TargetServiceServicer):
    """A target that has nothing to tell of."""

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        raise UnknownModel("nothing is served")


def asking(sampling: dict[str, Any], token_ids: list[int] = PROMPT, *, draft: bool = True) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenInput(token_ids=token_ids),
        sampling=tree_pb2.SamplingParameters(**sampling),
        speculation=pb.SpeculationOptions(enabled=draft),
    )


async def plain(sdk: Any, sampling: dict[str, Any], token_ids: list[int] = PROMPT) -> list[int]:
    """What the target says without a draft."""
    answer = await sdk.run("generate", asking(sampling, token_ids, draft=False))
    return list(answer["tokenIds"])


class TestGenerate:
    @SAMPLINGS
    async def test_drafts_change_nothing(self, sdk: Any, sampling: dict[str, Any]) -> None:
        answer = await sdk.run("generate", asking(sampling))
        assert answer["tokenIds"] == await plain(sdk, sampling)
        assert answer["completionTokens"] == len(answer["tokenIds"]) == sampling["max_tokens"]
        assert answer["finishReason"] == pb.FINISH_REASON_LENGTH
        # Every step ends in a token of the target's own, but the last may be cut off before it.
        assert answer["steps"] - (answer["completionTokens"] - answer["drafted"]) in (0, 1)

    async def test_seed_keeps_all_its_bits(self, sdk: Any) -> None:
        answer = await sdk.run("generate", asking(SEEDED))
        assert answer["seed"] == str(SEEDED["seed"])

    async def test_known_continuations_are_drafted(self, sdk: Any) -> None:
        await sdk.run("generate", asking(GREEDY))
        # A draft that shares a busy machine may come too late for a step, or for all of them.
        for _ in range(10):
            again = await sdk.run("generate", asking(GREEDY))
            if again["drafted"]:
                break
        assert again["drafted"] > 0
        assert again["steps"] < again["completionTokens"]

    async def test_a_corpus_that_is_not_there(self, sdk: Any) -> None:
        """The answer is whole, and says why it came without drafts."""
        request = asking(GREEDY)
        request.speculation.corpus = "absent"
        # A draft that shares a busy machine may answer when the request has ended.
        for _ in range(10):
            answer = await sdk.run("generate", request)
            if answer["draftRefused"]:
                break
        assert answer["draftRefused"] == "UNKNOWN_CORPUS"
        assert answer["tokenIds"] == await plain(sdk, GREEDY)
        assert (await sdk.run("generate", asking(GREEDY)))["draftRefused"] == ""

    async def test_chat(self, sdk: Any) -> None:
        assert len(await sdk.run("chat")) > 0

    async def test_slow_consumer_gets_every_token(self, sdk: Any) -> None:
        answer = await sdk.run("slowConsumer", asking(GREEDY), pauseMs=15)
        assert answer["tokenIds"] == await plain(sdk, GREEDY)

    async def test_calls_at_once_do_not_mix(self, sdk: Any) -> None:
        outputs = await sdk.run("concurrent", asking(SEEDED), sequences=12)
        assert outputs == [await plain(sdk, SEEDED)] * 12


class TestVerify:
    @SAMPLINGS
    async def test_own_drafts_change_nothing(self, sdk: Any, sampling: dict[str, Any]) -> None:
        expected = await plain(sdk, sampling)
        answer = await sdk.run("verify", asking(sampling), expected=expected)
        assert answer["tokenIds"] == expected
        assert answer["finishReason"] == pb.FINISH_REASON_LENGTH
        assert answer["accepted"] >= len(expected) // 2
        assert answer["steps"] < len(expected) // 2
        await sdk.services.idle()

    async def test_sequences_take_turns(self, sdk: Any) -> None:
        sampling = SEEDED | {"max_tokens": 8}
        outputs = await sdk.run("pingPong", asking(sampling), sequences=3)
        assert outputs == [await plain(sdk, sampling, [*PROMPT, 3 + i]) for i in range(3)]
        await sdk.services.idle()

    async def test_malformed_tree_names_its_field_and_the_sequence_goes_on(self, sdk: Any) -> None:
        problem = await sdk.run("refusedTree")
        assert problem["code"] == INVALID_ARGUMENT
        assert problem["reason"] == "INVALID_FIELD"
        assert problem["fields"] == ["tree.parents[1]"]
        assert problem["recovered"] == 1
        await sdk.services.idle()

    async def test_empty_stream_ends_cleanly(self, sdk: Any) -> None:
        assert await sdk.run("emptyStream") == "ended"


class TestErrors:
    @pytest.mark.parametrize(
        ("request_", "field"),
        [
            (asking(GREEDY, [5, 6, 7, 211]), "tokens.token_ids[3]"),
            (asking({"temperature": -1.0}), "sampling.temperature"),
            (asking({"stop": ["x", ""]}), "sampling.stop[1]"),
            (pb.GenerateRequest(), "input"),
        ],
        ids=["token_past_vocabulary", "negative_temperature", "empty_stop", "no_input"],
    )
    async def test_field_path(self, sdk: Any, request_: pb.GenerateRequest, field: str) -> None:
        problem = await sdk.run("refused", request_)
        assert problem["code"] == INVALID_ARGUMENT
        assert problem["reason"] == "INVALID_FIELD"
        assert problem["fields"] == [field]
        assert field in problem["message"]

    async def test_status_code_and_message(self, sdk: Any) -> None:
        problem = await sdk.run("refused", pb.GenerateRequest(model="another", text="a"))
        assert problem["code"] == NOT_FOUND
        assert problem["reason"] == "UNKNOWN_MODEL"
        assert problem["message"] == "another model is served"

    async def test_token(self, sdk: Any) -> None:
        """A server that knows one token, and past it no model."""
        service = Service(
            "outrider.v1.TargetService",
            lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(WithoutModel(), to),
        )
        server = GrpcServer(
            ServingOptions(authenticator=Authenticator({"sixteen-letters!": Caller("acme")})), [service]
        )
        await server.start()
        try:
            without, with_token = await sdk.run("token", target=server.address, token="sixteen-letters!")
        finally:
            await server.stop(0)
        assert (without["code"], without["reason"]) == (UNAUTHENTICATED, "UNAUTHENTICATED")
        assert (with_token["code"], with_token["reason"]) == (NOT_FOUND, "UNKNOWN_MODEL")

    async def test_unimplemented_service(self, sdk: Any) -> None:
        assert (await sdk.run("unimplemented"))["code"] == UNIMPLEMENTED


class TestEnds:
    @pytest.mark.parametrize("case", ["cancelAfterBegin", "cancelAfterFirstResponse"])
    async def test_cancelling_frees_the_sequence(self, sdk: Any, case: str) -> None:
        assert (await sdk.run(case, asking(ENDLESS, draft=False)))["code"] == CANCELLED
        await sdk.services.idle()

    async def test_deadline_frees_the_sequence(self, sdk: Any) -> None:
        problem = await sdk.run("deadline", asking(ENDLESS, draft=False), timeoutMs=100)
        assert problem["code"] == DEADLINE_EXCEEDED
        await sdk.services.idle()


async def test_target_info(sdk: Any) -> None:
    info = await sdk.run("info")
    assert info["model"]
    assert (info["vocabularySize"], info["dtype"], info["drafter"]) == (211, "float32", "trie")


async def test_draft_service(sdk: Any) -> None:
    """A taught document is proposed, and the proposal follows the root."""
    answer = await sdk.run("draft")
    assert answer["drafter"] == "trie"
    assert answer["tokens"] == 12
    first, second = answer["growth"]
    assert first[:4] == [12, 13, 14, 15]
    assert second[:3] == [13, 14, 15]


async def test_noise(sdk: Any) -> None:
    vectors = json.loads(VECTORS.read_text())
    noise = await sdk.run("noise", words=vectors["words"], races=vectors["races"])
    assert noise["words"] == [vector["words"] for vector in vectors["words"]]
    # log1p may round differently in each language, by an ulp or two.
    for got, vector in zip(noise["exponentials"], vectors["words"], strict=True):
        assert got == pytest.approx(vector["exponentials"], rel=1e-15)
    assert noise["winners"] == [race["winner"] for race in vectors["races"]]
