"""Verify a tree of four rows with gRPC alone. Run a target first: `outrider up`."""

import queue
import sys

import grpc

from outrider.v1 import target_pb2, target_pb2_grpc, tree_pb2

PROMPT = [100, 101, 102, 103]
SAMPLING = tree_pb2.SamplingParameters(max_tokens=8, ignore_eos=True)

with grpc.insecure_channel("127.0.0.1:50051") as channel:
    stub = target_pb2_grpc.TargetServiceStub(channel)

    # Take two tokens of the answer for the draft, so that there is something to accept.
    request = target_pb2.GenerateRequest(tokens=target_pb2.TokenInput(token_ids=PROMPT), sampling=SAMPLING)
    answer = [token for response in stub.Generate(request, timeout=60) for token in response.chunk.token_ids]
    first, second = answer[:2]
    info = stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=10)
    wrong = (first + 1) % info.vocabulary_size

    frames: queue.SimpleQueue[target_pb2.VerifyRequest | None] = queue.SimpleQueue()
    answers = stub.Verify(iter(frames.get, None))

    opening = target_pb2.OpenVerification(client_tag=1, token_ids=PROMPT, sampling=SAMPLING)
    frames.put(target_pb2.VerifyRequest(open=opening))
    opened = next(answers).opened

    # Row 0 is the root, the last token of the prompt. Rows 1 and 2 are two guesses at what follows it, row 3 follows 2.
    tree = tree_pb2.TokenTree(token_ids=[PROMPT[-1], wrong, first, second], parents=[0, 0, 0, 2])
    received: list[int] = []
    step = opened.step
    while True:
        verify = target_pb2.VerifyTree(sequence_id=opened.sequence_id, step=step, tree=tree)
        frames.put(target_pb2.VerifyRequest(tree=verify))
        response = next(answers)
        if response.WhichOneof("frame") == "status":
            raise SystemExit(response.status.status.message)
        verdict = response.verdict
        received += verdict.token_ids
        sys.stdout.write(f"step {step}: accepted rows {list(verdict.accepted_rows)}, {len(verdict.token_ids)} tokens\n")
        if verdict.finish_reason:
            break
        # The last committed token is the next root. No draft from here on: the root alone is plain decoding.
        step = verdict.next_step
        tree = tree_pb2.TokenTree(token_ids=[verdict.token_ids[-1]], parents=[0])

    frames.put(target_pb2.VerifyRequest(close=target_pb2.CloseVerification(sequence_id=opened.sequence_id)))
    frames.put(None)
    for _ in answers:
        pass
    sys.stdout.write(f"the same as Generate: {received == answer}\n")
