"""Turns callers' requests into requests to the engine: checks every field and fills in defaults."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.admission.text_pool import TextPool
from outrider.errors import InvalidField, NotSupported, UnknownModel
from outrider.limits import TenantLimits
from outrider.model_names import answers_to
from outrider.sampling import LOSSLESS_MODES, SamplingParams, TypicalAcceptance, VerificationMode
from outrider.v1 import target_pb2
from outrider.wire.trees import mode_from_pb, name_from_pb, sampling_from_pb, typical_from_pb
from target_service.api.chat_answers import ChatAnswers
from target_service.api.prompts import Lines, Prompts
from target_service.api.structured import FormCompiler
from target_service.api.tools import ToolSet, tool_set
from target_service.core.quotas import TenantQuotas
from target_service.core.sequence import SequenceRequest, TriggeredForm
from target_service.grammars.compiling import Grammars
from target_service.text.processes import TextProcess
from target_service.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from target_service.text.answer_parser import AnswerParser

# Most output tokens of a request that sets no limit.
DEFAULT_MAX_TOKENS = 1024
# How tokens are sampled and verified, and the rule of TYPICAL.
_Rules = tuple[SamplingParams, VerificationMode, TypicalAcceptance]


@dataclass(frozen=True)
class ServedModel:
    """The model that is served, its limits, and the software and hardware that it runs on, empty where unknown.
    `max_context` is also what fits one sequence in the KV cache."""

    name: str
    vocabulary_size: int
    max_context: int
    max_rows: int
    dtype: str
    page_size: int
    kv_tokens: int
    end_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str = ""
    # None where only token ids are taken.
    tokenizer: ModelTokenizer | None = None
    # Whether speculation is on, with a draft service or lookup on the device.
    speculation: bool = False
    # Whether speculation is on at all, so that predictions are verified.
    predictions: bool = True
    # Whether requests may use lossy modes.
    lossy: bool = False
    # Bytes of one token in the KV cache, all layers.
    kv_token_bytes: int = 0
    torch_version: str = ""
    triton_version: str = ""
    device: str = ""
    device_name: str = ""
    # Step sizes that were captured as graphs, and all that could have been.
    captured_step_sizes: int = 0
    capturable_step_sizes: int = 0
    # Whether the device drafts from the text so far.
    lookup: bool = False
    # Further names that requests may give.
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)

    @property
    def modes(self) -> tuple[VerificationMode, ...]:
        return (*LOSSLESS_MODES, VerificationMode.TYPICAL) if self.lossy else LOSSLESS_MODES


class AdmittedGeneration(NamedTuple):
    """A `Generate` call as the engine runs it. `parser` splits its answer into parts; None for text alone."""

    sequence: SequenceRequest
    parser: AnswerParser | None


class Admission:
    """Checks requests against the served model, so that the engine can run what it returns."""

    def __init__(self, served: ServedModel, quotas: TenantQuotas) -> None:
        self.served = served
        self.quotas = quotas
        # Short texts that wait: no more than there may be calls, which are bounded.
        lines = Lines(TextPool(most_waiting=1 << 20), TextPool(lambda tenant: quotas.counted(tenant, "texts")))
        tokenizer = served.tokenizer
        self._prompts = Prompts(
            tokenizer,
            None if tokenizer is None else TextProcess(tokenizer),
            served.vocabulary_size,
            served.max_context - 1,
            lines,
        )
        grammars = Grammars(tokenizer, served.vocabulary_size, served.end_token_ids)
        self._forms = FormCompiler(grammars, lines.long)
        self._chats = None if tokenizer is None else ChatAnswers(tokenizer)

    async def generation(
        self, request: target_pb2.GenerateRequest, tenant: str, traceparent: str
    ) -> AdmittedGeneration:
        """The engine request of a `Generate` call, and how its answer is read. Raises `UnknownModel`, `NotSupported`,
        `InvalidField` with the field's path, `PositionOutOfRange`, and `QuotaExceeded` for a tenant with too many
        requests."""
        self._check(request.model, tenant)
        served, options = self.served, request.speculation
        rules = self._rules(request.sampling, "sampling", options, "speculation")
        max_nodes = options.max_nodes if options.HasField("max_nodes") else served.max_rows - 1
        if max_nodes > served.max_rows - 1:
            raise InvalidField("speculation.max_nodes", f"must be at most {served.max_rows - 1}")
        corpus = name_from_pb(options.corpus, "speculation.corpus")
        await self._forms.check(rules[0].structured_output, tenant, "sampling.structured_output")
        tools = await self._tools(request)
        prompt = await self._prompts.token_ids(request, tenant, tools)
        triggered = await self._triggered_form(rules[0], tools, prompt, tenant)
        rules = (await self._calling(rules[0], tools, prompt, tenant), *rules[1:])
        prediction = await self._prompts.prediction(request, tenant)
        enabled = options.enabled if options.HasField("enabled") else True
        sequence = self._request(
            prompt,
            rules,
            tenant,
            traceparent,
            speculate=enabled and served.speculation and max_nodes > 0,
            max_draft_nodes=max_nodes,
            corpus=corpus,
            prediction=prediction if enabled and served.predictions and max_nodes > 0 else (),
            trees=options.trees,
            triggered_form=triggered,
        )
        return AdmittedGeneration(sequence, self._parser(request, rules[0], tools, prompt))

    async def _tools(self, request: target_pb2.GenerateRequest | target_pb2.TokenizeRequest) -> ToolSet | None:
        """The tools of a chat."""
        tools = tool_set(request.chat) if request.HasField("chat") else None
        if self._chats is not None and tools is not None:
            await self._chats.check(tools)
        return tools

    async def _calling(
        self, sampling: SamplingParams, tools: ToolSet | None, prompt: Sequence[int], tenant: str
    ) -> SamplingParams:
        """The sampling parameters of an answer that calls tools for certain; the same for any other."""
        form = None if self._chats is None else self._chats.form(tools, prompt)
        if form is None:
            return sampling
        if sampling.structured_output is not None:
            raise InvalidField("chat.tools.choice", "must not be TOOL_CHOICE_REQUIRED beside structured_output")
        await self._forms.check(form, tenant, "chat.tools.definitions")
        return replace(sampling, structured_output=form)

    async def _triggered_form(
        self, sampling: SamplingParams, tools: ToolSet | None, prompt: Sequence[int], tenant: str
    ) -> TriggeredForm | None:
        """The form of calls of an answer that may call tools."""
        if self._chats is None or sampling.structured_output is not None or sampling.ignore_eos:
            # A form is the whole answer's. One that its end does not end has no form.
            return None
        return await self._chats.triggered_form(tools, prompt, lambda form, path: self._forms.check(form, tenant, path))

    def _parser(
        self,
        request: target_pb2.GenerateRequest,
        sampling: SamplingParams,
        tools: ToolSet | None,
        prompt: Sequence[int],
    ) -> AnswerParser | None:
        """What splits the answer into parts, where they are asked for."""
        if self._chats is None or not request.answer_parts or not request.HasField("chat"):
            return None
        if sampling.structured_output is not None and (tools is None or not tools.required):
            # The form is the whole answer's, which has no place for other parts.
            return None
        return self._chats.parser(tools, prompt)

    async def tokens(self, request: target_pb2.TokenizeRequest, tenant: str) -> tuple[int, ...]:
        """The token ids that a `Tokenize` call asks for. Raises what `generation` does."""
        self._check(request.model, tenant)
        return await self._prompts.token_ids(request, tenant, await self._tools(request))

    async def text(self, request: target_pb2.DetokenizeRequest, tenant: str) -> str:
        """The text that a `Detokenize` call asks for. Raises what `generation` does."""
        self._check(request.model, tenant)
        return await self._prompts.text(request.token_ids, tenant)

    async def verification(
        self, request: target_pb2.OpenVerification, tenant: str, traceparent: str
    ) -> SequenceRequest:
        """The engine request of an `open` frame of `Verify`. Raises what `generation` does."""
        self.quotas.request(tenant)
        rules = self._rules(request.sampling, "open.sampling", request, "open")
        if rules[0].prompt_logprobs is not None:
            raise InvalidField("open.sampling.prompt_logprobs", "is for Generate")
        prompt = self._prompts.checked(request.token_ids, "open.token_ids")
        await self._forms.check(rules[0].structured_output, tenant, "open.sampling.structured_output")
        most = self.served.max_rows - 1
        return self._request(prompt, rules, tenant, traceparent, speculate=False, max_draft_nodes=most, external=True)

    def _check(self, model: str, tenant: str) -> None:
        """Count a request. Raises `QuotaExceeded`, and `UnknownModel` where it names another model than the served."""
        self.quotas.request(tenant)
        names = self.served.names
        if model and not answers_to(names, model):
            raise UnknownModel("another model is served", served=", ".join(names))

    def _request(
        self, prompt: tuple[int, ...], rules: _Rules, tenant: str, traceparent: str, **own: Any
    ) -> SequenceRequest:
        """What both calls have in common, and what is a call's `own`."""
        (sampling, mode, typical), limits = rules, self.quotas.table.of(tenant)
        return SequenceRequest(
            token_ids=prompt,
            sampling=sampling,
            mode=mode,
            typical=typical,
            # A random seed cannot be guessed by other callers.
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_tokens=self._max_tokens(sampling, len(prompt), limits),
            tenant=tenant,
            limits=limits,
            traceparent=traceparent,
            **own,
        )

    def _rules(
        self,
        sampling_pb: Any,
        sampling_path: str,
        pb: target_pb2.SpeculationOptions | target_pb2.OpenVerification,
        field_path: str,
    ) -> _Rules:
        sampling = sampling_from_pb(sampling_pb, self.served.vocabulary_size, sampling_path)
        if sampling.stop and self.served.tokenizer is None:
            raise NotSupported("the model has no tokenizer; use stop_token_ids")
        try:
            mode = sampling.mode(mode_from_pb(pb.mode, f"{field_path}.mode"))
        except InvalidField as error:
            raise InvalidField(f"{field_path}.mode", error.problem) from None
        if mode not in self.served.modes:
            raise NotSupported("this target allows lossless modes only; its operator can set --allow-lossy")
        if pb.HasField("typical") and mode is not VerificationMode.TYPICAL:
            raise InvalidField(f"{field_path}.typical", f"is not for mode {mode.value}")
        return sampling, mode, typical_from_pb(pb.typical, f"{field_path}.typical")

    def _max_tokens(self, sampling: SamplingParams, prompt_length: int, limits: TenantLimits) -> int:
        """Most output tokens: as requested, or the default, within the context and the tenant's share of the cache."""
        room = self.served.max_context - prompt_length
        if sampling.max_tokens is not None:
            return min(sampling.max_tokens, room)
        if limits.kv_tokens:
            room = min(room, max(1, limits.kv_tokens - prompt_length))
        return min(DEFAULT_MAX_TOKENS, room)
