import type { MessageInitShape } from "@bufbuild/protobuf";
import { type CallOptions, type Client } from "@connectrpc/connect";
import { type ConnectOptions } from "./connection.js";
import { DraftService } from "./gen/outrider/v1/draft_pb.js";
import { type ChatMessageSchema, type GenerateChunk, type SpeculationOptionsSchema, TargetService } from "./gen/outrider/v1/target_pb.js";
import type { SamplingParametersSchema } from "./gen/outrider/v1/tree_pb.js";
import { Verification } from "./verification.js";
/** What a request may set beside its prompt; the defaults are those of the contract. */
export interface GenerateSettings {
    model?: string;
    sampling?: MessageInitShape<typeof SamplingParametersSchema>;
    speculation?: MessageInitShape<typeof SpeculationOptionsSchema>;
}
/** A client of one target service. `target` and `draft` are the generated clients, for everything not named here. */
export declare class Outrider {
    readonly target: Client<typeof TargetService>;
    readonly draft: Client<typeof DraftService>;
    constructor(address: string, options?: ConnectOptions);
    /**
     * Streams the answer to a conversation, one chunk per step of the engine. Leaving the loop early, or aborting
     * `options.signal`, cancels the request. Throws `ConnectError`; see `problemOf`.
     */
    chat(messages: MessageInitShape<typeof ChatMessageSchema>[], settings?: GenerateSettings, options?: CallOptions): AsyncGenerator<GenerateChunk>;
    /** A stream of trees that the caller drafts itself. */
    verification(options?: CallOptions): Verification;
}
