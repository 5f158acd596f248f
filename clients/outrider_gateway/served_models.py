"""What the served models are called, and what their tokens are: for answers, and for /v1/models."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from outrider.admission.prompt_limits import MOST_CONTEXT
from outrider.errors import OutriderError
from outrider.model_names import answers_to
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import TargetInfo
from outrider_gateway.answer_builder import BuildAnswer, Built, Request
from outrider_gateway.caller import HttpCaller
from outrider_gateway.failures import GatewayFailed, Refused, refusal
from outrider_gateway.targets import Targets
from outrider_gateway.token_texts import TokenTexts

logger = logging.getLogger(__name__)


class ServedModels:
    """What the targets report of their models."""

    def __init__(self, targets: Targets, started: int) -> None:
        """`started` is when the gateway did."""
        self._targets = targets
        self._started = started

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt that any target may take, as far as that is known."""
        known = [target.info.max_context - 1 for target in self._targets.usable if target.info is not None]
        return max(known, default=MOST_CONTEXT)

    def response_builder(self, request: Request, build: BuildAnswer[Request, Built]) -> Built:
        """The builder of a request's JSON, of this kind."""
        known = [target.info for target in self._targets.usable if target.info is not None]
        info = next((info for info in known if answers_to(info.names, request.model)), known[0] if known else None)
        model, ends = (request.model, ()) if info is None else (info.model, info.end_token_ids)
        return build(request, model, TokenTexts(), ends)

    async def models(self, caller: HttpCaller) -> list[dict[str, Any]]:
        """Every model that usable targets serve, asked in the caller's name. Raises `Refused`."""
        usable = self._targets.usable
        if not usable:
            raise self._targets.unavailable()
        clients = [target.client.acting_for(token=caller.token, tenant=caller.tenant) for target in usable]
        answers = await asyncio.gather(*(client.info() for client in clients), return_exceptions=True)
        infos = [answer for answer in answers if isinstance(answer, TargetInfo)]
        if infos:
            return [self._entry(name, info) for name, info in {name: i for i in infos for name in i.names}.items()]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        # By the first that failed as the contract has it.
        for failure in failures:
            if isinstance(failure, OutriderError | ServiceUnreachable):
                raise refusal(failure, {"input": ""})
        logger.error("no target could be asked for its model", exc_info=failures[0])
        raise GatewayFailed

    async def model(self, name: str, caller: HttpCaller) -> dict[str, Any]:
        """One of them. Raises `Refused`."""
        for entry in await self.models(caller):
            if answers_to((entry["id"],), name):
                return entry
        raise Refused(404, f"the model {name} is not served", param="model", code="model_not_found")

    def _entry(self, name: str, info: TargetInfo) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            # Of further names, the one that answers bear.
            "root": info.model,
            "max_model_len": info.max_context,
            "outrider": {
                "drafter": info.drafter,
                "max_rows": info.max_rows,
                "modes": [mode.value for mode in info.modes],
                "dtype": info.dtype,
                "version": info.version,
                "prediction": True,
            },
        }
