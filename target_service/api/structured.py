"""Compiles the forms of output that callers ask for, in threads: a form that cannot be used is refused at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.admission.text_pool import TextPool
from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from target_service.grammars.compiling import Grammars

# Several times what the largest form within the compiler's own limits took on one core. Chosen.
COMPILE_SECONDS = 10.0


@dataclass(eq=False)
class FormCompiler:
    """Compiles forms before their requests reach the engine. Belongs to the event loop."""

    grammars: Grammars
    # Tenants take turns in it.
    pool: TextPool
    seconds: float = COMPILE_SECONDS

    async def check(self, form: StructuredOutput | None, tenant: str, field_path: str) -> None:
        """Raise what `Grammars.check` does, `InvalidField` for a form that takes too long to compile, and
        `QuotaExceeded` where too many texts of the tenant's, or of all, wait."""
        if form is None or self.grammars.keeps(form, tenant):
            return
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_form() -> None:
            # A loop that has ended needs no grammar.
            loop.call_soon_threadsafe(begun.set)
            self.grammars.check(form, tenant, field_path)

        compiling = asyncio.ensure_future(self.pool.call(tenant, compile_form))
        turn = asyncio.ensure_future(begun.wait())
        try:
            # The time that others' texts take does not count.
            await asyncio.wait((compiling, turn), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait_for(compiling, self.seconds)
        except TimeoutError:
            problem = f"cannot be compiled within {self.seconds:g} s"
            raise InvalidField(f"{field_path}.{form.form}", problem) from None
        finally:
            turn.cancel()
            compiling.cancel()
