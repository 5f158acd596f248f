import { type Input } from "./input.js";
export declare function verify(input: Input): Promise<object>;
/** Sequences that take turns on one stream, one token each time. */
export declare function pingPong(input: Input): Promise<number[][]>;
/** A malformed tree is refused with its field, and the sequence goes on. */
export declare function refusedTree(input: Input): Promise<object>;
/** A stream that says nothing ends cleanly. */
export declare function emptyStream(input: Input): Promise<string>;
