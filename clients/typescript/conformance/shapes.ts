// What TypeScript refuses, and what run time refuses by name where there is no TypeScript.
import { Outrider } from "outrider-client";

import type { Input } from "./input.js";

const HELLO = [{ role: "user", content: "hi" }];

/** The message of each `TypeError`; none of these calls reaches a service. */
export async function shapes({ target }: Input): Promise<string[]> {
  const outrider = new Outrider(target);
  const { signal } = new AbortController();
  const calls: (() => unknown)[] = [
    // @ts-expect-error the contract's names are in camel case here
    () => outrider.chat(HELLO, { sampling: { max_tokens: 3 } }),
    // @ts-expect-error there is no such field
    () => outrider.chat(HELLO, { sampling: { length: 3 } }),
    // @ts-expect-error a setting of sampling
    () => outrider.chat(HELLO, { maxTokens: 3 }),
    // @ts-expect-error an option of the call
    () => outrider.chat(HELLO, { signal }),
    // @ts-expect-error a setting
    () => outrider.chat(HELLO, {}, { sampling: {} }),
    // @ts-expect-error no messages
    () => outrider.chat("hi"),
    // @ts-expect-error no message
    () => outrider.chat(["hi"]),
    // @ts-expect-error no text
    () => outrider.chat([{ role: "user", content: ["hi"] }]),
    // @ts-expect-error there is no such field
    () => outrider.chat([{ role: "user", text: "hi" }]),
    // @ts-expect-error no object
    () => outrider.chat(HELLO, { sampling: 3 }),
    // @ts-expect-error no whole number
    () => outrider.chat(HELLO, { sampling: { maxTokens: "3" } }),
    () => outrider.chat(HELLO, { sampling: { maxTokens: 3.5 } }),
    // @ts-expect-error no settings
    () => outrider.chat(HELLO, null),
    // @ts-expect-error no settings, and no option either
    () => outrider.chat(HELLO, signal),
    // @ts-expect-error an option by itself
    () => outrider.chat(HELLO, {}, signal),
    // @ts-expect-error no signal
    () => outrider.chat(HELLO, {}, { signal: 5 }),
    // @ts-expect-error no number
    () => outrider.chat(HELLO, {}, { timeoutMs: "5" }),
    // @ts-expect-error no string
    () => new Outrider(target, { token: 5 }),
    // @ts-expect-error there is no such option
    () => new Outrider(target, { timeout: 3 }),
    // @ts-expect-error there is no such option
    () => new Outrider(target, { tls: { cert: "a.pem" } }),
    // @ts-expect-error there is no such field
    () => outrider.verification().open({ tokens: [1] }),
    // @ts-expect-error there is no such field
    () => outrider.target.getTargetInfo({ model: "x" }),
    async () => {
      // @ts-expect-error there is no such field
      for await (const _ of outrider.target.generate({ text: "hi" }));
    },
  ];
  const messages = [];
  for (const call of calls) {
    try {
      await call();
      messages.push("nothing");
    } catch (error) {
      messages.push(error instanceof TypeError ? error.message : `no TypeError: ${error}`);
    }
  }
  return messages;
}
