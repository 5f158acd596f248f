import type { MessageInitShape } from "@bufbuild/protobuf";
import { type CallOptions, type Client, createClient } from "@connectrpc/connect";

import { type ConnectOptions, createTransport } from "./connection.js";
import { DraftService } from "./gen/outrider/v1/draft_pb.js";
import {
  type ChatMessageSchema,
  type GenerateChunk,
  type PredictionSchema,
  type SpeculationOptionsSchema,
  TargetService,
} from "./gen/outrider/v1/target_pb.js";
import type { SamplingParametersSchema } from "./gen/outrider/v1/tree_pb.js";
import { Verification } from "./verification.js";

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

  constructor(address: string, options: ConnectOptions = {}) {
    const transport = createTransport(address, options);
    this.target = createClient(TargetService, transport);
    this.draft = createClient(DraftService, transport);
  }

  /**
   * Streams the answer to a conversation, a chunk per step of the engine, or per few. Leaving the loop early, or aborting
   * `options.signal`, cancels the request. Throws `ConnectError`; see `problemOf`.
   */
  async *chat(
    messages: MessageInitShape<typeof ChatMessageSchema>[],
    settings: GenerateSettings = {},
    options?: CallOptions,
  ): AsyncGenerator<GenerateChunk> {
    const input = { case: "chat" as const, value: { messages } };
    for await (const { event } of this.target.generate({ ...settings, input }, options)) {
      if (event.case === "chunk") yield event.value;
    }
  }

  /** A stream of trees that the caller drafts itself. */
  verification(options?: CallOptions): Verification {
    return new Verification(this.target, options);
  }
}
