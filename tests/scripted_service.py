"""A target service over the scripted engine, and a tokenizer of single bytes to go with it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from scripted_engine import SERVED, ScriptedEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import tokenizer_of
from outrider.limits import TenantTable
from outrider.serving import GrpcServer, Service, ServingOptions
from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2_grpc
from target_service.api import admission
from target_service.api.admission import ServedModel
from target_service.api.kv_events import KvEventLog
from target_service.api.server import SERVICE_NAME, TargetServicer
from target_service.config import TargetConfig
from target_service.core.events import Sequences
from target_service.core.quotas import TenantQuotas
from target_service.openengine.services import OpenEngineServices
from target_service.speculation_state import SpeculationState
from target_service.text.processes import TextProcess
from target_service.text.tokenizer import ModelTokenizer

CONFIG = TargetConfig(weights_stream_gb=0.0)
SPECULATION = SpeculationState("trie", "localhost:1", draft_connected=True, speculating=True, reason="it is scripted")


class ScriptedServicer(TargetServicer):
    """One whose drafting is always in the same state."""

    def speculation(self) -> SpeculationState:
        return SPECULATION


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_tokenizer() -> Any:
    """A tokenizer of single bytes, byte b being id 3 + b; ids 0 to 2 are pad, begin and end."""
    characters = _byte_characters()
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {characters[byte]: 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system must be first') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return fast


def model_tokenizer() -> ModelTokenizer:
    """The same as a target has it."""
    return tokenizer_of(byte_tokenizer())


@functools.cache
def served_tokenizer() -> ModelTokenizer:
    """One of them, for targets that leave it as it is."""
    return model_tokenizer()


@functools.cache
def _shared_encoder() -> TextProcess:
    """The text process of all targets with `served_tokenizer`: each would start its own."""
    return TextProcess(served_tokenizer())


@dataclass
class Target:
    """A target service over the scripted engine, and a channel to it."""

    engine: ScriptedEngine
    sequences: Sequences
    server: GrpcServer
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return target_pb2_grpc.TargetServiceStub(self.channel)

    async def idle(self) -> None:
        """Wait until nobody listens and the engine holds nothing, or fail after ten seconds."""
        async with asyncio.timeout(HUNG_SECONDS):
            while len(self.sequences) or self.engine.open_sequences:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def target_over(
    engine: ScriptedEngine | None = None,
    served: ServedModel = SERVED,
    config: TargetConfig = CONFIG,
    tracing: Tracing | None = None,
    table: TenantTable | None = None,
    kv_events: KvEventLog | None = None,
    **options: Any,
) -> AsyncIterator[Target]:
    engine = engine or ScriptedEngine()
    quotas = TenantQuotas(table)
    sequences = Sequences(engine, quotas)
    engine.start(sequences.deliver)
    serving = ServingOptions(**options)
    config = replace(config, auth_tokens="tokens" if serving.authenticator.required else "")
    with pytest.MonkeyPatch.context() as patched:
        if served.tokenizer is served_tokenizer():
            patched.setattr(admission, "TextProcess", lambda _: _shared_encoder())
        servicer = ScriptedServicer(config, served, sequences, tracing or Tracing(), kv_events)
    service = Service(SERVICE_NAME, lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, to))
    openengine = OpenEngineServices()
    server = GrpcServer(serving, [service, *openengine.services])
    await server.start()
    openengine.serve(server, servicer)
    server.health.set_serving(True)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Target(engine, sequences, server, channel)
    finally:
        await server.stop(0)
        await asyncio.to_thread(engine.stop, 0)
