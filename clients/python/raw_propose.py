"""One exchange on a Propose stream, in the role of a target. First: `outrider draft --drafter prompt_lookup`."""

import queue
import sys

import grpc

from outrider.v1 import draft_pb2, draft_pb2_grpc

# A text that repeats itself: 7, 8 was followed by 9, 10 and 11 before.
PROMPT = [7, 8, 9, 10, 11, 7, 8]


def show(growth: draft_pb2.SequenceGrowth) -> None:
    sys.stdout.write(
        f"base_step {growth.base_step}, ids from {growth.first_node_id}, parents {list(growth.parent_ids)}, "
        f"tokens {list(growth.token_ids)}, replaces {growth.replaces}\n"
    )


with grpc.insecure_channel("127.0.0.1:50052") as channel:
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    info = stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=10)
    sys.stdout.write(f"drafter {info.drafter}, wants features: {info.HasField('features')}\n")

    frames: queue.SimpleQueue[draft_pb2.ProposeRequest | None] = queue.SimpleQueue()
    answers = stub.Propose(iter(frames.get, None))
    frames.put(draft_pb2.ProposeRequest(credit=draft_pb2.Credit(frames=8)))
    opening = draft_pb2.OpenSequence(
        sequence_id=1,
        token_ids=PROMPT,
        prompt_length=len(PROMPT),
        vocabulary_size=200,
        limits=draft_pb2.TreeLimits(max_nodes=3),
    )
    frames.put(draft_pb2.ProposeRequest(open=opening))
    opened = next(answers).opened
    sys.stdout.write(f"opened {opened.sequence_id} with at most {opened.limits.max_nodes} nodes\n")
    show(next(answers).growth.sequences[0])

    # The target verified the tree: 9 and 10 were right, and its own token after them is 11.
    advance = draft_pb2.SequenceAdvance(sequence_id=1, step=1, token_ids=[9, 10, 11])
    frames.put(draft_pb2.ProposeRequest(advance=draft_pb2.AdvanceSequences(sequences=[advance])))
    show(next(answers).growth.sequences[0])

    # A missing step ends its sequence, but not the stream.
    advance.step = 3
    frames.put(draft_pb2.ProposeRequest(advance=draft_pb2.AdvanceSequences(sequences=[advance])))
    status = next(answers).status
    sys.stdout.write(f"sequence {status.sequence_id} failed: {status.status.message}\n")

    frames.put(draft_pb2.ProposeRequest(close=draft_pb2.CloseSequences(sequence_ids=[1])))
    frames.put(None)
    for _ in answers:
        pass
