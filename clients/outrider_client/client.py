"""The client of a target service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from outrider.errors import InvalidField
from outrider.sampling import SamplingParams
from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider.weight_updates import RunningRequests, WeightsUpdated
from outrider_client.arguments import check_options, predicted, sampling_message, set_input
from outrider_client.carrier import CallCarrier
from outrider_client.connection import AsyncClosing, Connection, Tls
from outrider_client.generation import Generation, Speculation
from outrider_client.messages import ChatOptions, MessageLike, chat_to_pb
from outrider_client.messages import Message as Message
from outrider_client.policy import SINGLE_ATTEMPT, Policy
from outrider_client.results import TargetInfo, Tokenized
from outrider_client.tracing import RequestSpan
from outrider_client.verification import VerifySession
from outrider_client.weights import update_requests, updated_from_pb

TARGET_SERVICE = "outrider.v1.TargetService"


class Client(AsyncClosing):
    """Talks to one target service. Make it with `Client.connect`, from a running event loop.

    Example:
        async with Client.connect("127.0.0.1:50051") as client:
            async for chunk in client.chat("What is a bridge?", sampling=SamplingParams(max_tokens=64)):
                sys.stdout.write(chunk.text)
    """

    def __init__(
        self,
        connection: Connection,
        tracing: Tracing | None = None,
        policy: Policy = SINGLE_ATTEMPT,
        *,
        carries: bool = False,
    ) -> None:
        """On a connection made elsewhere. Without a policy, retries and deadlines of long calls are the caller's. With
        `carries` all its calls of `generate`, and those of clients that `acting_for` returns, share one stream: much
        cheaper where many run at once."""
        self._policy = policy
        self._connection = connection
        self._tracing = tracing or Tracing()
        # The generated stubs give one class two types; on an aio channel it is this one.
        stub = target_pb2_grpc.TargetServiceStub(connection.channel)
        self._stub = cast("target_pb2_grpc.TargetServiceAsyncStub", stub)
        self._carrier = CallCarrier(stub) if carries else None

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        tls: Tls | None = None,
        token: str = "",
        tenant: str = "",
        tracing: Tracing | None = None,
        policy: Policy | None = None,
    ) -> Client:
        """A client of the target at `address` (HOST:PORT or unix:PATH).

        The connection is made with the first call. `token` and `tenant` are sent with every call. With `tracing`, such
        as `Tracing(my_provider)`, every generation is a span, whose context is sent too. `policy` sets deadlines and
        retries; `Policy()` by default. Raises `ValueError` for an invalid address.
        """
        return cls(Connection(address, tls=tls, token=token, tenant=tenant), tracing, policy or Policy())

    @property
    def address(self) -> str:
        """The target's address, as given to `connect`."""
        return self._connection.address

    def acting_for(self, *, token: str = "", tenant: str = "") -> Client:
        """A client on this one's connection for another caller, whose credentials take the place of this one's.

        For servers that forward their own callers' credentials. Closing either closes the connection of both.
        """
        # A server does this for every request, and `copy.copy` takes ten times as long.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _connection=self._connection.acting_for(token, tenant))
        return other

    async def close(self) -> None:
        """Cancel what runs and close the connection."""
        if self._carrier is not None:
            await self._carrier.close()
        await self._connection.close()

    def chat(
        self,
        messages: str | Sequence[MessageLike],
        *,
        chat_options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
        speculation: Speculation | None = None,
        prediction: str | Sequence[int] | None = None,
        show_special_tokens: bool = False,
        special_tokens: bool | None = None,
        answer_parts: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> Generation:
        """Answer a conversation, or a string as the user's only message. Arguments, results and errors are those of
        `generate`."""
        return self.generate(
            messages=[("user", messages)] if isinstance(messages, str) else messages,
            chat_options=chat_options,
            sampling=sampling,
            speculation=speculation,
            prediction=prediction,
            show_special_tokens=show_special_tokens,
            special_tokens=special_tokens,
            answer_parts=answer_parts,
            model=model,
            timeout=timeout,
        )

    def generate(
        self,
        text: str = "",
        *,
        messages: Sequence[MessageLike] = (),
        token_ids: Sequence[int] = (),
        chat_options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
        speculation: Speculation | None = None,
        prediction: str | Sequence[int] | None = None,
        show_special_tokens: bool = False,
        special_tokens: bool | None = None,
        answer_parts: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> Generation:
        """Continue a text, a conversation, or token ids: exactly one of them.

        Args:
            text: tokenised without a chat template.
            messages: OpenAI's dicts, (role, content) pairs, or `ChatTurn`s, put through the model's chat template.
            token_ids: used unchanged.
            chat_options: how the chat template renders the messages.
            sampling: how tokens are drawn; greedy by default.
            speculation: how drafts are used.
            prediction: the expected answer, as text or token ids: faster where it is right, and nothing else changes.
            show_special_tokens: the text has special tokens too, but for the one that ends it.
            special_tokens: whether the text of a special token in the input becomes that token. None takes the target's
                rule: as text in the contents of messages, as the token in `text`, unless the model's settings differ.
            answer_parts: chunks tell the text of a chat's answer from the model's reasoning and its tool calls.
            model: the served model's name; whatever is served by default.
            timeout: seconds until the request fails with `DeadlineExceeded`; the policy's by default.

        Returns:
            The request, which is sent with the first read.

        Raises:
            InvalidField: no input, or more than one; token ids that are negative or no 32 bits.
            TypeError: messages of another shape, or options of another type.
        """
        check_options(text=(text, str), model=(model, str), timeout=(timeout, (int, float)))
        check_options(sampling=(sampling, SamplingParams), speculation=(speculation, Speculation))
        check_options(chat_options=(chat_options, ChatOptions), special_tokens=(special_tokens, bool))
        check_options(show_special_tokens=(show_special_tokens, bool), answer_parts=(answer_parts, bool))
        request = target_pb2.GenerateRequest(
            model=model,
            sampling=sampling_message(sampling or SamplingParams()),
            speculation=(speculation or Speculation()).to_pb(),
            show_special_tokens=show_special_tokens,
            special_tokens=special_tokens,
            answer_parts=answer_parts,
        )
        set_input(request, text, messages, chat_options or ChatOptions(), token_ids)
        if prediction is not None:
            request.prediction.CopyFrom(predicted(prediction))
        span = RequestSpan(self._tracing, self.address, chat=bool(messages), model=model)
        generate = self._stub.Generate if self._carrier is None else self._carrier.generate
        begin = partial(generate, request, metadata=(*self._connection.metadata, *span.metadata))
        seconds = self._policy.generate_timeout if timeout is None else timeout
        return Generation(begin, self.address, span, policy=self._policy, timeout=seconds)

    def verify(self) -> VerifySession:
        """A session in which the client drafts and the target verifies. Use it with `async with`."""
        return VerifySession(self._stub.Verify(metadata=self._connection.metadata), self.address)

    async def update_weights(
        self,
        *,
        folder: str = "",
        files: Sequence[Path | bytes] = (),
        running: RunningRequests = RunningRequests.DRAIN,
        timeout: float | None = None,
    ) -> WeightsUpdated:
        """Exchange the target's weights for others of the same names and shapes, as an operator. Never retried: a call
        whose answer was lost may have succeeded; `info().model_version` shows it.

        Args:
            folder: on the target's machine, below its `--weights-folder`.
            files: safetensors files to send instead, as paths here or as their bytes.
            running: what happens to running requests.
            timeout: seconds, draining included, after which the update fails and the old weights stay; none by default.

        Raises:
            InvalidField: neither folder nor files, or both; weights that do not fit the model, which is left as it was.
            PermissionDenied: no operator, or a folder that is not allowed.
            QuotaExceeded: another update is under way, or files that are too large.
            OSError: a file that cannot be read.
        """
        requests = update_requests(folder, files, running)
        return updated_from_pb(await self._connection.call_with_all(self._stub.UpdateWeights, requests, timeout))

    async def tokenize(
        self,
        text: str = "",
        *,
        messages: Sequence[MessageLike] = (),
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool = True,
        special_tokens: bool | None = None,
        token_texts: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokenized:
        """The token ids of a text, or of a conversation in the model's chat template, as `generate` would read it.

        Args:
            text, messages, chat_options, special_tokens, model: as in `generate`.
            add_special_tokens: begin and end a text as the tokenizer does with a prompt; a chat template decides that
                for a conversation.
            token_texts: also return the text of each token.
            timeout: seconds until the call fails with `DeadlineExceeded`; the policy's by default.

        Raises:
            InvalidField: neither a text nor messages, or both.
            PositionOutOfRange: it is longer than the model's context.
        """
        check_options(text=(text, str), chat_options=(chat_options, ChatOptions))
        if bool(messages) + bool(text) != 1:
            raise InvalidField("input", "needs exactly one of messages and text, and not empty")
        request = target_pb2.TokenizeRequest(
            model=model,
            add_special_tokens=add_special_tokens,
            special_tokens=special_tokens,
            token_texts=token_texts,
        )
        if text:
            request.text = text
        else:
            request.chat.CopyFrom(chat_to_pb(messages, chat_options or ChatOptions()))
        ask = partial(self._connection.call, self._stub.Tokenize, request)
        return Tokenized.from_pb(await self._policy.call(timeout, ask))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of tokens, special ones by their names. Raises `InvalidField` for ids that are no tokens."""
        try:
            request = target_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        except ValueError as error:
            raise InvalidField("token_ids", str(error)) from None
        ask = partial(self._connection.call, self._stub.Detokenize, request)
        return (await self._policy.call(timeout, ask)).text

    async def info(self, timeout: float | None = None) -> TargetInfo:
        """What the target serves, and its limits. Without a timeout the policy's deadline holds."""
        ask = partial(self._connection.call, self._stub.GetTargetInfo, target_pb2.GetTargetInfoRequest())
        return TargetInfo.from_pb(await self._policy.call(timeout, ask))

    async def serving(self, timeout: float = 5.0) -> bool:
        """Whether the target answers that it is healthy."""
        return await self._connection.serving(TARGET_SERVICE, timeout)
