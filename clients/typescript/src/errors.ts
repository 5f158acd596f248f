import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";

/** What a service says about a call or frame that it refused. */
export interface Problem {
  code: Code;
  message: string;
  /** A stable name such as `INVALID_FIELD`; empty when the error did not come from an Outrider service. */
  reason: string;
  metadata: Record<string, string>;
  /** The fields at fault, by path, such as `tree.parents[3]`. */
  fields: { path: string; description: string }[];
  /** When trying again makes sense, in milliseconds; undefined when it does not. */
  retryAfterMs: number | undefined;
}

/** Reads the details of any error that a call throws. */
export function problemOf(thrown: unknown): Problem {
  const error = ConnectError.from(thrown);
  const [info] = error.findDetails(ErrorInfoSchema);
  const [retry] = error.findDetails(RetryInfoSchema);
  const delay = retry?.retryDelay;
  return {
    code: error.code,
    message: error.rawMessage,
    reason: info?.reason ?? "",
    metadata: info?.metadata ?? {},
    fields: error
      .findDetails(BadRequestSchema)
      .flatMap((detail) => detail.fieldViolations)
      .map(({ field, description }) => ({ path: field, description })),
    retryAfterMs: delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6,
  };
}

/** The error of one frame of a stream, which travels as a message; `problemOf` reads it as it reads any other. */
export function errorOfStatus(status: Status | undefined): ConnectError {
  const error = new ConnectError(status?.message ?? "", (status?.code ?? Code.Unknown) as Code);
  error.details = (status?.details ?? []).map(({ typeUrl, value }) => ({
    type: typeUrl.slice(typeUrl.lastIndexOf("/") + 1),
    value,
  }));
  return error;
}
