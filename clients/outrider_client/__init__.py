"""The Python client of Outrider, and the `outrider` command.

    async with Client.connect("127.0.0.1:50051") as client:
        async for chunk in client.generate(text="Once upon a time"):
            sys.stdout.write(chunk.text)

Names are imported when first used: gRPC reads its settings once, on import, and the command line chooses them first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.errors import OutriderError
    from outrider.sampling import FinishReason, SamplingParams, TypicalAcceptance, VerificationMode
    from outrider.structured_output import StructuredOutput
    from outrider.tree import TokenTree
    from outrider.weight_updates import RunningRequests, WeightsUpdated
    from outrider_client.client import Client
    from outrider_client.connection import Tls
    from outrider_client.draft import DraftClient
    from outrider_client.failures import ServiceUnreachable, TlsProblem
    from outrider_client.generation import Generation, Speculation
    from outrider_client.messages import ChatOptions, ChatTurn, ToolChoice, ToolOptions
    from outrider_client.policy import Policy
    from outrider_client.results import Chunk, PromptToken, Result, Started, Tokenized, Verdict
    from outrider_client.synchronous import SyncClient, SyncGeneration, SyncVerifySession
    from outrider_client.verification import VerifySession

_HOMES = {
    "outrider.errors": "OutriderError",
    "outrider.sampling": "FinishReason SamplingParams TypicalAcceptance VerificationMode",
    "outrider.structured_output": "StructuredOutput",
    "outrider.tree": "TokenTree",
    "outrider_client.client": "Client",
    "outrider_client.connection": "Tls",
    "outrider_client.draft": "DraftClient",
    "outrider_client.failures": "ServiceUnreachable TlsProblem",
    "outrider_client.generation": "Generation Speculation",
    "outrider_client.messages": "ChatOptions ChatTurn ToolChoice ToolOptions",
    "outrider_client.policy": "Policy",
    "outrider_client.results": "Chunk PromptToken Result Started Tokenized Verdict",
    "outrider_client.synchronous": "SyncClient SyncGeneration SyncVerifySession",
    "outrider_client.verification": "VerifySession",
    "outrider.weight_updates": "RunningRequests WeightsUpdated",
}

__all__ = [
    "ChatOptions",
    "ChatTurn",
    "Chunk",
    "Client",
    "DraftClient",
    "FinishReason",
    "Generation",
    "OutriderError",
    "Policy",
    "PromptToken",
    "Result",
    "RunningRequests",
    "SamplingParams",
    "ServiceUnreachable",
    "Speculation",
    "Started",
    "StructuredOutput",
    "SyncClient",
    "SyncGeneration",
    "SyncVerifySession",
    "Tls",
    "TlsProblem",
    "TokenTree",
    "Tokenized",
    "ToolChoice",
    "ToolOptions",
    "TypicalAcceptance",
    "Verdict",
    "VerificationMode",
    "VerifySession",
    "WeightsUpdated",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
