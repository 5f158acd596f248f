// The API as this page uses it: the served models, and an answer event by event.

/** What went wrong, in the server's own words. */
export class ApiError extends Error {}

/** The server is not ready; `seconds` is when to ask again. */
export class StillLoading extends ApiError {
  constructor(message, seconds) {
    super(message);
    this.seconds = seconds;
  }
}

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not this server's own answer, such as a proxy's page: the status says it.
  }
  const seconds = Number(response.headers.get("retry-after"));
  if (response.status === 503 && seconds > 0) throw new StillLoading(message, seconds);
  throw new ApiError(message);
}

/** The served models. Throws ApiError. */
export async function models(key) {
  const response = await checked(await fetch("/v1/models", { headers: headers(key) }));
  return (await response.json()).data;
}

/** The events of one streamed chat answer. Throws ApiError, or what `signal` aborts with. */
export async function* answer(key, asked, signal) {
  const body = JSON.stringify({ ...asked, stream: true });
  const response = await checked(
    await fetch("/v1/chat/completions", { method: "POST", headers: headers(key), body, signal }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError("the answer broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield event;
    }
  }
}
