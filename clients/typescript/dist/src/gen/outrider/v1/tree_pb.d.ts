import type { GenEnum, GenFile, GenMessage } from "@bufbuild/protobuf/codegenv2";
import type { Message } from "@bufbuild/protobuf";
/**
 * Describes the file outrider/v1/tree.proto.
 */
export declare const file_outrider_v1_tree: GenFile;
/**
 * DraftDistribution is the law a drafter drew the children of one node from, without replacement.
 * It is truncated to its support; the probability of token_ids[i] is weights[i] / sum(weights), exactly.
 *
 * @generated from message outrider.v1.DraftDistribution
 */
export type DraftDistribution = Message<"outrider.v1.DraftDistribution"> & {
    /**
     * parent is the node (growth) or row (tree) whose children were drawn. Each parent appears at most once.
     *
     * @generated from field: uint32 parent = 1;
     */
    parent: number;
    /**
     * token_ids is the support. No duplicates, at most 64 entries, each below the vocabulary size;
     * else INVALID_ARGUMENT.
     *
     * @generated from field: repeated uint32 token_ids = 2;
     */
    tokenIds: number[];
    /**
     * weights are positive integers up to 65535, as many as token_ids; else INVALID_ARGUMENT.
     *
     * @generated from field: repeated uint32 weights = 3;
     */
    weights: number[];
};
/**
 * Describes the message outrider.v1.DraftDistribution.
 * Use `create(DraftDistributionSchema)` to create a new message.
 */
export declare const DraftDistributionSchema: GenMessage<DraftDistribution>;
/**
 * TokenTree is a tree of candidate continuations in topological order.
 * Row 0 is the root: the last committed token, whose successor is being guessed.
 *
 * @generated from message outrider.v1.TokenTree
 */
export type TokenTree = Message<"outrider.v1.TokenTree"> & {
    /**
     * token_ids holds one token per row. At least one row (the root), at most the max_rows that the service
     * announces; each id is below the vocabulary size. Siblings carry different tokens. Else INVALID_ARGUMENT.
     *
     * @generated from field: repeated uint32 token_ids = 1;
     */
    tokenIds: number[];
    /**
     * parents[i] is the row of row i's parent, and parents[i] < i, which makes a cycle impossible to encode.
     * parents[0] is 0. As many as token_ids; else INVALID_ARGUMENT.
     *
     * @generated from field: repeated uint32 parents = 2;
     */
    parents: number[];
    /**
     * scores[i] is the drafter's probability that row i is accepted given that its parent is, in [0, 1].
     * Empty, or as many as token_ids (scores[0] is 1). NaN and values outside the range are INVALID_ARGUMENT.
     *
     * @generated from field: repeated float scores = 3;
     */
    scores: number[];
    /**
     * distributions are needed in VERIFICATION_MODE_REJECTION for sampled drafts, and ignored in the other modes.
     * Children of a parent without one are treated as a deterministic guess, which is exact too.
     *
     * @generated from field: repeated outrider.v1.DraftDistribution distributions = 4;
     */
    distributions: DraftDistribution[];
};
/**
 * Describes the message outrider.v1.TokenTree.
 * Use `create(TokenTreeSchema)` to create a new message.
 */
export declare const TokenTreeSchema: GenMessage<TokenTree>;
/**
 * Tensor is a dense array: row-major, little-endian, no padding.
 *
 * @generated from message outrider.v1.Tensor
 */
export type Tensor = Message<"outrider.v1.Tensor"> & {
    /**
     * dtype is the element type.
     *
     * @generated from field: outrider.v1.Tensor.DType dtype = 1;
     */
    dtype: Tensor_DType;
    /**
     * shape is the extent of each axis. The product times the element size is the length of data;
     * else INVALID_ARGUMENT.
     *
     * @generated from field: repeated uint32 shape = 2;
     */
    shape: number[];
    /**
     * data holds the elements.
     *
     * @generated from field: bytes data = 3;
     */
    data: Uint8Array;
};
/**
 * Describes the message outrider.v1.Tensor.
 * Use `create(TensorSchema)` to create a new message.
 */
export declare const TensorSchema: GenMessage<Tensor>;
/**
 * DType names the element type.
 *
 * @generated from enum outrider.v1.Tensor.DType
 */
export declare enum Tensor_DType {
    /**
     * D_TYPE_UNSPECIFIED is INVALID_ARGUMENT.
     *
     * @generated from enum value: D_TYPE_UNSPECIFIED = 0;
     */
    UNSPECIFIED = 0,
    /**
     * D_TYPE_FLOAT32 is IEEE 754 binary32.
     *
     * @generated from enum value: D_TYPE_FLOAT32 = 1;
     */
    FLOAT32 = 1,
    /**
     * D_TYPE_BFLOAT16 is the upper half of binary32.
     *
     * @generated from enum value: D_TYPE_BFLOAT16 = 2;
     */
    BFLOAT16 = 2,
    /**
     * D_TYPE_FLOAT8_E4M3 is the OCP 8-bit float with 4 exponent bits and no infinities.
     *
     * @generated from enum value: D_TYPE_FLOAT8_E4M3 = 3;
     */
    FLOAT8_E4M3 = 3
}
/**
 * Describes the enum outrider.v1.Tensor.DType.
 */
export declare const Tensor_DTypeSchema: GenEnum<Tensor_DType>;
/**
 * SamplingParameters say how the next token is drawn. All of them work with speculation.
 * Fields whose default is not zero have presence, so that "not set" and "zero" differ.
 *
 * @generated from message outrider.v1.SamplingParameters
 */
