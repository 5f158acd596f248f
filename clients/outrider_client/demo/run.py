"""The demo: two services, one prompt, with and without drafts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from outrider.heads import head_made_for
from outrider.model_store import MODEL_STORE
from outrider.processes.python import module_command
from outrider.sampling import SamplingParams
from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import Tracing, set_up_tracing
from outrider_client.bench.runner import WARM_UP
from outrider_client.client import Client
from outrider_client.demo.show import totals_table, trace_table
from outrider_client.demo.trace_sink import TraceSink
from outrider_client.generation import Speculation
from outrider_client.local.stack import ServiceFailed, Stack, private_stack, wait_for_drafter
from outrider_client.results import Result
from outrider_client.terminal.options import DemoOptions
from outrider_client.terminal.painting import Painter, legend
from outrider_client.terminal.waiting import waiting

_SERVICES = (telemetry.CLIENT, telemetry.TARGET_SERVICE, telemetry.DRAFT_SERVICE)
# Editing repeats much of the prompt, which is what an n-gram drafter drafts from.
_QUESTION = """\
Review this class: print it again with a comment in every method, then list two improvements.

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek from empty stack")
        return self.items[-1]

    def size(self):
        return len(self.items)
```"""


async def pull_model(model: str) -> int:
    """Fetch a model with the model store; the target fetches hub ids itself. Returns the store's exit status."""
    if "/" in model or Path(model).is_dir():
        return 0
    process = await asyncio.create_subprocess_exec(*module_command(MODEL_STORE, "pull", model))
    return await process.wait()


async def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo. Returns whether all outputs were identical. Raises `ServiceFailed`, or what a call raises. The trie
    drafts first, since on a CPU it costs nearly nothing; if Outrider has a head for the model, a second run adds it,
    and shows its gain and cost in another column."""
    head = head_made_for(options.model)
    async with _services(options, console) as (stack, client, sink, tracing):

        async def answer(title: str, speculate: bool = True) -> Result:
            console.print(Rule(title, align="left"))
            painter = Painter()
            generation = client.generate(
                messages=[("user", _QUESTION)],
                sampling=SamplingParams(max_tokens=options.max_tokens),
                speculation=Speculation(enabled=None if speculate else False, token_texts=True),
            )
            async for chunk in generation:
                console.print(painter.paint(chunk), end="", soft_wrap=True)
            console.print()
            return await generation.result()

        console.print(Rule("prompt", align="left"))
        console.print(_QUESTION, markup=False)
        console.print(legend())
        drafted = {"trie": await answer("answer, drafted by a trie of the text so far")}
        plain = await answer("the same prompt, without drafts", speculate=False)
        if head is not None:
            # The target keeps running, and reconnects.
            what = f"starting another draft service, with the EAGLE head {head.name} beside a fresh trie"
            with waiting(console, what):
                await stack.stop("draft")
                both = ("--drafter", "merged", "--merged-drafters", "eagle,trie", "--head", head.name)
                await stack.start("draft", "draft_service", *both)
                await _warm_up(client.address, "merged", options.max_tokens)
            drafted["trie and EAGLE head"] = await answer("the same prompt, drafted by trie and EAGLE head together")
        console.print()
        console.print(totals_table(drafted, plain))
        with waiting(console, "collecting the trace"):
            # In a thread: it waits for the sink, which runs on this event loop.
            await asyncio.to_thread(tracing.shutdown)
            # Seconds for the spans of all services to arrive. Chosen.
            spans = await sink.wait(drafted["trie"].trace_id, _SERVICES, 10.0)
        console.print(trace_table(spans))
    return all(run.token_ids == plain.token_ids for run in drafted.values())


@contextlib.asynccontextmanager
async def _services(options: DemoOptions, console: Console) -> AsyncIterator[tuple[Stack, Client, TraceSink, Tracing]]:
    """Both services as processes, warmed up, and a client that sends its spans to a local receiver."""
    async with contextlib.AsyncExitStack() as leave:
        sink = TraceSink()
        await sink.start()
        leave.push_async_callback(sink.stop)
        stack = await leave.enter_async_context(private_stack())
        traced = ("--otlp-endpoint", sink.endpoint)
        # One after the other: the target times its own steps, which a compiling draft would disturb.
        with waiting(console, "starting the draft service"):
            draft = await stack.start("draft", "draft_service", "--drafter", "trie", *traced)
        # Every run answers the same prompt, which none may find read.
        flags = ("--model", options.model, "--dtype", "float32", "--no-prefix-cache", "--draft", draft, *traced)
        with waiting(console, f"starting the target service: loading {options.model} and timing its steps"):
            target = await stack.start("target", "target_service", *flags)
        console.print(f"draft service  [dim]{draft}[/]\ntarget service [dim]{target}[/]", soft_wrap=True)
        # A new tenant, so that no trie holds the prompt from an earlier run.
        tenant = f"demo-{secrets.token_hex(4)}"
        with waiting(console, "warming up"):
            await _warm_up(target, "trie", options.max_tokens)
        tracing = set_up_tracing(telemetry.CLIENT, sink.endpoint)
        client = await leave.enter_async_context(Client.connect(target, tenant=tenant, tracing=tracing))
        yield stack, client, sink, tracing


async def _warm_up(target: str, drafter: str, most_tokens: int) -> None:
    """Answer with and without drafts, in no more tokens than the answers that are shown. Raises `ServiceFailed`."""
    async with Client.connect(target, tenant="warm-up") as client:
        if not await wait_for_drafter(client, drafter):
            problem = f"the target did not reach its draft service, or cannot use its drafter ({drafter})"
            raise ServiceFailed(LookupError(problem))
        sampling = SamplingParams(max_tokens=min(24, most_tokens))
        for enabled in (None, False):
            speculation = Speculation(enabled=enabled)
            await client.generate(messages=WARM_UP, sampling=sampling, speculation=speculation).result()
