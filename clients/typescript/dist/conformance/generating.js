import { setTimeout as sleep } from "node:timers/promises";
import { Outrider } from "outrider-client";
import { failure, requestOf } from "./input.js";
async function answer(input, options, pauseMs = 0) {
    const tokenIds = [];
    let [text, seed, drafted] = ["", "", 0];
    let finished;
    for await (const { event } of new Outrider(input.target).target.generate(requestOf(input), options)) {
        if (pauseMs)
            await sleep(pauseMs);
        if (event.case === "started")
            seed = String(event.value.seed);
        if (event.case === "finished")
            finished = event.value;
        if (event.case !== "chunk")
            continue;
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
    };
}
export const generate = (input) => answer(input);
export const slowConsumer = (input) => answer(input, undefined, input.pauseMs);
export const concurrent = (input) => Promise.all(Array.from({ length: input.sequences }, async () => (await answer(input)).tokenIds));
export const refused = (input) => failure(() => answer(input));
export const deadline = (input) => failure(() => answer(input, { timeoutMs: input.timeoutMs }));
export const cancelAfterBegin = (input) => {
    const controller = new AbortController();
    const call = failure(() => answer(input, { signal: controller.signal }));
    controller.abort();
    return call;
};
export const cancelAfterFirstResponse = (input) => failure(async () => {
    const controller = new AbortController();
    const { target } = new Outrider(input.target);
    for await (const _ of target.generate(requestOf(input), { signal: controller.signal }))
        controller.abort();
});
export async function chat(input) {
    let text = "";
    const sampling = { maxTokens: 12 };
    for await (const chunk of new Outrider(input.target).chat([{ role: "user", content: "hi" }], { sampling })) {
        text += chunk.text;
    }
    return text;
}
export async function info(input) {
    const { model, vocabularySize, dtype, drafter } = await new Outrider(input.target).target.getTargetInfo({});
    return { model, vocabularySize, dtype, drafter };
}
/** The target does not serve the draft's methods. */
export const unimplemented = (input) => failure(() => new Outrider(input.target).draft.getDraftInfo({}));
