"""The engine in the serving process, as a host for `target_service.lifecycle.serve_engine`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from outrider.runtime import in_thread_to_leave
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineObserver, Sequences
from target_service.engine_process.client import STOP_SECONDS
from target_service.preflight import check_sources, prepared_draft

if TYPE_CHECKING:
    from outrider.drafting.link import Connect
    from target_service.assembly import Assembled
    from target_service.engine.engine import Engine
    from target_service.model.runner import ModelRunner

logger = logging.getLogger(__name__)


class SharedEngine:
    """An engine in a thread of the serving process. It is loaded in a thread too, so that health is answered."""

    def __init__(self, config: TargetConfig, runner: ModelRunner | None = None) -> None:
        """`runner` is a model that is loaded already."""
        self._config = config
        self._runner = runner
        self._connect: Connect | None = None
        self._assembled: Assembled | None = None

    async def load(self) -> ServedModel:
        """Prepare the draft and load the model. Raises `EngineRefused` if either fails."""
        return await in_thread_to_leave(self._load)

    def _load(self) -> ServedModel:
        self._connect = prepared_draft(self._config)
        if self._runner is None:
            check_sources(self._config)
        # Imported late: PyTorch takes seconds, health is to be answered before, and wrong names refused at once.
        from target_service.assembly import load_model, served_model

        if self._runner is None:
            self._runner = load_model(self._config)
        return served_model(self._config, self._runner)

    async def engine(self, observer: EngineObserver | None) -> Engine:
        """Assemble the engine. `observer` is called in its thread. Raises what `assemble` raises."""
        from target_service.assembly import assemble

        runner, connect = self._runner, self._connect
        assert runner is not None, "the model is not loaded"
        self._assembled = await in_thread_to_leave(lambda: assemble(self._config, runner, observer, connect))
        return self._assembled.engine

    async def start(self, sequences: Sequences) -> None:
        """Deliver events to `sequences` from now on."""
        assert self._assembled is not None, "there is no engine yet"
        self._assembled.engine.start(sequences.deliver)

    async def stop(self) -> None:
        """Stop the engine. If a step hangs, leave it: its thread is a daemon and does not keep the process alive."""
        if self._assembled is None:
            return
        try:
            await asyncio.wait_for(in_thread_to_leave(self._assembled.stop), STOP_SECONDS)
        except TimeoutError:
            logger.error("a step of the engine hangs; leaving without it")
