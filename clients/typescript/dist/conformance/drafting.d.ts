import type { Input } from "./input.js";
/** Speaks to the draft service as a target does: teaches it a document and asks how it goes on. */
export declare function draft(input: Input): Promise<object>;
