"""A draft service that means harm, in the place of the real one for a while."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

from outrider.serving import GrpcServer, Service, ServingOptions
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import info_to_pb
from outrider.wire.frames import MAX_NODES as NODES
from outrider.wire.frames import DraftInfo, TreeLimits

SERVICE_NAME = "outrider.v1.DraftService"
_FLOOD_FRAMES = 200
_INFO = DraftInfo("liar", 0, "", TreeLimits(63, 16), 1 << 20, "0")


class LyingDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers each sequence as `manner` says: "lying" (sound trees of wrong tokens, said to be certain), "garbled"
    (parts that the contract forbids) or "flooding" (hundreds of full frames that nobody asked for)."""

    def __init__(self, vocabulary_size: int, seed: int) -> None:
        self.manner = "lying"
        # What it says that it is.
        self.info = _INFO
        self._vocabulary_size = vocabulary_size
        self._random = random.Random(seed)

    async def GetDraftInfo(self, _request: Any, _context: Any) -> draft_pb2.GetDraftInfoResponse:
        return info_to_pb(self.info)

    async def Propose(self, _requests: Any, context: Any) -> None:
        next_ids: dict[int, int] = {}
        while (frame := await context.read()) is not grpc.aio.EOF:
            asked: list[tuple[int, int]] = []
            if frame.HasField("open"):
                opened = draft_pb2.SequenceOpened(sequence_id=frame.open.sequence_id)
                await context.write(draft_pb2.ProposeResponse(opened=opened))
                asked = [(frame.open.sequence_id, frame.open.step)]
            elif frame.HasField("advance"):
                asked = [(each.sequence_id, each.step) for each in frame.advance.sequences]
            for sequence_id, step in asked:
                for part in self._parts(sequence_id, step, next_ids):
                    await context.write(draft_pb2.ProposeResponse(growth=draft_pb2.GrowSequences(sequences=[part])))

    def _parts(self, sequence_id: int, step: int, next_ids: dict[int, int]) -> Sequence[draft_pb2.SequenceGrowth]:
        coins, count = self._random, 12
        first = next_ids.get(sequence_id, 1)
        if self.manner == "flooding":
            next_ids[sequence_id] = first + NODES * _FLOOD_FRAMES
            return [
                _growth(sequence_id, step, first + NODES * i, [0] * NODES, [7] * NODES) for i in range(_FLOOD_FRAMES)
            ]
        next_ids[sequence_id] = first + count
        parents = [0 if i == 0 else coins.choice([0, first + coins.randrange(i)]) for i in range(count)]
        tokens = [coins.randrange(self._vocabulary_size) for _ in range(count)]
        part = _growth(sequence_id, step, first, parents, tokens, score=1.0)
        if self.manner == "garbled":
            self._garble(part)
        return [part]

    def _garble(self, part: draft_pb2.SequenceGrowth) -> None:
        coins = self._random
        where = coins.randrange(len(part.token_ids))
        spoilt = coins.randrange(6)
        if spoilt == 0:
            part.token_ids[where] = coins.choice([self._vocabulary_size, 2**31, 2**32 - 1])
        elif spoilt == 1:
            part.parent_ids[where] = coins.choice([2**32 - 1, part.first_node_id + where])
        elif spoilt == 2:
            part.scores[where] = coins.choice([math.nan, math.inf, -1.0, 2.0])
        elif spoilt == 3:
            part.base_step += coins.choice([1, 1000])
        elif spoilt == 4:
            del part.parent_ids[where:]
        else:
            part.sequence_id += coins.choice([1, 2**40])


def _growth(
    sequence_id: int, step: int, first: int, parents: Sequence[int], tokens: Sequence[int], score: float = 0.5
) -> draft_pb2.SequenceGrowth:
    return draft_pb2.SequenceGrowth(
        sequence_id=sequence_id,
        base_step=step,
        first_node_id=first,
        parent_ids=parents,
        token_ids=tokens,
        scores=[score] * len(tokens),
    )


async def serve_lies(draft: LyingDraft, path: Path, stack: AsyncExitStack) -> None:
    """Serve on a Unix socket until the stack is left."""
    service = Service(SERVICE_NAME, lambda to: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, to))
    server = GrpcServer(ServingOptions(listen=f"unix:{path}"), [service])
    await server.start()
    stack.push_async_callback(server.stop, 0)
