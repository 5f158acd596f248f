// One conformance case per run: `main.js CASE`, its input on standard input and its result on standard output, in JSON.
// The tests in tests/sdk run it against real services; the Go program beside it answers the same cases.
import { text } from "node:stream/consumers";

import { exponential, noiseWord, raceWinner } from "outrider-client";

import * as connecting from "./connecting.js";
import * as drafting from "./drafting.js";
import * as generating from "./generating.js";
import type { Input } from "./input.js";
import * as shapes from "./shapes.js";
import * as verifying from "./verifying.js";

function noise({ words, races }: Input): object {
  const drawn = words.map(({ seed, position, token_ids }) =>
    token_ids.map((tokenId) => noiseWord(BigInt(seed), BigInt(position), tokenId)),
  );
  const winners = races.map(({ seed, position, weights }) => raceWinner(BigInt(seed), BigInt(position), weights));
  return { words: drawn, exponentials: drawn.map((row) => row.map(exponential)), winners };
}

type Case = (input: Input) => unknown;
const CASES: Record<string, Case> = { noise, ...generating, ...verifying, ...drafting, ...connecting, ...shapes };
const run = CASES[process.argv[2] ?? ""];
if (!run) throw new Error(`cases: ${Object.keys(CASES).join(", ")}`);
process.stdout.write(JSON.stringify(await run(JSON.parse(await text(process.stdin)) as Input)));
process.exit(0);
