import type { MessageInitShape } from "@bufbuild/protobuf";
import { type CallOptions, type Client, createClient } from "@connectrpc/connect";

import { withPolicies } from "./calls.js";
import { connect, type ConnectOptions } from "./connection.js";
import { DraftService } from "./gen/outrider/v1/draft_pb.js";
import {
  ChatMessageSchema,
  type GenerateChunk,
  GenerateRequestSchema,
  type PredictionSchema,
  type SpeculationOptionsSchema,
  TargetService,
} from "./gen/outrider/v1/target_pb.js";
import type { SamplingParametersSchema } from "./gen/outrider/v1/tree_pb.js";
import { checkNames, checkShape } from "./shape.js";
import { Verification } from "./verification.js";

// The names of `CallOptions`, which are no more than types at run time.
const CALL_OPTIONS = ["timeoutMs", "headers", "signal", "onHeader", "onTrailer", "contextValues"];

/** What a request may set beside its prompt; the defaults are those of the contract. */
export interface GenerateSettings {
  model?: string;
  sampling?: MessageInitShape<typeof SamplingParametersSchema>;
  speculation?: MessageInitShape<typeof SpeculationOptionsSchema>;
  prediction?: MessageInitShape<typeof PredictionSchema>;
}

/** A client of one target service. `target` and `draft` are the generated clients, for everything not named here. */
export class Outrider {
  readonly target: Client<typeof TargetService>;
  readonly draft: Client<typeof DraftService>;

  readonly #close: () => void;

  /** `address` is `HOST:PORT` or `unix:PATH`. Connects at the first call. Throws for TLS files that cannot be read. */
  constructor(address: string, options: ConnectOptions = {}) {
    const [connection, close] = connect(address, options);
    const transport = withPolicies(connection, address, options);
    this.#close = close;
    this.target = createClient(TargetService, transport);
    this.draft = createClient(DraftService, transport);
  }

  /**
   * Streams the answer to a conversation, a chunk per step of the engine, or per few. Leaving the loop early, or
   * aborting `options.signal`, cancels the request. Throws `OutriderError`; a `TypeError` names what is no message,
   * setting or option.
   */
  chat(
    messages: MessageInitShape<typeof ChatMessageSchema>[],
    settings: GenerateSettings = {},
    options: CallOptions = {},
  ): AsyncGenerator<GenerateChunk> {
    const misplaced = Object.keys(settings ?? {}).find((name) => CALL_OPTIONS.includes(name));
    if (misplaced) throw new TypeError(`settings.${misplaced}: is an option of the call, which is the third argument`);
    if (!Array.isArray(messages)) {
      throw new TypeError(`messages: expected an array of { role, content }, got a ${typeof messages}`);
    }
    checkNames(options, CALL_OPTIONS, "options");
    // Now, and not with the first chunk.
    messages.forEach((message, index) => checkShape(ChatMessageSchema, message, `messages[${index}]`));
    checkShape(GenerateRequestSchema, settings);
    return this.#chunks({ ...settings, input: { case: "chat", value: { messages } } }, options);
  }

  async *#chunks(
    request: MessageInitShape<typeof GenerateRequestSchema>,
    options: CallOptions,
  ): AsyncGenerator<GenerateChunk> {
    for await (const { event } of this.target.generate(request, options)) {
      if (event.case === "chunk") yield event.value;
    }
  }

  /** Cancels what runs and closes the connection. An idle one keeps no process alive. */
  close(): void {
    this.#close();
  }

  /** A stream of trees that the caller drafts itself. */
  verification(options: CallOptions = {}): Verification {
    checkNames(options, CALL_OPTIONS, "options");
    return new Verification(this.target, options);
  }
}
