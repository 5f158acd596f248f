"""Sound requests of every call of both services, to be spoilt: some of each kind that a call takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from outrider.v1 import draft_pb2, target_pb2, tree_pb2

TARGET, DRAFT, HEALTH = "outrider.v1.TargetService", "outrider.v1.DraftService", "grpc.health.v1.Health"
_VOCABULARY = 211


@dataclass(frozen=True)
class Call:
    """A method, whether it takes and gives streams, and sound requests to begin with and to go on with."""

    service: str
    method: str
    reads_stream: bool
    writes_stream: bool
    first: Sequence[Message]
    later: Sequence[Message] = ()
    # It ends when the caller hangs up.
    endless: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"


def _sampling(**fields: float) -> tree_pb2.SamplingParameters:
    return tree_pb2.SamplingParameters(max_tokens=4, ignore_eos=True, **fields)  # type: ignore[arg-type]


def _generations() -> list[Message]:
    tokens = target_pb2.TokenInput(token_ids=[10, 20, 30])
    chat = target_pb2.ChatInput(messages=[target_pb2.ChatMessage(role="user", content="hi")])
    make = target_pb2.GenerateRequest
    return [
        make(tokens=tokens, sampling=_sampling()),
        make(tokens=tokens, sampling=_sampling(temperature=0.8, top_p=0.9, top_k=5, seed=3)),
        make(text="ab", sampling=_sampling(repetition_penalty=1.2, presence_penalty=0.5)),
        make(chat=chat, sampling=_sampling(logprobs=2)),
        make(
            tokens=tokens,
            sampling=_sampling(),
            speculation=target_pb2.SpeculationOptions(enabled=True, mode=1, max_nodes=4, corpus=""),
        ),
        make(tokens=tokens, sampling=_sampling(), prediction=target_pb2.Prediction(text="cd")),
    ]


def _verifications() -> tuple[list[Message], list[Message]]:
    make = target_pb2.VerifyRequest
    opens: list[Message] = [
        make(open=target_pb2.OpenVerification(client_tag=1, token_ids=[10, 11], sampling=_sampling())),
        make(open=target_pb2.OpenVerification(token_ids=[20], sampling=_sampling(temperature=0.7, seed=5))),
    ]
    tree = tree_pb2.TokenTree(token_ids=[11, 12, 13, 14], parents=[0, 0, 1, 1], scores=[1.0, 0.5, 0.25, 0.2])
    later: list[Message] = [
        make(tree=target_pb2.VerifyTree(sequence_id=number, step=step, tree=tree))
        for number in (1, 2)
        for step in (0, 1)
    ]
    return opens, [*opens, *later, make(close=target_pb2.CloseVerification(sequence_id=1))]


def _carried() -> tuple[list[Message], list[Message]]:
    make = target_pb2.GenerateManyRequest
    begin = [
        target_pb2.CarriedCall(
            call=number,
            request=request.SerializeToString(),
            metadata=[target_pb2.CallMetadata(key="outrider-tenant", value=b"default")],
            timeout_nanoseconds=10**10,
        )
        for number, request in enumerate(_generations(), 1)
    ]
    return [make(begin=begin)], [make(cancel=[1], pause=[2]), make(resume=[2]), make(begin=begin)]


def _updates() -> tuple[list[Message], list[Message]]:
    make = target_pb2.UpdateWeightsRequest
    files = target_pb2.BeginUpdate(files=target_pb2.WeightFiles(sizes=[64]), running=1)
    return [make(begin=files), make(begin=target_pb2.BeginUpdate(folder="none", running=1))], [make(data=b"x" * 64)]


def _proposals() -> tuple[list[Message], list[Message]]:
    make = draft_pb2.ProposeRequest
    limits = draft_pb2.TreeLimits(max_nodes=8, max_depth=4)
    opens: list[Message] = [
        make(
            open=draft_pb2.OpenSequence(
                sequence_id=number,
                token_ids=[5, 6, 7, 5, 6],
                prompt_length=5,
                vocabulary_size=_VOCABULARY,
                seed=9,
                mode=mode,  # type: ignore[arg-type]
                sampling=_sampling(temperature=0.8),
                limits=limits,
            )
        )
        for number, mode in ((1, 1), (2, 2), (3, 3))
    ]
    advance = draft_pb2.AdvanceSequences(
        sequences=[draft_pb2.SequenceAdvance(sequence_id=number, step=1, token_ids=[7, 5]) for number in (1, 2)]
    )
    tensor = tree_pb2.Tensor(dtype=1, shape=[2, 4], data=b"\x00" * 32)  # type: ignore[arg-type]
    features = draft_pb2.SendFeatures(
        sequences=[draft_pb2.SequenceFeatures(sequence_id=1, position=0, features=tensor)]
    )
    credit: Message = make(credit=draft_pb2.Credit(frames=8))
    close = make(close=draft_pb2.CloseSequences(sequence_ids=[1, 2]))
    return [credit, *opens], [*opens, make(advance=advance), make(features=features), close, credit]


def calls() -> list[Call]:
    """Every call that either service answers, with its own service and health."""
    verify, propose, update = _verifications(), _proposals(), _updates()
    corpus = draft_pb2.AddCorpusRequest(tenant="default", corpus="docs", token_ids=[1, 2, 3, 4])
    health = health_pb2.HealthCheckRequest(service="")
    make = draft_pb2
    return [
        Call(TARGET, "Generate", False, True, _generations()),
        Call(TARGET, "GenerateMany", True, True, *_carried()),
        Call(TARGET, "Verify", True, True, *verify),
        Call(TARGET, "GetTargetInfo", False, False, [target_pb2.GetTargetInfoRequest()]),
        Call(TARGET, "UpdateWeights", True, False, *update),
        Call(TARGET, "Tokenize", False, False, [target_pb2.TokenizeRequest(text="a text")]),
        Call(TARGET, "SubscribeKvEvents", False, True, [target_pb2.SubscribeKvEventsRequest()], endless=True),
        Call(TARGET, "Detokenize", False, False, [target_pb2.DetokenizeRequest(token_ids=[1, 2, 3])]),
        Call(DRAFT, "Propose", True, True, *propose),
        Call(DRAFT, "GetDraftInfo", False, False, [make.GetDraftInfoRequest()]),
        Call(DRAFT, "AddCorpus", True, False, [corpus], [make.AddCorpusRequest(token_ids=[9, 9, 8])]),
        Call(DRAFT, "ListCorpora", False, False, [make.ListCorporaRequest(tenant="default")]),
        Call(DRAFT, "DeleteCorpus", False, False, [make.DeleteCorpusRequest(corpus="docs")]),
        Call(HEALTH, "Check", False, False, [health]),
        Call(HEALTH, "Watch", False, True, [health], endless=True),
    ]
