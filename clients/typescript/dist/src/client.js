import { createClient } from "@connectrpc/connect";
import { createTransport } from "./connection.js";
import { DraftService } from "./gen/outrider/v1/draft_pb.js";
import { TargetService, } from "./gen/outrider/v1/target_pb.js";
import { Verification } from "./verification.js";
/** A client of one target service. `target` and `draft` are the generated clients, for everything not named here. */
export class Outrider {
    target;
    draft;
    constructor(address, options = {}) {
        const transport = createTransport(address, options);
        this.target = createClient(TargetService, transport);
        this.draft = createClient(DraftService, transport);
    }
    /**
     * Streams the answer to a conversation, one chunk per step of the engine. Leaving the loop early, or aborting
     * `options.signal`, cancels the request. Throws `ConnectError`; see `problemOf`.
     */
    async *chat(messages, settings = {}, options) {
        const input = { case: "chat", value: { messages } };
        for await (const { event } of this.target.generate({ ...settings, input }, options)) {
            if (event.case === "chunk")
                yield event.value;
        }
    }
    /** A stream of trees that the caller drafts itself. */
    verification(options) {
        return new Verification(this.target, options);
    }
}
