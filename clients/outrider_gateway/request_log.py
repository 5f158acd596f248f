"""One line in the log for each request that ends. No text but whom the caller names."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.limits import TENANT_NAME
from outrider_client.results import Result
from outrider_gateway.generation_request import GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestLine:
    """What becomes known of one request. `tenant` is what its header says; a token decides otherwise at the target."""

    endpoint: str
    request_id: str
    tenant: str = ""
    request: GenerationRequest | None = None
    results: Sequence[Result] = field(default_factory=list)

    def write(self, status: int, seconds: float) -> None:
        """Write the line. `drafted` is the share of the answers' tokens that were accepted drafts."""
        results, request = self.results, self.request
        tokens = sum(result.completion_tokens for result in results)
        accepted = sum(result.speculation.accepted_tokens for result in results)
        logger.info(
            "request endpoint=%s id=%s status=%d tenant=%s user=%s model=%s answers=%d stream=%s prompt_tokens=%d "
            "tokens=%d drafted=%.3f ms=%.1f",
            self.endpoint,
            self.request_id,
            status,
            self.tenant if TENANT_NAME.fullmatch(self.tenant) else _quoted(self.tenant),
            _quoted(request.user if request else ""),
            _quoted(request.model if request else ""),
            request.answers if request else 0,
            str(bool(request and request.stream)).lower(),
            sum(result.prompt_tokens for result in results[:: request.choices if request else 1]),
            tokens,
            accepted / max(1, tokens),
            seconds * 1e3,
        )


def _quoted(name: str) -> str:
    # Characters of a name that a caller gives.
    return json.dumps(name[:64]) if name else "-"
