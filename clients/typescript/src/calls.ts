// What every call has in common: the deadline, retries and typed errors.
import { setTimeout as sleep } from "node:timers/promises";

import type { DescMessage, MessageShape } from "@bufbuild/protobuf";
import { Code, ConnectError, type StreamResponse, type Transport } from "@connectrpc/connect";

import type { ConnectOptions } from "./connection.js";
import { errorOf } from "./errors.js";
import { checkShape } from "./shape.js";

const TIMEOUT_MS = 10_000;
const GENERATE_TIMEOUT_MS = 600_000;
const ATTEMPTS = 4;

/**
 * The transport with the client's deadlines, retries and errors. A call is made again only when the service says when
 * (`RetryInfo`), nothing was answered yet, and its request is one message, which can be sent again.
 */
export function withPolicies(inner: Transport, address: string, options: ConnectOptions): Transport {
  const { timeoutMs: unaryMs = TIMEOUT_MS, generateTimeoutMs = GENERATE_TIMEOUT_MS, attempts = ATTEMPTS } = options;
  return {
    unary(method, signal, timeoutMs = unaryMs, header, input, values) {
      checkShape(method.input, input);
      const call = (remaining: number) => inner.unary(method, signal, remaining, header, input, values);
      return retry(address, attempts, timeoutMs, signal, call);
    },
    async stream(method, signal, timeoutMs, header, input, values) {
      if (method.methodKind !== "server_streaming") {
        const limit = timeoutMs ?? 0;
        const messages = checked(method.input, input);
        const call = () => inner.stream(method, signal, limit, header, messages, values);
        return typed(await retry(address, 1, limit, signal, call), address, signal);
      }
      const messages = await collected(checked(method.input, input));
      return retry(address, attempts, timeoutMs ?? generateTimeoutMs, signal, async (remaining) =>
        begun(typed(await inner.stream(method, signal, remaining, header, replay(messages), values), address, signal)),
      );
    },
  };
}

/** Makes the call until it succeeds, fails for good, or the attempts or the time are used up. */
async function retry<Answer>(
  address: string,
  attempts: number,
  timeoutMs: number,
  signal: AbortSignal | undefined,
  call: (remainingMs: number) => Promise<Answer>,
): Promise<Answer> {
  const end = timeoutMs > 0 ? Date.now() + timeoutMs : Infinity;
  for (let attempt = 1; ; attempt++) {
    try {
      return await call(end === Infinity ? 0 : Math.max(1, end - Date.now()));
    } catch (thrown) {
      const error = errorOf(thrown, address, signal);
      // Twice as long each time, and a little longer at random so that callers spread out.
      const waitMs = (error.retryAfterMs ?? 0) * 2 ** (attempt - 1) * (1 + Math.random() / 4);
      if (!waitMs || attempt >= attempts || Date.now() + waitMs >= end) throw error;
      await pause(waitMs, signal, address);
    }
  }
}

async function pause(waitMs: number, signal: AbortSignal | undefined, address: string): Promise<void> {
  try {
    await sleep(waitMs, undefined, signal ? { signal } : {});
  } catch {
    throw errorOf(new ConnectError("the caller cancelled the call", Code.Canceled), address, signal);
  }
}

/** The response once its first message is there, so that a call which is refused fails here and can be made again. */
async function begun<I extends DescMessage, O extends DescMessage>(
  response: StreamResponse<I, O>,
): Promise<StreamResponse<I, O>> {
  const messages = response.message[Symbol.asyncIterator]();
  const first = await messages.next();
  return { ...response, message: resumed(first, messages) };
}

async function* resumed<Message>(
  first: IteratorResult<Message>,
  rest: AsyncIterator<Message>,
): AsyncGenerator<Message, void> {
  try {
    for (let next = first; !next.done; next = await rest.next()) yield next.value;
  } finally {
    // Leaving early cancels the call.
    await rest.return?.();
  }
}

async function* checked<Message>(input: DescMessage, messages: AsyncIterable<Message>): AsyncGenerator<Message, void> {
  for await (const message of messages) {
    checkShape(input, message);
    yield message;
  }
}

async function collected<Message>(messages: AsyncIterable<Message>): Promise<Message[]> {
  const found: Message[] = [];
  for await (const message of messages) found.push(message);
  return found;
}

async function* replay<Message>(messages: Message[]): AsyncGenerator<Message, void> {
  yield* messages;
}

/** The response with errors of this package while it is read. */
function typed<I extends DescMessage, O extends DescMessage>(
  response: StreamResponse<I, O>,
  address: string,
  signal: AbortSignal | undefined,
): StreamResponse<I, O> {
  return { ...response, message: typedMessages<MessageShape<O>>(response.message, address, signal) };
}

async function* typedMessages<Message>(
  messages: AsyncIterable<Message>,
  address: string,
  signal: AbortSignal | undefined,
): AsyncGenerator<Message, void> {
  try {
    yield* messages;
  } catch (thrown) {
    throw errorOf(thrown, address, signal);
  }
}
