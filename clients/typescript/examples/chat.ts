import { Outrider } from "outrider-client";

const outrider = new Outrider(process.argv[2] ?? "127.0.0.1:50051");
const question = { role: "user", content: "Why is the sky blue?" };

for await (const chunk of outrider.chat([question])) {
  process.stdout.write(chunk.text);
}
