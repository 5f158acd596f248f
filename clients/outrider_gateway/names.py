"""What the served models are called, and what their tokens are: for answers, and for /v1/models."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.errors import OutriderError
from outrider_client.failures import ServiceUnreachable
from outrider_client.local.models import find_tokenizer
from outrider_client.results import TargetInfo
from outrider_gateway.answers import Answers
from outrider_gateway.asked import Asked
from outrider_gateway.caller import Caller
from outrider_gateway.failures import NoTarget, Refused, refusal
from outrider_gateway.targets import Targets
from outrider_gateway.token_texts import TokenTexts


class Names:
    """What is known of the served models. Tokenizers are looked for on this machine, once each."""

    def __init__(self, targets: Targets, tokenizer: str, started: int) -> None:
        """`tokenizer` names one for all models; empty takes each model's own. `started` is when the gateway did."""
        self._targets = targets
        self._tokenizer = tokenizer
        self._started = started
        self._texts: dict[str, TokenTexts] = {}
        self._finding = asyncio.Lock()

    async def answers(self, asked: Asked) -> Answers:
        """What makes the JSON of a request's answers. Where no target has said what it serves, tokens have no names but
        those of a tokenizer that the operator named: nothing is looked for by a caller's word."""
        info = self._info(asked.model)
        named = self._tokenizer or (info.model if info else "")
        wanted = asked.logprobs or asked.drafts
        texts = await self._texts_of(named) if wanted and named else TokenTexts(None)
        return Answers(asked, info.model if info else asked.model, texts, info.end_token_ids if info else ())

    async def models(self, caller: Caller) -> list[dict[str, Any]]:
        """Every model that healthy targets serve, asked in the caller's name. Raises `Refused`."""
        healthy = self._targets.healthy
        if not healthy:
            raise NoTarget
        answers = await asyncio.gather(
            *(target.client.acting_for(token=caller.token, tenant=caller.tenant).info() for target in healthy),
            return_exceptions=True,
        )
        infos = [answer for answer in answers if isinstance(answer, TargetInfo)]
        for answer in answers:
            if not infos and isinstance(answer, OutriderError | ServiceUnreachable):
                raise refusal(answer, {"input": ""})
        return [self._entry(info) for info in {info.model: info for info in infos}.values()]

    async def model(self, name: str, caller: Caller) -> dict[str, Any]:
        """One of them. Raises `Refused`."""
        for entry in await self.models(caller):
            if entry["id"] == name:
                return entry
        raise Refused(404, f"the model {name} is not served", param="model", code="model_not_found")

    def _info(self, model: str) -> TargetInfo | None:
        known = [target.info for target in self._targets.healthy if target.info is not None]
        return next((info for info in known if info.model == model), known[0] if known else None)

    async def _texts_of(self, named: str) -> TokenTexts:
        """By the tokenizer of this name, model or folder, looked for once."""
        async with self._finding:
            if named not in self._texts:
                self._texts[named] = TokenTexts(await asyncio.to_thread(find_tokenizer, named))
        return self._texts[named]

    def _entry(self, info: TargetInfo) -> dict[str, Any]:
        return {
            "id": info.model,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
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
