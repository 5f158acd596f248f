"""Generate with gRPC alone: generated stubs, and nothing of the SDK. Run a target first: `outrider up`."""

import sys

import grpc
from google.rpc import error_details_pb2, status_pb2

from outrider.v1 import target_pb2, target_pb2_grpc, tree_pb2

METADATA = (("outrider-tenant", "default"),)  # With tokens: ("authorization", "Bearer TOKEN").


def explain(error: grpc.RpcError) -> str:
    """Status, reason, field and the time to wait, from the details that come with an error."""
    words = [error.code().name]
    trailers = {item.key: item.value for item in error.trailing_metadata() or ()}
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            words.append(info.reason)
        elif detail.Unpack(bad):
            words += [violation.field for violation in bad.field_violations]
        elif detail.Unpack(retry):
            words.append(f"again in {retry.retry_delay.ToTimedelta().total_seconds():g} s")
    return " ".join(words)


with grpc.insecure_channel("127.0.0.1:50051") as channel:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    question = target_pb2.ChatMessage(role="user", content="What is a bridge?")
    request = target_pb2.GenerateRequest(
        chat=target_pb2.ChatInput(messages=[question]),
        sampling=tree_pb2.SamplingParameters(temperature=0.8, top_p=0.95, seed=7, max_tokens=64),
    )
    for response in stub.Generate(request, timeout=60, metadata=METADATA):
        event = response.WhichOneof("event")
        if event == "started":
            sys.stdout.write(f"seed {response.started.seed}, {response.started.prompt_tokens} prompt tokens\n")
        elif event == "chunk":
            sys.stdout.write(response.chunk.text)
        elif event == "finished":
            finished = response.finished
            reason = target_pb2.FinishReason.Name(finished.finish_reason)
            sys.stdout.write(f"\n{finished.usage.completion_tokens} tokens, {reason}\n")
            sys.stdout.write(f"{finished.speculation.accepted_tokens} of them were drafted\n")

    request.sampling.temperature = -1
    try:
        list(stub.Generate(request, timeout=60, metadata=METADATA))
    except grpc.RpcError as error:
        sys.stdout.write(f"refused: {explain(error)}\n")

    request.sampling.temperature = 0
    request.sampling.ignore_eos = True
    request.sampling.ClearField("max_tokens")
    call = stub.Generate(request, timeout=60, metadata=METADATA)
    next(call)
    call.cancel()
    sys.stdout.write(f"ended early: {call.code().name}\n")
