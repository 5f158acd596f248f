import { Outrider, type Verdict } from "outrider-client";

import { failure, type Input, promptOf, requestOf } from "./input.js";

const DEPTH = 4;
// Every fifth guess is wrong, so that verdicts of every length occur.
const MISTAKE_EVERY = 5;

/** A branch that follows the known answer, with mistakes, beside a branch that does not. */
function draft(root: number, expected: number[], done: number): { tokenIds: number[]; parents: number[] } {
  const guesses = expected.slice(done, done + DEPTH);
  const branch = guesses.map((token, i) => ((done + i) % MISTAKE_EVERY === MISTAKE_EVERY - 1 ? token ^ 1 : token));
  const tokenIds = [root, ...branch];
  const parents = [0, ...branch.keys()];
  if (branch[0] !== undefined) {
    tokenIds.push(branch[0] ^ 2, branch[0]);
    parents.push(0, tokenIds.length - 2);
  }
  return { tokenIds, parents };
}

export async function verify(input: Input): Promise<object> {
  const request = requestOf(input);
  const tokenIds = promptOf(request);
  const sampling = request.sampling!;
  const verification = new Outrider(input.target).verification();
  const opened = await verification.open({ tokenIds, sampling });
  const output: number[] = [];
  let [root, step, accepted, steps, finishReason] = [tokenIds.at(-1)!, opened.step, 0, 0, 0];
  while (!finishReason) {
    const tree = draft(root, input.expected, output.length);
    const verdict: Verdict = await verification.verify({ sequenceId: opened.sequenceId, step, tree });
    output.push(...verdict.tokenIds);
    accepted += verdict.acceptedRows.length;
    [root, step, finishReason, steps] = [output.at(-1)!, verdict.nextStep, verdict.finishReason, steps + 1];
  }
  await verification.end();
  return { tokenIds: output, accepted, steps, finishReason };
}

/** Sequences that take turns on one stream, one token each time. */
export async function pingPong(input: Input): Promise<number[][]> {
  const request = requestOf(input);
  const verification = new Outrider(input.target).verification();
  const sequences = [];
  for (let i = 0; i < input.sequences; i++) {
    const tokenIds = [...promptOf(request), 3 + i];
    const { sequenceId, step } = await verification.open({ tokenIds, sampling: request.sampling! });
    sequences.push({ sequenceId, step, root: 3 + i, output: [] as number[] });
  }
  for (let turn = 0; turn < request.sampling!.maxTokens!; turn++) {
    for (const sequence of sequences) {
      const { sequenceId, step, root, output } = sequence;
      const verdict = await verification.verify({ sequenceId, step, tree: { tokenIds: [root], parents: [0] } });
      output.push(...verdict.tokenIds);
      [sequence.step, sequence.root] = [verdict.nextStep, verdict.tokenIds.at(-1)!];
    }
  }
  await verification.end();
  return sequences.map(({ output }) => output);
}

/** A malformed tree is refused with its field, and the sequence goes on. */
export async function refusedTree(input: Input): Promise<object> {
  const verification = new Outrider(input.target).verification();
  const { sequenceId, step } = await verification.open({ tokenIds: [5], sampling: { maxTokens: 8, ignoreEos: true } });
  const bad = { tokenIds: [5, 6, 7], parents: [0, 2, 0] };
  const problem = await failure(() => verification.verify({ sequenceId, step, tree: bad }));
  const { tokenIds } = await verification.verify({ sequenceId, step, tree: { tokenIds: [5], parents: [0] } });
  verification.close(sequenceId);
  await verification.end();
  return { ...problem, recovered: tokenIds.length };
}

/** A stream that says nothing ends cleanly. */
export async function emptyStream(input: Input): Promise<string> {
  await new Outrider(input.target).verification().end();
  return "ended";
}
