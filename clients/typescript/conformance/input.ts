import { fromJson, type JsonValue } from "@bufbuild/protobuf";
import { type GenerateRequest, GenerateRequestSchema, errorOf, OutriderError } from "outrider-client";

/** What the tests write to standard input; which fields are set depends on the case. */
export interface Input {
  target: string;
  draft: string;
  /** A GenerateRequest in protobuf's JSON. */
  request: JsonValue;
  /** The answer that the client's drafts are made from. */
  expected: number[];
  sequences: number;
  pauseMs: number;
  timeoutMs: number;
  token: string;
  attempts: number;
  /** TLS, checked against the authority in `ca`; `certificate` and `key` are the client's own. */
  tls: boolean;
  ca: string;
  certificate: string;
  key: string;
  serverName: string;
  words: { seed: string; position: string; token_ids: number[] }[];
  races: { seed: string; position: string; weights: number[] }[];
}

export function requestOf(input: Input): GenerateRequest {
  return fromJson(GenerateRequestSchema, input.request);
}

export function promptOf(request: GenerateRequest): number[] {
  return request.input.case === "tokens" ? request.input.value.tokenIds : [];
}

/** How a call fails, as the tests compare it. */
export async function failure(call: () => Promise<unknown>): Promise<object> {
  try {
    return { unexpected: await call() };
  } catch (error) {
    return described(error);
  }
}

export function described(error: unknown): object {
  const { code, message, rawMessage, reason, fields } = errorOf(error);
  const paths = fields.map(({ path }) => path);
  const is = error instanceof OutriderError;
  return { code: Number(code), message: rawMessage, reason, fields: paths, line: message, is };
}
