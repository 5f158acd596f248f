import { type ConnectOptions, Outrider, SERVICE_REASONS } from "outrider-client";

import { described, type Input } from "./input.js";

/** The client's options as the input sets them. */
function optionsOf(input: Input): ConnectOptions {
  const { token, attempts, timeoutMs, tls, ca, certificate, key, serverName } = input;
  const given = Object.fromEntries(Object.entries({ ca, certificate, key, serverName }).filter(([, value]) => value));
  return {
    ...(token ? { token } : {}),
    ...(attempts ? { attempts } : {}),
    ...(timeoutMs ? { timeoutMs, generateTimeoutMs: timeoutMs } : {}),
    ...(tls ? { tls: given } : {}),
  };
}

/** A call with one answer, with the input's options. */
export async function call(input: Input): Promise<object> {
  let client: Outrider;
  try {
    client = new Outrider(input.target, optionsOf(input));
  } catch (error) {
    return { refused: (error as Error).message };
  }
  try {
    const { model } = await client.target.getTargetInfo({});
    return { model };
  } catch (error) {
    return described(error);
  } finally {
    client.close();
  }
}

/** A generation with the input's options. */
export async function stream(input: Input): Promise<object> {
  const client = new Outrider(input.target, optionsOf(input));
  let text = "";
  try {
    for await (const chunk of client.chat([{ role: "user", content: "hi" }])) text += chunk.text;
    return { text };
  } catch (error) {
    return described(error);
  } finally {
    client.close();
  }
}

/** Reasons that the client knows by name. */
export const reasons = () => SERVICE_REASONS;
