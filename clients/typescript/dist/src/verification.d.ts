import { type MessageInitShape } from "@bufbuild/protobuf";
import { type CallOptions, type Client } from "@connectrpc/connect";
import { type OpenVerificationSchema, type TargetService, type Verdict, type VerificationOpened, type VerifyTreeSchema } from "./gen/outrider/v1/target_pb.js";
/**
 * A stream of trees that the client drafts itself. One frame is under way at a time, each answered before the next;
 * sequences may take turns. A refused frame throws, and unless the engine failed its sequence stays open.
 */
export declare class Verification {
    #private;
    constructor(target: Client<typeof TargetService>, options?: CallOptions);
    /** Starts a sequence; its last token is the root of the first tree. */
    open(sequence: MessageInitShape<typeof OpenVerificationSchema>): Promise<VerificationOpened>;
    /** One step: what the target commits of a tree, and its own next token. */
    verify(tree: MessageInitShape<typeof VerifyTreeSchema>): Promise<Verdict>;
    /** Ends a sequence and frees what it holds. */
    close(sequenceId: bigint): void;
    /** Half-closes the stream and waits until the service has ended it too. */
    end(): Promise<void>;
}
