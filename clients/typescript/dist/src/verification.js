import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { errorOfStatus } from "./errors.js";
import { VerifyRequestSchema, } from "./gen/outrider/v1/target_pb.js";
import { FrameQueue } from "./queue.js";
/**
 * A stream of trees that the client drafts itself. One frame is under way at a time, each answered before the next;
 * sequences may take turns. A refused frame throws, and unless the engine failed its sequence stays open.
 */
export class Verification {
    #frames = new FrameQueue();
    #answers;
    constructor(target, options) {
        this.#answers = target.verify(this.#frames, options)[Symbol.asyncIterator]();
    }
    /** Starts a sequence; its last token is the root of the first tree. */
    async open(sequence) {
        this.#send({ case: "open", value: sequence });
        const { frame } = await this.#hear();
        if (frame.case !== "opened")
            throw new ConnectError(`expected opened, got ${frame.case}`, Code.Internal);
        return frame.value;
    }
    /** One step: what the target commits of a tree, and its own next token. */
    async verify(tree) {
        this.#send({ case: "tree", value: tree });
        const { frame } = await this.#hear();
        if (frame.case !== "verdict")
            throw new ConnectError(`expected a verdict, got ${frame.case}`, Code.Internal);
        return frame.value;
    }
    /** Ends a sequence and frees what it holds. */
    close(sequenceId) {
        this.#send({ case: "close", value: { sequenceId } });
    }
    /** Half-closes the stream and waits until the service has ended it too. */
    async end() {
        this.#frames.end();
        while (!(await this.#answers.next()).done)
            ;
    }
    #send(frame) {
        this.#frames.push(create(VerifyRequestSchema, { frame }));
    }
    async #hear() {
        const { value, done } = await this.#answers.next();
        if (done)
            throw new ConnectError("the stream ended", Code.Unavailable);
        if (value.frame.case === "status")
            throw errorOfStatus(value.frame.value.status);
        return value;
    }
}
