import { fromJson } from "@bufbuild/protobuf";
import { GenerateRequestSchema, problemOf } from "outrider-client";
export function requestOf(input) {
    return fromJson(GenerateRequestSchema, input.request);
}
export function promptOf(request) {
    return request.input.case === "tokens" ? request.input.value.tokenIds : [];
}
/** How a call fails, as the tests compare it. */
export async function failure(call) {
    try {
        return { unexpected: await call() };
    }
    catch (error) {
        const { code, message, reason, fields } = problemOf(error);
        return { code: Number(code), message, reason, fields: fields.map(({ path }) => path) };
    }
}
