// Draws an answer with a seed, and draws it again: the same seed gives the same tokens.
import { Outrider, OutriderError } from "outrider-client";

const [address, seed, question, ...more] = process.argv.slice(2);
const isSeed = /^\d+$/.test(seed ?? "") && BigInt(seed ?? 0) < 2n ** 64n;
if (address === undefined || question === undefined || more.length > 0 || !isSeed) {
  console.error("usage: sampling.js ADDRESS SEED QUESTION");
  process.exit(2);
}

async function draw(outrider: Outrider, content: string): Promise<string> {
  const sampling = { temperature: 0.8, topP: 0.9, seed: BigInt(seed ?? 0), maxTokens: 64 };
  let text = "";
  for await (const chunk of outrider.chat([{ role: "user", content }], { sampling })) text += chunk.text;
  return text;
}

try {
  const outrider = new Outrider(address);
  const [first, second] = [await draw(outrider, question), await draw(outrider, question)];
  console.log(first);
  console.log(`drawn twice, the same: ${first === second}`);
} catch (error) {
  if (!(error instanceof OutriderError || error instanceof TypeError)) throw error;
  console.error(error.message);
  process.exitCode = 1;
}
