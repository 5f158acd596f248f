import { Outrider } from "outrider-client";

const [address = "127.0.0.1:50051", question = "Why is the sky blue?"] = process.argv.slice(2);
const outrider = new Outrider(address);

for await (const chunk of outrider.chat([{ role: "user", content: question }])) {
  process.stdout.write(chunk.text);
}
process.stdout.write("\n");