export type SamplingParameters = Message<"outrider.v1.SamplingParameters"> & {
    /**
     * temperature divides the logits. Default 0 (greedy); finite and >= 0, else INVALID_ARGUMENT.
     *
     * @generated from field: double temperature = 1;
     */
    temperature: number;
    /**
     * top_k keeps the k most probable tokens. Default 0, which keeps all.
     *
     * @generated from field: uint32 top_k = 2;
     */
    topK: number;
    /**
     * top_p keeps the smallest set of tokens whose probability reaches top_p. Default 1; in (0, 1].
     *
     * @generated from field: optional double top_p = 3;
     */
    topP?: number;
    /**
     * min_p drops tokens less probable than min_p times the most probable one. Default 0; in [0, 1].
     *
     * @generated from field: double min_p = 4;
     */
    minP: number;
    /**
     * repetition_penalty divides positive logits (multiplies negative ones) of tokens that occur in the prompt or
     * the output. Default 1; finite and > 0.
     *
     * @generated from field: optional double repetition_penalty = 5;
     */
    repetitionPenalty?: number;
    /**
     * presence_penalty is subtracted once from the logit of each token that occurs in the output. Default 0;
     * in [-2, 2].
     *
     * @generated from field: double presence_penalty = 6;
     */
    presencePenalty: number;
    /**
     * frequency_penalty is subtracted from a token's logit once per occurrence in the output. Default 0;
     * in [-2, 2].
     *
     * @generated from field: double frequency_penalty = 7;
     */
    frequencyPenalty: number;
    /**
     * logit_bias is added to the logits by token id. At most 1024 entries, each finite and in [-100, 100].
     *
     * @generated from field: map<uint32, float> logit_bias = 8;
     */
    logitBias: {
        [key: number]: number;
    };
    /**
     * min_tokens is how many tokens are produced before an end or stop token may be. Default 0; at most max_tokens.
     *
     * @generated from field: uint32 min_tokens = 9;
     */
    minTokens: number;
    /**
     * max_tokens ends the output. Default: what the model's context leaves, at most 1024. At least 1.
     *
     * @generated from field: optional uint32 max_tokens = 10;
     */
    maxTokens?: number;
    /**
     * stop ends the output at the first of these strings, which is cut from the text. At most 16 non-empty strings
     * of at most 256 bytes.
     *
     * @generated from field: repeated string stop = 11;
     */
    stop: string[];
    /**
     * stop_token_ids end the output, beside the model's own end tokens. At most 64, each below the vocabulary size.
     *
     * @generated from field: repeated uint32 stop_token_ids = 12;
     */
    stopTokenIds: number[];
    /**
     * ignore_eos goes on past the model's end tokens. Default false.
     *
     * @generated from field: bool ignore_eos = 13;
     */
    ignoreEos: boolean;
    /**
     * seed makes sampling reproducible. Default: drawn by the target, and returned.
     *
     * @generated from field: optional fixed64 seed = 14;
     */
    seed?: bigint;
    /**
     * logprobs asks for the log-probability of each token and of this many alternatives, before penalties and
     * filters. Not set asks for none, 0 for the chosen token's alone; at most 20.
     *
     * @generated from field: optional uint32 logprobs = 15;
     */
    logprobs?: number;
};
/**
 * Describes the message outrider.v1.SamplingParameters.
 * Use `create(SamplingParametersSchema)` to create a new message.
 */
export declare const SamplingParametersSchema: GenMessage<SamplingParameters>;
/**
 * Timings lets a client split network from compute without a tracer.
 *
 * @generated from message outrider.v1.Timings
 */
export type Timings = Message<"outrider.v1.Timings"> & {
    /**
     * queue_nanoseconds is the time spent waiting for a place in a batch.
     *
     * @generated from field: uint64 queue_nanoseconds = 1;
     */
    queueNanoseconds: bigint;
    /**
     * compute_nanoseconds is the time spent in the step or steps that produced this message.
     *
     * @generated from field: uint64 compute_nanoseconds = 2;
     */
    computeNanoseconds: bigint;
};
/**
 * Describes the message outrider.v1.Timings.
 * Use `create(TimingsSchema)` to create a new message.
 */
export declare const TimingsSchema: GenMessage<Timings>;
/**
 * VerificationMode says how the target decides which drafted tokens it keeps.
 *
 * @generated from enum outrider.v1.VerificationMode
 */
export declare enum VerificationMode {
    /**
     * VERIFICATION_MODE_UNSPECIFIED lets the target choose: GREEDY at temperature 0, COUPLED above it.
     *
     * @generated from enum value: VERIFICATION_MODE_UNSPECIFIED = 0;
     */
    UNSPECIFIED = 0,
    /**
     * VERIFICATION_MODE_GREEDY keeps a drafted token when it is the target's most probable token.
     * Equal to plain greedy decoding, token for token. Needs temperature 0.
     *
     * @generated from enum value: VERIFICATION_MODE_GREEDY = 1;
     */
    GREEDY = 1,
    /**
     * VERIFICATION_MODE_COUPLED keeps a drafted token when it is the target's own seeded sample.
     * Equal to plain seeded sampling, token for token, whatever the draft proposes.
     *
     * @generated from enum value: VERIFICATION_MODE_COUPLED = 2;
     */
    COUPLED = 2,
    /**
     * VERIFICATION_MODE_REJECTION runs recursive rejection sampling without replacement.
     * Equal to plain sampling in law, provided that drafts were drawn from the distributions sent with them.
     *
     * @generated from enum value: VERIFICATION_MODE_REJECTION = 3;
     */
    REJECTION = 3
}
/**
 * Describes the enum outrider.v1.VerificationMode.
 */
export declare const VerificationModeSchema: GenEnum<VerificationMode>;
