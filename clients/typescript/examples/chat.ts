// Streams the answer to one question.
import { Outrider, OutriderError } from "outrider-client";

const [address, question, ...more] = process.argv.slice(2);
if (address === undefined || question === undefined || more.length > 0) {
  console.error("usage: chat.js ADDRESS QUESTION");
  process.exit(2);
}

try {
  const outrider = new Outrider(address);
  for await (const chunk of outrider.chat([{ role: "user", content: question }])) {
    process.stdout.write(chunk.text);
  }
  process.stdout.write("\n");
} catch (error) {
  if (!(error instanceof OutriderError || error instanceof TypeError)) throw error;
  console.error(error.message);
  process.exitCode = 1;
}
