// The shared noise of COUPLED verification, as protos/outrider/noise.py defines it: a client that ranks its candidates
// by this race drafts toward the very token that the target will choose.

const M0 = 0xd2511f53n;
const M1 = 0xcd9e8d57n;
const W0 = 0x9e3779b9n;
const W1 = 0xbb67ae85n;
const LOW = 0xffffffffn;
const ROUNDS = 10;

type Words = [bigint, bigint, bigint, bigint];

function philox([c0, c1, c2, c3]: Words, k0: bigint, k1: bigint): Words {
  for (let round = 0; round < ROUNDS; round++) {
    const product0 = c0 * M0;
    const product1 = c2 * M1;
    [c0, c1, c2, c3] = [(product1 >> 32n) ^ c1 ^ k0, product1 & LOW, (product0 >> 32n) ^ c3 ^ k1, product0 & LOW];
    k0 = (k0 + W0) & LOW;
    k1 = (k1 + W1) & LOW;
  }
  return [c0, c1, c2, c3];
}

/** The 32-bit noise word of one token at one absolute position of a request with this 64-bit seed. */
export function noiseWord(seed: bigint, position: bigint, tokenId: number): number {
  const block = BigInt(tokenId) >> 2n;
  const words = philox([block, position & LOW, position >> 32n, 0n], seed & LOW, seed >> 32n);
  return Number(words[tokenId & 3]);
}

/** The exponential of a noise word: strictly positive. */
export function exponential(word: number): number {
  return -Math.log1p(-(word + 0.5) * 2 ** -32);
}

/** The token that wins the race under these weights (a law up to a factor); weight 0 never wins. -1 when all are 0. */
export function raceWinner(seed: bigint, position: bigint, weights: readonly number[]): number {
  let winner = -1;
  let best = Infinity;
  weights.forEach((weight, tokenId) => {
    const time = exponential(noiseWord(seed, position, tokenId)) / weight;
    if (time < best) [winner, best] = [tokenId, time];
  });
  return winner;
}
