import { Code, ConnectError } from "@connectrpc/connect";
import type { Status } from "./gen/google/rpc/status_pb.js";
/** What a service says about a call or frame that it refused. */
export interface Problem {
    code: Code;
    message: string;
    /** A stable name such as `INVALID_FIELD`; empty when the error did not come from an Outrider service. */
    reason: string;
    metadata: Record<string, string>;
    /** The fields at fault, by path, such as `tree.parents[3]`. */
    fields: {
        path: string;
        description: string;
    }[];
    /** When trying again makes sense, in milliseconds; undefined when it does not. */
    retryAfterMs: number | undefined;
}
/** Reads the details of any error that a call throws. */
export declare function problemOf(thrown: unknown): Problem;
/** The error of one frame of a stream, which travels as a message; `problemOf` reads it as it reads any other. */
export declare function errorOfStatus(status: Status | undefined): ConnectError;
