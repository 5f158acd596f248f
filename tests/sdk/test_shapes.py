"""What the TypeScript client refuses by name before it calls anything; its compiler refuses the same (`shapes.ts`)."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.sdk, pytest.mark.asyncio(loop_scope="session")]

REFUSED = [
    "sampling.max_tokens: SamplingParameters has no such field; did you mean maxTokens?",
    "sampling.length: SamplingParameters has no such field",
    "maxTokens: GenerateRequest has no such field",
    "settings.signal: is an option of the call, which is the third argument",
    "options.sampling: there is no such option; there are "
    "timeoutMs, headers, signal, onHeader, onTrailer, contextValues",
    "messages: expected an array of { role, content }, got a string",
    "messages[0]: expected an object, got a string",
    "messages[0].content: expected a string, got an array",
    "messages[0].text: ChatMessage has no such field",
    "sampling: expected an object, got a number",
    "sampling.maxTokens: expected a whole number that is not negative, got a string",
    "sampling.maxTokens: expected a whole number that is not negative, got 3.5",
    "GenerateRequest: expected an object, got null",
    "GenerateRequest: expected an object, got an AbortSignal",
    "options: expected an object, got an AbortSignal",
    "options.signal: expected an AbortSignal, got a number",
    "options.timeoutMs: expected a number, got a string",
    "options.token: expected a string, got a number",
    "options.timeout: there is no such option; there are token, tls, timeoutMs, generateTimeoutMs, attempts",
    "options.tls.cert: there is no such option; there are ca, certificate, key, serverName",
    "frame.value.tokens: OpenVerification has no such field",
    "model: GetTargetInfoRequest has no such field",
    "text: GenerateRequest has no such field",
]


async def test_wrong_names_and_places_are_refused(sdk: Any) -> None:
    if sdk.toolchain.language != "typescript":
        pytest.skip("the compiler of Go refuses them")
    assert await sdk.run("shapes") == REFUSED
