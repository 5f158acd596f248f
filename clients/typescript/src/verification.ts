import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { type CallOptions, type Client, Code, ConnectError } from "@connectrpc/connect";

import { errorOf, errorOfStatus, type OutriderError } from "./errors.js";
import {
  type OpenVerificationSchema,
  type TargetService,
  type Verdict,
  type VerificationOpened,
  type VerifyRequest,
  VerifyRequestSchema,
  type VerifyResponse,
  type VerifyTreeSchema,
} from "./gen/outrider/v1/target_pb.js";
import { FrameQueue } from "./queue.js";
import { checkShape } from "./shape.js";

/**
 * A stream of trees that the client drafts itself. One frame is under way at a time, each answered before the next;
 * sequences may take turns. A refused frame throws, and unless the engine failed its sequence stays open.
 */
export class Verification {
  readonly #frames = new FrameQueue<VerifyRequest>();
  readonly #answers: AsyncIterator<VerifyResponse>;

  constructor(target: Client<typeof TargetService>, options?: CallOptions) {
    this.#answers = target.verify(this.#frames, options)[Symbol.asyncIterator]();
  }

  /** Starts a sequence; its last token is the root of the first tree. */
  async open(sequence: MessageInitShape<typeof OpenVerificationSchema>): Promise<VerificationOpened> {
    this.#send({ case: "open", value: sequence });
    const { frame } = await this.#hear();
    if (frame.case !== "opened") throw unexpected("opened", frame.case);
    return frame.value;
  }

  /** One step: what the target commits of a tree, and its own next token. */
  async verify(tree: MessageInitShape<typeof VerifyTreeSchema>): Promise<Verdict> {
    this.#send({ case: "tree", value: tree });
    const { frame } = await this.#hear();
    if (frame.case !== "verdict") throw unexpected("a verdict", frame.case);
    return frame.value;
  }

  /** Ends a sequence and frees what it holds. */
  close(sequenceId: bigint): void {
    this.#send({ case: "close", value: { sequenceId } });
  }

  /** Half-closes the stream and waits until the service has ended it too. */
  async end(): Promise<void> {
    this.#frames.end();
    while (!(await this.#answers.next()).done);
  }

  #send(frame: NonNullable<MessageInitShape<typeof VerifyRequestSchema>["frame"]>): void {
    checkShape(VerifyRequestSchema, { frame });
    this.#frames.push(create(VerifyRequestSchema, { frame }));
  }

  async #hear(): Promise<VerifyResponse> {
    const { value, done } = await this.#answers.next();
    if (done) throw errorOf(new ConnectError("the service ended the stream", Code.Aborted));
    if (value.frame.case === "status") throw errorOfStatus(value.frame.value.status);
    return value;
  }
}

function unexpected(expected: string, got: string | undefined): OutriderError {
  return errorOf(new ConnectError(`expected ${expected}, got ${got}`, Code.Internal));
}
