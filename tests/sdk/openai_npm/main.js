// One case of tests/sdk/test_openai_npm.py: reads what to do as JSON from standard input, does it with the official
// `openai` package, and prints what came of it as JSON.

import { readFileSync } from "node:fs";
import OpenAI, { APIError, APIUserAbortError } from "openai";

const { baseURL, apiKey = "unused", headers = {}, endpoint, body, abortAfter } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, defaultHeaders: headers });

const endpoints = {
  chat: (options) => client.chat.completions.create(body, options),
  completions: (options) => client.completions.create(body, options),
};

/** The chunks of a streamed answer; with `abortAfter`, so many at most. */
async function chunksOf(stream) {
  const chunks = [];
  for await (const chunk of stream) {
    chunks.push(chunk);
    // Leaving the loop would do too; this is what a "stop" button calls.
    if (chunks.length === abortAfter) stream.controller.abort();
  }
  return chunks;
}

/** A whole answer that is given up while it is being written. */
async function abandoned() {
  const controller = new AbortController();
  const answer = endpoints.chat({ signal: controller.signal });
  setTimeout(() => controller.abort(), 300);
  return answer;
}

const cases = {
  create: async () => endpoints[endpoint](),
  stream: async () => chunksOf(await endpoints[endpoint]()),
  // The package's own way of putting a stream together.
  helper: async () => {
    const stream = client.chat.completions.stream(body);
    const pieces = [];
    stream.on("content", (delta) => pieces.push(delta));
    return { final: await stream.finalChatCompletion(), pieces };
  },
  abandon: abandoned,
  models: async () => {
    const listed = [];
    for await (const model of client.models.list()) listed.push(model);
    return { listed, one: await client.models.retrieve(listed[0].id) };
  },
};

try {
  console.log(JSON.stringify({ result: await cases[process.argv[2]]() }));
} catch (error) {
  if (!(error instanceof APIError)) throw error;
  const { status, code, param, type, message, requestID } = error;
  const aborted = error instanceof APIUserAbortError;
  console.log(JSON.stringify({ error: { name: error.constructor.name, aborted, status, code, param, type, message, requestID } }));
}
