import { type Input } from "./input.js";
interface Answer {
    tokenIds: number[];
    text: string;
    seed: string;
    drafted: number;
    finishReason: number;
    completionTokens: number;
    steps: number;
}
export declare const generate: (input: Input) => Promise<Answer>;
export declare const slowConsumer: (input: Input) => Promise<Answer>;
export declare const concurrent: (input: Input) => Promise<number[][]>;
export declare const refused: (input: Input) => Promise<object>;
export declare const deadline: (input: Input) => Promise<object>;
export declare const cancelAfterBegin: (input: Input) => Promise<object>;
export declare const cancelAfterFirstResponse: (input: Input) => Promise<object>;
export declare function chat(input: Input): Promise<string>;
export declare function info(input: Input): Promise<object>;
/** The target does not serve the draft's methods. */
export declare const unimplemented: (input: Input) => Promise<object>;
export {};
