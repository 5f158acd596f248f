"""Rejection sampling over Verify with gRPC alone: children are sampled, and sent with their distribution."""

import queue
import random
import sys

import grpc

from outrider.v1 import target_pb2, target_pb2_grpc, tree_pb2

PROMPT = [100, 101, 102, 103]
# The draft's distribution after any token: 20 with 1/2, 21 with 3/8, 22 with 1/8.
SUPPORT, WEIGHTS = [20, 21, 22], [4, 3, 1]
CHILDREN = 2


def sample(rng: random.Random) -> list[int]:
    """Different tokens, one after the other without replacement; their order is the order of the rows."""
    tokens, weights = list(SUPPORT), list(WEIGHTS)
    sampled = []
    for _ in range(CHILDREN):
        place = rng.choices(range(len(tokens)), weights)[0]
        sampled.append(tokens.pop(place))
        weights.pop(place)
    return sampled


with grpc.insecure_channel("127.0.0.1:50051") as channel:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    frames: queue.SimpleQueue[target_pb2.VerifyRequest | None] = queue.SimpleQueue()
    answers = stub.Verify(iter(frames.get, None))
    opening = target_pb2.OpenVerification(
        token_ids=PROMPT,
        sampling=tree_pb2.SamplingParameters(temperature=1, seed=7, max_tokens=8, ignore_eos=True),
        mode=tree_pb2.VERIFICATION_MODE_REJECTION,
    )
    frames.put(target_pb2.VerifyRequest(open=opening))
    opened = next(answers).opened

    rng, root, step, tokens, finished = random.Random(1), PROMPT[-1], opened.step, 0, False
    while not finished:
        tree = tree_pb2.TokenTree(
            token_ids=[root, *sample(rng)],
            parents=[0] * (1 + CHILDREN),
            distributions=[tree_pb2.DraftDistribution(parent=0, token_ids=SUPPORT, weights=WEIGHTS)],
        )
        request = target_pb2.VerifyTree(sequence_id=opened.sequence_id, step=step, tree=tree)
        frames.put(target_pb2.VerifyRequest(tree=request))
        verdict = next(answers).verdict
        root, step, tokens = verdict.token_ids[-1], verdict.next_step, tokens + len(verdict.token_ids)
        finished = verdict.finish_reason != target_pb2.FINISH_REASON_UNSPECIFIED
    frames.put(None)
    for _ in answers:
        pass
    sys.stdout.write(f"{tokens} tokens in {step} steps\n")
