import { type JsonValue } from "@bufbuild/protobuf";
import { type GenerateRequest } from "outrider-client";
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
    words: {
        seed: string;
        position: string;
        token_ids: number[];
    }[];
    races: {
        seed: string;
        position: string;
        weights: number[];
    }[];
}
export declare function requestOf(input: Input): GenerateRequest;
export declare function promptOf(request: GenerateRequest): number[];
/** How a call fails, as the tests compare it. */
export declare function failure(call: () => Promise<unknown>): Promise<object>;
