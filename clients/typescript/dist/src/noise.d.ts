/** The 32-bit noise word of one token at one absolute position of a request with this 64-bit seed. */
export declare function noiseWord(seed: bigint, position: bigint, tokenId: number): number;
/** The exponential of a noise word: strictly positive. */
export declare function exponential(word: number): number;
/** The token that wins the race under these weights (a law up to a factor); weight 0 never wins. -1 when all are 0. */
export declare function raceWinner(seed: bigint, position: bigint, weights: readonly number[]): number;
