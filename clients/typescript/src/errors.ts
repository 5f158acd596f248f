import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";

/** The stable names of what services report. */
export const SERVICE_REASONS = [
  "INVALID_FIELD",
  "POSITION_OUT_OF_RANGE",
  "UNKNOWN_MODEL",
  "UNKNOWN_SEQUENCE",
  "UNKNOWN_CORPUS",
  "SEQUENCE_EXISTS",
  "STEP_REPLAYED",
  "STEP_SKIPPED",
  "WRONG_ROOT",
  "WRONG_VOCABULARY",
  "NOT_SUPPORTED",
  "QUOTA_EXCEEDED",
  "CREDIT_EXCEEDED",
  "UNAUTHENTICATED",
  "PERMISSION_DENIED",
  "DEADLINE_EXCEEDED",
  "DRAINING",
  "WEIGHTS_CHANGED",
  "DRAFT_UNAVAILABLE",
  "ENGINE_DEAD",
  "LOGITS_NOT_FINITE",
  "LOADING",
] as const;

/**
 * What went wrong, by a stable name. `UNREACHABLE` (nobody answers, or the connection broke) and `CANCELLED` (by the
 * caller) are the client's own; empty is an error that neither a service nor this client explains.
 */
export type Reason = (typeof SERVICE_REASONS)[number] | "UNREACHABLE" | "CANCELLED" | "";

const DRAFT_REFUSED = "outrider-draft-refused";

/**
 * Why the draft service did not draft for a request, or not to its end, such as `UNKNOWN_CORPUS`; empty when nothing was
 * refused. The answer is complete and the same without drafts. `trailers` come to `onTrailer` of a call's options; a
 * call that fails has it in its error, as `draftRefused`.
 */
export function draftRefused(trailers: Headers): Reason {
  return (trailers.get(DRAFT_REFUSED) ?? "") as Reason;
}

/** A field at fault, by path, such as `tree.parents[3]`. */
export interface Field {
  path: string;
  description: string;
}

/** How a call, or a frame of a stream, failed. Clients throw it, their generated ones too. */
export class OutriderError extends ConnectError {
  override name = "OutriderError";
  readonly reason: Reason;
  /** What the service adds, by name. */
  readonly facts: Record<string, string>;
  readonly fields: Field[];
  /** When trying again makes sense, in milliseconds; undefined when the service does not ask for it. */
  readonly retryAfterMs: number | undefined;
  /** The service's, where a call to it failed. */
  readonly address: string;
  /** Why the draft service had refused the request, whatever it failed of; empty when it had not. */
  readonly draftRefused: Reason;

  constructor(error: ConnectError, address = "", cancelled = false) {
    const [info] = error.findDetails(ErrorInfoSchema);
    const [retry] = error.findDetails(RetryInfoSchema);
    const reason = (info?.reason as Reason | undefined) ?? explain(error, cancelled);
    const unreachable = reason === "UNREACHABLE";
    const told = unreachable ? `cannot reach ${address}: ${transportMessage(error)}` : error.rawMessage;
    super(told, unreachable ? Code.Unavailable : error.code);
    this.message = unreachable ? told : `${reason || Code[error.code]}: ${told}`;
    this.cause = error;
    this.details = error.details;
    this.reason = reason;
    this.facts = info?.metadata ?? {};
    this.fields = error
      .findDetails(BadRequestSchema)
      .flatMap((detail) => detail.fieldViolations)
      .map(({ field, description }) => ({ path: field, description }));
    const delay = retry?.retryDelay;
    this.retryAfterMs = delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6;
    this.address = address;
    this.draftRefused = draftRefused(error.metadata);
  }

  // `instanceof ConnectError` asks for a name; this class asks for itself.
  static override [Symbol.hasInstance](value: unknown): boolean {
    return typeof value === "object" && value !== null && OutriderError.prototype.isPrototypeOf(value);
  }
}

/** Reads any error that a call to `address` throws; `signal` is the call's own. */
export function errorOf(thrown: unknown, address = "", signal?: AbortSignal): OutriderError {
  if (thrown instanceof OutriderError) return thrown;
  return new OutriderError(ConnectError.from(thrown), address, signal?.aborted);
}

/** The error of one frame of a stream, which travels as a message. */
export function errorOfStatus(status: Status | undefined): OutriderError {
  const error = new ConnectError(status?.message ?? "", (status?.code ?? Code.Unknown) as Code);
  error.details = (status?.details ?? []).map(({ typeUrl, value }) => ({
    type: typeUrl.slice(typeUrl.lastIndexOf("/") + 1),
    value,
  }));
  return new OutriderError(error);
}

/** Names what the transport reports itself: no service's details come with it. */
function explain(error: ConnectError, cancelled: boolean): Reason {
  if (cancelled) return "CANCELLED";
  if (error.code === Code.DeadlineExceeded) return "DEADLINE_EXCEEDED";
  // A handshake that fails is INTERNAL to the transport, and a connection that closes under a call CANCELED.
  const broken = error.code === Code.Unavailable || error.code === Code.Canceled || systemCode(error) !== undefined;
  return broken ? "UNREACHABLE" : "";
}

/** Node's code of the system error behind it, such as `ECONNREFUSED`. */
function systemCode(error: ConnectError): string | undefined {
  const cause = error.cause;
  return cause instanceof Error && "code" in cause && typeof cause.code === "string" ? cause.code : undefined;
}

function transportMessage(error: ConnectError): string {
  const said = error.cause instanceof Error && error.cause.message ? error.cause.message : error.rawMessage;
  const code = systemCode(error) ?? "";
  if (code === "ERR_SSL_WRONG_VERSION_NUMBER") return "it does not speak TLS";
  if (code === "ERR_TLS_CERT_ALTNAME_INVALID") return `its certificate is of another name: ${said}`;
  if (/CERT|VERIFY|ISSUER/.test(code)) return `its certificate is not trusted: ${said}`;
  if (code === "ERR_HTTP2_ERROR" && said === "Protocol error") return "it speaks HTTP/1 and no gRPC, as a gateway does";
  if (error.code !== Code.Canceled) return said;
  return `${HUNG_UP} (at once, a server does so that expects TLS, or a client's certificate)`;
}

const HUNG_UP = "the connection was closed before the answer was complete";
