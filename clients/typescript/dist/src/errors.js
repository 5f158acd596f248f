import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
/** Reads the details of any error that a call throws. */
export function problemOf(thrown) {
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
export function errorOfStatus(status) {
    const error = new ConnectError(status?.message ?? "", (status?.code ?? Code.Unknown));
    error.details = (status?.details ?? []).map(({ typeUrl, value }) => ({
        type: typeUrl.slice(typeUrl.lastIndexOf("/") + 1),
        value,
    }));
    return error;
}
