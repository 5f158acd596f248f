"""Any frames in any order: no bug shows, nothing is held at the end, and what was right is answered rightly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

from examples import examples
from generation import answers, asking
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import SERVED, VOCABULARY, ScriptedEngine, successor
from waits import HUNG_SECONDS

from outrider.errors import EngineDead, OutriderError
from outrider.runtime import run
from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire.trees import error_of
from target_service.api.admission import Admission
from target_service.api.verify_session import VerifyStream
from target_service.config import TargetConfig
from target_service.core.events import Sequences
from target_service.core.quotas import TenantQuotas
from target_service.telemetry.tracing import RequestTrace

# Small ranges, so that right ids, steps and roots are hit often; and the ends of what the fields hold.
TOKENS = st.integers(0, 12) | st.sampled_from([VOCABULARY - 1, VOCABULARY, 2**31, 2**32 - 1])
IDS = st.integers(0, 5) | st.just(2**64 - 1)
FLOATS = st.floats(width=32)

samplings = st.builds(
    tree_pb2.SamplingParameters,
    temperature=st.sampled_from([0.0, 0.7]) | FLOATS,
    top_p=st.none() | FLOATS,
    max_tokens=st.none() | st.integers(0, 20),
    logprobs=st.none() | st.integers(0, 30),
)
opens = st.builds(
    pb.OpenVerification,
    client_tag=IDS,
    token_ids=st.lists(TOKENS, max_size=4),
    sampling=st.just(None) | samplings,
    mode=st.sampled_from([0, 0, 0, 1, 2, 3, 77]),
)
trees = st.builds(
    tree_pb2.TokenTree,
    token_ids=st.lists(TOKENS, max_size=6),
    parents=st.lists(st.integers(0, 6), max_size=6),
    scores=st.just([]) | st.lists(FLOATS, max_size=6),
)
roots = st.builds(lambda token: tree_pb2.TokenTree(token_ids=[token], parents=[0]), TOKENS)
verifies = st.builds(pb.VerifyTree, sequence_id=IDS, step=IDS, tree=trees | roots)
frames = st.one_of(
    st.builds(pb.VerifyRequest, open=opens),
    st.builds(pb.VerifyRequest, tree=verifies),
    st.builds(pb.VerifyRequest, close=st.builds(pb.CloseVerification, sequence_id=IDS)),
    st.just(pb.VerifyRequest()),
)


async def replay(script: list[pb.VerifyRequest]) -> list[pb.VerifyResponse]:
    """What a session answers to `script`, each frame being answered before the next."""
    engine = ScriptedEngine(tick=0)
    sequences = Sequences(engine)
    engine.start(sequences.deliver)

    async def paced() -> AsyncIterator[pb.VerifyRequest]:
        for frame in script:
            yield frame
            while engine.owes_a_verdict:
                await asyncio.sleep(0)
            # One more turn of the loop, in which the verdict is dispatched.
            await asyncio.sleep(0)

    session = VerifyStream(
        TargetConfig(max_sequences_per_stream=4, verify_idle_seconds=HUNG_SECONDS),
        sequences,
        Admission(SERVED, TenantQuotas()),
        tenant="default",
        trace=lambda: RequestTrace(Tracing(), None),
    )
    reader = asyncio.create_task(session.read(paced()))
    heard = []
    while (response := await session.next()) is not None:
        heard.append(response)
    await reader
    assert len(sequences) == 0
    assert engine.open_sequences == 0
    await asyncio.to_thread(engine.stop, 0)
    return heard


@examples(60)
@given(st.lists(frames, max_size=12))
def test_any_frames(script: list[pb.VerifyRequest]) -> None:
    for response in run(replay(script)):
        if response.HasField("verdict"):
            verdict = response.verdict
            said = list(verdict.token_ids)
            assert said == [(said[0] + i) % VOCABULARY for i in range(len(said))]
            assert len(verdict.accepted_rows) <= len(said)
        elif response.HasField("status"):
            error = error_of(response.status.status)
            assert type(error) is not OutriderError
            assert not isinstance(error, EngineDead)
        else:
            assert response.opened.sequence_id


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=6), st.integers(20, 200))
def test_right_frames_in_any_shape(chains: list[list[int]], prompt: int) -> None:
    """Chains of true (1) and false tokens: the verdict keeps the true beginning and adds one token."""
    script = [pb.VerifyRequest(open=pb.OpenVerification(token_ids=[prompt]))]
    root, expected = prompt, []
    for step, chain in enumerate(chains):
        token_ids, true = [root], 0
        for kind in chain:
            token_ids.append(successor(token_ids[-1]) if kind == 1 else 7)
        while true < len(chain) and chain[true] == 1:
            true += 1
        rows = tree_pb2.TokenTree(token_ids=token_ids, parents=[0, *range(len(chain))])
        script.append(pb.VerifyRequest(tree=pb.VerifyTree(sequence_id=1, step=step, tree=rows)))
        expected.append([root + 1 + i for i in range(true + 1)])
        root += true + 1
    verdicts = [response.verdict for response in run(replay(script)) if response.HasField("verdict")]
    assert [list(verdict.token_ids) for verdict in verdicts] == expected


async def test_bytes_that_are_not_http2(target: Any) -> None:
    host, _, port = target.server.address.rpartition(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    assert await answers(target, asking(sampling={"max_tokens": 1}))
