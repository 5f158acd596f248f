"""The data plane: `Inference.Generate`."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import InvalidField, OutriderError, PositionOutOfRange, check_most
from outrider.openengine import openengine_pb2 as pb
from outrider.serving import current_tenant
from outrider.telemetry.names import OPENENGINE_GENERATE
from target_service.api.event_queue import EventQueue, joined
from target_service.api.server import UNREAD_STEPS, TargetServicer, ending
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.openengine.answers import RequestAnswer
from target_service.openengine.open_requests import OpenRequest, OpenRequests
from target_service.openengine.requests import WantedOutputs, check_metadata, wanted_outputs
from target_service.telemetry.tracing import RequestTrace


@dataclass(frozen=True, eq=False)
class InferenceServicer:
    """Runs each output of a request as a sequence of its own, as so many calls of `TargetService.Generate` would be."""

    target: TargetServicer
    requests: OpenRequests

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream the outputs of a request. What is wrong with it ends the call; what fails later ends the stream."""
        check_metadata(context.invocation_metadata() or ())
        # An id is kept for a while. Chosen: several times a UUID with a prefix.
        check_most("request_id", len(request.request_id.encode()), 256, "bytes")
        request_id, tenant = request.request_id or secrets.token_hex(16), current_tenant()
        with ExitStack() as stack:
            running = stack.enter_context(self.requests.running(tenant, request_id))
            wanted = wanted_outputs(request, self.target.config.max_running)
            traces = [self._trace(context, stack) for _ in range(wanted.outputs)]
            outputs = await self._admitted(wanted, tenant, traces)
            queues = [EventQueue(UNREAD_STEPS, self.target.sequences.cancel) for _ in outputs]
            for output, queue, trace in zip(outputs, queues, traces, strict=True):
                queue.on_arrival = running.changed.set
                running.sequence_ids.append(self.target.sequences.submit(output, queue.put))
                model = self.target.served.name
                trace.accepted(running.sequence_ids[-1], output, model, requested_model=request.model)
            answer = RequestAnswer(request_id, wanted, outputs, self.target.served.tokenizer)
            try:
                await _stream(answer, running, queues, traces, context)
            except OutriderError as error:
                # Before the write, which waits for the reader.
                self.requests.cancel(running)
                for trace in traces:
                    trace.failed(error)
                await context.write(answer.failed(error))

    def _trace(self, context: Any, stack: ExitStack) -> RequestTrace:
        """The trace of one output, which counts as one call."""
        target, metadata = self.target, context.invocation_metadata()
        trace = RequestTrace(target.tracing, metadata, OPENENGINE_GENERATE, logs=target.config.log_requests)
        stack.enter_context(ending(trace, context))
        stack.enter_context(target.sequences.quotas.counted(current_tenant(), "streams"))
        return trace

    async def _admitted(self, wanted: WantedOutputs, tenant: str, traces: list[RequestTrace]) -> list[SequenceRequest]:
        """A sequence for each output. With a seed each has its own, the first the one given."""
        admission = self.target.admission
        for _ in traces[1:]:
            admission.quotas.request(tenant)
        try:
            first, _ = await admission.generation(wanted.asked, tenant, traces[0].traceparent)
        except (InvalidField, PositionOutOfRange) as error:
            raise wanted.renamed(error) from None
        first = replace(first, reuses_pages=wanted.reuses_pages)
        others = replace(first, sampling=replace(first.sampling, prompt_logprobs=None))
        return [first] + [
            replace(others, seed=(first.seed + index) % 2**64, traceparent=trace.traceparent)
            for index, trace in enumerate(traces[1:], 1)
        ]


async def _stream(
    answer: RequestAnswer, running: OpenRequest, queues: list[EventQueue], traces: list[RequestTrace], context: Any
) -> None:
    """Write the outputs to their ends. Raises the error of one that fails."""
    while answer.unfinished:
        await running.changed.wait()
        running.changed.clear()
        aborted = running.aborted
        for index in sorted(answer.unfinished):
            for event in joined(queues[index].queued()):
                if isinstance(event, StepVerdict):
                    traces[index].step(event)
                elif isinstance(event, SequenceFinished):
                    traces[index].finished(event.finish, event.totals)
                for response in answer.responses(index, event):
                    await context.write(response)
        if aborted:
            for index in answer.unfinished:
                traces[index].abandoned(None)
            for response in answer.cancelled():
                await context.write(response)
