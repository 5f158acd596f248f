"""Compiles the forms of output that callers ask for, in threads: a form that cannot be used is refused at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.admission.text_pool import TextPool
from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from target_service.grammars.compiling import Grammars

# Processor time: several times what the largest form within the compiler's own limits took. Chosen.
COMPILE_SECONDS = 10.0


@dataclass(eq=False)
class FormCompiler:
    """Compiles forms before their requests reach the engine. Belongs to the event loop."""

    grammars: Grammars
    # Tenants take turns in it.
    pool: TextPool
    seconds: float = COMPILE_SECONDS

    async def check(self, form: StructuredOutput | None, tenant: str, field_path: str) -> None:
        """Raise what `Grammars.check` does, `InvalidField` for a form that takes too much processor time to compile,
        and `QuotaExceeded` where too many texts of the tenant's, or of all, wait.

        Other programs on the machine do not count: the same form would be refused on one day and taken on another.
        """
        if form is None or self.grammars.keeps(form, tenant):
            return
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[Callable[[], float]] = loop.create_future()

        def compile_form() -> None:
            # A loop that has ended needs no grammar.
            loop.call_soon_threadsafe(_begin, begun, processor_clock())
            self.grammars.check(form, tenant, field_path)

        compiling = asyncio.ensure_future(self.pool.call(tenant, compile_form))
        try:
            # The time that others' texts take does not count.
            await asyncio.wait((compiling, begun), return_when=asyncio.FIRST_COMPLETED)
            while not compiling.done():
                left = self.seconds - begun.result()()
                if left <= 0:
                    problem = f"cannot be compiled within {self.seconds:g} s"
                    raise InvalidField(f"{field_path}.{form.form}", problem)
                # Least time between two looks at the clock of the thread that compiles.
                await asyncio.wait((compiling,), timeout=max(left, 0.01))
            compiling.result()
        finally:
            begun.cancel()
            compiling.cancel()


def _begin(begun: asyncio.Future[Callable[[], float]], clock: Callable[[], float]) -> None:
    # The caller may have gone.
    if not begun.done():
        begun.set_result(clock)


def processor_clock() -> Callable[[], float]:
    """A function that returns the seconds of a processor that this thread has used since now; callable from any thread
    while this one lives. Where a system has no such clock, those that have passed."""
    if not hasattr(time, "pthread_getcpuclockid"):
        started = time.monotonic()
        return lambda: time.monotonic() - started
    clock = time.pthread_getcpuclockid(threading.get_ident())
    used = time.clock_gettime(clock)
    return lambda: time.clock_gettime(clock) - used
