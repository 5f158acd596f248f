import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { AddCorpusRequestSchema, FrameQueue, Outrider, ProposeRequestSchema } from "outrider-client";
import type { AddCorpusRequest, ProposeRequest, ProposeResponse } from "outrider-client";

import type { Input } from "./input.js";

const DOCUMENT = [10, 11, 12, 13, 14, 15];

async function* corpus(): AsyncGenerator<AddCorpusRequest> {
  yield create(AddCorpusRequestSchema, { corpus: "letters-typescript", tokenIds: DOCUMENT });
  yield create(AddCorpusRequestSchema, { tokenIds: DOCUMENT });
}

/** Speaks to the draft service as a target does: teaches it a document and asks how it goes on. */
export async function draft(input: Input): Promise<object> {
  const { draft: service } = new Outrider(input.draft);
  const { drafter } = await service.getDraftInfo({});
  const { tokens } = await service.addCorpus(corpus());
  const frames = new FrameQueue<ProposeRequest>();
  const answers = service.propose(frames)[Symbol.asyncIterator]();
  const send = (frame: NonNullable<MessageInitShape<typeof ProposeRequestSchema>["frame"]>) =>
    frames.push(create(ProposeRequestSchema, { frame }));
  send({ case: "credit", value: { frames: 16 } });
  const sequence = { sequenceId: 1n, tokenIds: DOCUMENT.slice(0, 2), promptLength: 2, vocabularySize: 211 };
  send({ case: "open", value: { ...sequence, corpus: "letters-typescript", tenant: "sdk" } });
  const first = await growth(answers);
  send({ case: "advance", value: { sequences: [{ sequenceId: 1n, step: 1n, tokenIds: [12] }] } });
  const second = await growth(answers);
  send({ case: "close", value: { sequenceIds: [1n] } });
  frames.end();
  while (!(await answers.next()).done);
  return { drafter, tokens: Number(tokens), growth: [first, second] };
}

async function growth(answers: AsyncIterator<ProposeResponse>): Promise<number[]> {
  for (;;) {
    const { value, done } = await answers.next();
    if (done || value.frame.case === "status") throw new Error("no growth");
    if (value.frame.case === "growth") return value.frame.value.sequences.flatMap(({ tokenIds }) => tokenIds);
  }
}
