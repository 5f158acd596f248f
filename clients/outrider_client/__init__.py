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
    from outrider.errors import OutriderError as OutriderError
    from outrider.sampling import FinishReason as FinishReason
    from outrider.sampling import SamplingParams as SamplingParams
    from outrider.sampling import TypicalAcceptance as TypicalAcceptance
    from outrider.sampling import VerificationMode as VerificationMode
    from outrider.tree import TokenTree as TokenTree
    from outrider.weight_updates import RunningRequests as RunningRequests
    from outrider.weight_updates import WeightsUpdated as WeightsUpdated
    from outrider_client.client import Client as Client
    from outrider_client.connection import Tls as Tls
    from outrider_client.draft import DraftClient as DraftClient
    from outrider_client.failures import ServiceUnreachable as ServiceUnreachable
    from outrider_client.failures import TlsProblem as TlsProblem
    from outrider_client.generation import Generation as Generation
    from outrider_client.generation import Speculation as Speculation
    from outrider_client.policy import Policy as Policy
    from outrider_client.results import Chunk as Chunk
    from outrider_client.results import Result as Result
    from outrider_client.results import Started as Started
    from outrider_client.results import Verdict as Verdict
    from outrider_client.synchronous import SyncClient as SyncClient
    from outrider_client.synchronous import SyncGeneration as SyncGeneration
    from outrider_client.synchronous import SyncVerifySession as SyncVerifySession
    from outrider_client.verification import VerifySession as VerifySession

_HOMES = {
    "outrider.errors": "OutriderError",
    "outrider.sampling": "FinishReason SamplingParams TypicalAcceptance VerificationMode",
    "outrider.tree": "TokenTree",
    "outrider.weight_updates": "RunningRequests WeightsUpdated",
    "outrider_client.client": "Client",
    "outrider_client.connection": "Tls",
    "outrider_client.draft": "DraftClient",
    "outrider_client.failures": "ServiceUnreachable TlsProblem",
    "outrider_client.generation": "Generation Speculation",
    "outrider_client.policy": "Policy",
    "outrider_client.results": "Chunk Result Started Verdict",
    "outrider_client.synchronous": "SyncClient SyncGeneration SyncVerifySession",
    "outrider_client.verification": "VerifySession",
}

__all__ = [name for names in _HOMES.values() for name in names.split()]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
