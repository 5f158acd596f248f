import { setTimeout as sleep } from "node:timers/promises";

import type { CallOptions } from "@connectrpc/connect";
import { draftRefused, type GenerateFinished, Outrider } from "outrider-client";

import { failure, type Input, requestOf } from "./input.js";

interface Answer {
  tokenIds: number[];
  text: string;
  seed: string;
  drafted: number;
  finishReason: number;
  completionTokens: number;
  steps: number;
  draftRefused: string;
}

async function answer(input: Input, options?: CallOptions, pauseMs = 0): Promise<Answer> {
  const tokenIds: number[] = [];
  let [text, seed, drafted] = ["", "", 0];
  let finished: GenerateFinished | undefined;
  let refusal = "";
  const onTrailer = (trailers: Headers) => void (refusal = draftRefused(trailers));
  const answers = new Outrider(input.target).target.generate(requestOf(input), { ...options, onTrailer });
  for await (const { event } of answers) {
    if (pauseMs) await sleep(pauseMs);
    if (event.case === "started") seed = String(event.value.seed);
    if (event.case === "finished") finished = event.value;
    if (event.case !== "chunk") continue;
    tokenIds.push(...event.value.tokenIds);
    text += event.value.text;
    drafted += event.value.draftedTokens;
  }
  return {
    tokenIds,
    text,
    seed,
    drafted,
    finishReason: finished?.finishReason ?? 0,
    completionTokens: finished?.usage?.completionTokens ?? 0,
    steps: Number(finished?.speculation?.steps ?? 0),
    draftRefused: refusal,
  };
}

export const generate = (input: Input) => answer(input);

export const slowConsumer = (input: Input) => answer(input, undefined, input.pauseMs);

export const concurrent = (input: Input) =>
  Promise.all(Array.from({ length: input.sequences }, async () => (await answer(input)).tokenIds));

export const refused = (input: Input) => failure(() => answer(input));

export const deadline = (input: Input) => failure(() => answer(input, { timeoutMs: input.timeoutMs }));

export const cancelAfterBegin = (input: Input) => {
  const controller = new AbortController();
  const call = failure(() => answer(input, { signal: controller.signal }));
  controller.abort();
  return call;
};

export const cancelAfterFirstResponse = (input: Input) =>
  failure(async () => {
    const controller = new AbortController();
    const { target } = new Outrider(input.target);
    for await (const _ of target.generate(requestOf(input), { signal: controller.signal })) controller.abort();
  });

export async function chat(input: Input): Promise<string> {
  let text = "";
  const sampling = { maxTokens: 12 };
  for await (const chunk of new Outrider(input.target).chat([{ role: "user", content: "hi" }], { sampling })) {
    text += chunk.text;
  }
  return text;
}

export async function info(input: Input): Promise<object> {
  const { model, vocabularySize, dtype, drafter } = await new Outrider(input.target).target.getTargetInfo({});
  return { model, vocabularySize, dtype, drafter };
}

/** How a call fails without a token, and with it. */
export const token = async ({ target, token }: Input) => [
  await failure(() => new Outrider(target).target.getTargetInfo({})),
  await failure(() => new Outrider(target, { token }).target.getTargetInfo({})),
];

/** The target does not serve the draft's methods. */
export const unimplemented = (input: Input) => failure(() => new Outrider(input.target).draft.getDraftInfo({}));
