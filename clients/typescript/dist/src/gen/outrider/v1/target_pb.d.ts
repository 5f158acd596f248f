import type { GenEnum, GenFile, GenMessage, GenService } from "@bufbuild/protobuf/codegenv2";
import type { Status } from "../../google/rpc/status_pb.js";
import type { SamplingParameters, Timings, TokenTree, VerificationMode } from "./tree_pb.js";
import type { Message } from "@bufbuild/protobuf";
/**
 * Describes the file outrider/v1/target.proto.
 */
export declare const file_outrider_v1_target: GenFile;
/**
 * GenerateRequest asks for one continuation.
 *
 * @generated from message outrider.v1.GenerateRequest
 */
export type GenerateRequest = Message<"outrider.v1.GenerateRequest"> & {
    /**
     * model is the served model's name. Default: whatever is served; NOT_FOUND when it is another.
     *
     * @generated from field: string model = 1;
     */
    model: string;
    /**
     * input is what to continue. One must be set; an empty prompt is INVALID_ARGUMENT, a prompt past the model's
     * context OUT_OF_RANGE.
     *
     * @generated from oneof outrider.v1.GenerateRequest.input
     */
    input: {
        /**
         * text is tokenised as it stands.
         *
         * @generated from field: string text = 2;
         */
        value: string;
        case: "text";
    } | {
        /**
         * chat is put through the model's chat template.
         *
         * @generated from field: outrider.v1.ChatInput chat = 3;
         */
        value: ChatInput;
        case: "chat";
    } | {
        /**
         * tokens are taken as they are.
         *
         * @generated from field: outrider.v1.TokenInput tokens = 4;
         */
        value: TokenInput;
        case: "tokens";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * sampling says how tokens are drawn.
     *
     * @generated from field: outrider.v1.SamplingParameters sampling = 5;
     */
    sampling?: SamplingParameters;
    /**
     * speculation says how drafts are used. It never changes what is said.
     *
     * @generated from field: outrider.v1.SpeculationOptions speculation = 6;
     */
    speculation?: SpeculationOptions;
};
/**
 * Describes the message outrider.v1.GenerateRequest.
 * Use `create(GenerateRequestSchema)` to create a new message.
 */
export declare const GenerateRequestSchema: GenMessage<GenerateRequest>;
/**
 * ChatInput is a conversation.
 *
 * @generated from message outrider.v1.ChatInput
 */
export type ChatInput = Message<"outrider.v1.ChatInput"> & {
    /**
     * messages in order, at least one.
     *
     * @generated from field: repeated outrider.v1.ChatMessage messages = 1;
     */
    messages: ChatMessage[];
};
/**
 * Describes the message outrider.v1.ChatInput.
 * Use `create(ChatInputSchema)` to create a new message.
 */
export declare const ChatInputSchema: GenMessage<ChatInput>;
/**
 * ChatMessage is one turn.
 *
 * @generated from message outrider.v1.ChatMessage
 */
export type ChatMessage = Message<"outrider.v1.ChatMessage"> & {
    /**
     * role is "system", "user" or "assistant".
     *
     * @generated from field: string role = 1;
     */
    role: string;
    /**
     * content of the turn.
     *
     * @generated from field: string content = 2;
     */
    content: string;
};
/**
 * Describes the message outrider.v1.ChatMessage.
 * Use `create(ChatMessageSchema)` to create a new message.
 */
export declare const ChatMessageSchema: GenMessage<ChatMessage>;
/**
 * TokenInput is a prompt in token ids.
 *
 * @generated from message outrider.v1.TokenInput
 */
export type TokenInput = Message<"outrider.v1.TokenInput"> & {
    /**
     * token_ids, at least one, each below the vocabulary size.
     *
     * @generated from field: repeated uint32 token_ids = 1;
     */
    tokenIds: number[];
};
/**
 * Describes the message outrider.v1.TokenInput.
 * Use `create(TokenInputSchema)` to create a new message.
 */
export declare const TokenInputSchema: GenMessage<TokenInput>;
/**
 * SpeculationOptions say how drafts are used for one request.
 *
 * @generated from message outrider.v1.SpeculationOptions
 */
export type SpeculationOptions = Message<"outrider.v1.SpeculationOptions"> & {
    /**
     * enabled switches drafting. Default true where the target has a draft service.
     *
     * @generated from field: optional bool enabled = 1;
     */
    enabled?: boolean;
    /**
     * mode of verification. Default: GREEDY at temperature 0, COUPLED above it.
     *
     * @generated from field: outrider.v1.VerificationMode mode = 2;
     */
    mode: VerificationMode;
    /**
     * max_nodes bounds the drafted rows of one step. Default: the target's own; at most its max_rows - 1.
     *
     * @generated from field: optional uint32 max_nodes = 3;
     */
    maxNodes?: number;
    /**
     * corpus names a shared corpus for the draft to use. Default none.
     *
     * @generated from field: string corpus = 4;
     */
    corpus: string;
};
/**
 * Describes the message outrider.v1.SpeculationOptions.
 * Use `create(SpeculationOptionsSchema)` to create a new message.
 */
export declare const SpeculationOptionsSchema: GenMessage<SpeculationOptions>;
/**
 * GenerateResponse is one event of a generation.
 *
 * @generated from message outrider.v1.GenerateResponse
 */
export type GenerateResponse = Message<"outrider.v1.GenerateResponse"> & {
    /**
     * event is what happened: started once, then chunks, then finished once.
     *
     * @generated from oneof outrider.v1.GenerateResponse.event
     */
    event: {
        /**
         * started tells what was accepted.
         *
         * @generated from field: outrider.v1.GenerateStarted started = 1;
         */
        value: GenerateStarted;
        case: "started";
    } | {
        /**
         * chunk carries new tokens.
         *
         * @generated from field: outrider.v1.GenerateChunk chunk = 2;
         */
        value: GenerateChunk;
        case: "chunk";
    } | {
        /**
         * finished ends the stream.
         *
         * @generated from field: outrider.v1.GenerateFinished finished = 3;
         */
        value: GenerateFinished;
        case: "finished";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * timings of this event.
     *
     * @generated from field: outrider.v1.Timings timings = 4;
     */
    timings?: Timings;
};
/**
 * Describes the message outrider.v1.GenerateResponse.
 * Use `create(GenerateResponseSchema)` to create a new message.
 */
export declare const GenerateResponseSchema: GenMessage<GenerateResponse>;
/**
 * GenerateStarted tells what was accepted.
 *
 * @generated from message outrider.v1.GenerateStarted
 */
export type GenerateStarted = Message<"outrider.v1.GenerateStarted"> & {
    /**
     * sequence_id minted by the target.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * prompt_tokens after tokenising.
     *
     * @generated from field: uint32 prompt_tokens = 2;
     */
    promptTokens: number;
    /**
     * seed in force.
     *
     * @generated from field: fixed64 seed = 3;
     */
    seed: bigint;
    /**
     * mode of verification in force.
     *
     * @generated from field: outrider.v1.VerificationMode mode = 4;
     */
    mode: VerificationMode;
    /**
     * speculating says whether drafts are asked for.
     *
     * @generated from field: bool speculating = 5;
     */
    speculating: boolean;
    /**
     * model is the served model's name.
     *
     * @generated from field: string model = 6;
     */
    model: string;
};
/**
 * Describes the message outrider.v1.GenerateStarted.
 * Use `create(GenerateStartedSchema)` to create a new message.
 */
export declare const GenerateStartedSchema: GenMessage<GenerateStarted>;
/**
 * GenerateChunk carries the tokens of one step.
 *
 * @generated from message outrider.v1.GenerateChunk
 */
export type GenerateChunk = Message<"outrider.v1.GenerateChunk"> & {
    /**
     * token_ids committed by the step.
     *
     * @generated from field: repeated uint32 token_ids = 1;
     */
    tokenIds: number[];
    /**
     * text that is complete with these tokens. Text of a token can arrive with a later chunk, when it ends inside a
     * character or might begin a stop string.
     *
     * @generated from field: string text = 2;
     */
    text: string;
    /**
     * drafted_tokens says how many of token_ids, from the first, were accepted drafts. The last token of a step is
     * the model's own.
     *
     * @generated from field: uint32 drafted_tokens = 3;
     */
    draftedTokens: number;
    /**
     * logprobs, one per token, when asked for.
     *
     * @generated from field: repeated outrider.v1.TokenLogprobs logprobs = 4;
     */
    logprobs: TokenLogprobs[];
    /**
     * step that committed the tokens.
     *
     * @generated from field: uint64 step = 5;
     */
    step: bigint;
};
/**
 * Describes the message outrider.v1.GenerateChunk.
 * Use `create(GenerateChunkSchema)` to create a new message.
 */
export declare const GenerateChunkSchema: GenMessage<GenerateChunk>;
/**
 * TokenLogprobs are log-probabilities before penalties and filters.
 *
 * @generated from message outrider.v1.TokenLogprobs
 */
export type TokenLogprobs = Message<"outrider.v1.TokenLogprobs"> & {
    /**
     * logprob of the token itself.
     *
     * @generated from field: float logprob = 1;
     */
    logprob: number;
    /**
     * top alternatives, most probable first.
     *
     * @generated from field: repeated outrider.v1.TopLogprob top = 2;
     */
    top: TopLogprob[];
};
/**
 * Describes the message outrider.v1.TokenLogprobs.
 * Use `create(TokenLogprobsSchema)` to create a new message.
 */
export declare const TokenLogprobsSchema: GenMessage<TokenLogprobs>;
/**
 * TopLogprob is one alternative.
 *
 * @generated from message outrider.v1.TopLogprob
 */
export type TopLogprob = Message<"outrider.v1.TopLogprob"> & {
    /**
     * token_id of the alternative.
     *
     * @generated from field: uint32 token_id = 1;
     */
    tokenId: number;
    /**
     * logprob of the alternative.
     *
     * @generated from field: float logprob = 2;
     */
    logprob: number;
};
/**
 * Describes the message outrider.v1.TopLogprob.
 * Use `create(TopLogprobSchema)` to create a new message.
 */
export declare const TopLogprobSchema: GenMessage<TopLogprob>;
/**
 * GenerateFinished ends a generation.
 *
 * @generated from message outrider.v1.GenerateFinished
 */
export type GenerateFinished = Message<"outrider.v1.GenerateFinished"> & {
    /**
     * finish_reason says why.
     *
     * @generated from field: outrider.v1.FinishReason finish_reason = 1;
     */
    finishReason: FinishReason;
    /**
     * matched says which stop was met; set with FINISH_REASON_STOP and FINISH_REASON_END_OF_SEQUENCE.
     *
     * @generated from oneof outrider.v1.GenerateFinished.matched
     */
    matched: {
        /**
         * stop_token_id that ended the output. It is the last of the token ids, and not part of the text.
         *
         * @generated from field: uint32 stop_token_id = 2;
         */
        value: number;
        case: "stopTokenId";
    } | {
        /**
         * stop_string that ended the output. It is not part of the text.
         *
         * @generated from field: string stop_string = 3;
         */
        value: string;
        case: "stopString";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * usage counts tokens.
     *
     * @generated from field: outrider.v1.Usage usage = 4;
     */
    usage?: Usage;
    /**
     * speculation sums up what drafting did.
     *
     * @generated from field: outrider.v1.SpeculationTotals speculation = 5;
     */
    speculation?: SpeculationTotals;
    /**
     * times of the request.
     *
     * @generated from field: outrider.v1.RequestTimes times = 6;
     */
    times?: RequestTimes;
};
/**
 * Describes the message outrider.v1.GenerateFinished.
 * Use `create(GenerateFinishedSchema)` to create a new message.
 */
export declare const GenerateFinishedSchema: GenMessage<GenerateFinished>;
/**
 * Usage counts tokens.
 *
 * @generated from message outrider.v1.Usage
 */
export type Usage = Message<"outrider.v1.Usage"> & {
    /**
     * prompt_tokens read.
     *
     * @generated from field: uint32 prompt_tokens = 1;
     */
    promptTokens: number;
    /**
     * completion_tokens produced, the end token included.
     *
     * @generated from field: uint32 completion_tokens = 2;
     */
    completionTokens: number;
};
/**
 * Describes the message outrider.v1.Usage.
 * Use `create(UsageSchema)` to create a new message.
 */
export declare const UsageSchema: GenMessage<Usage>;
/**
 * SpeculationTotals sum up what drafting did for one request. Mean accepted length counting the target's own token
 * is completion_tokens / steps.
 *
 * @generated from message outrider.v1.SpeculationTotals
 */
export type SpeculationTotals = Message<"outrider.v1.SpeculationTotals"> & {
    /**
     * steps of verification, the one after prefill included.
     *
     * @generated from field: uint64 steps = 1;
     */
    steps: bigint;
    /**
     * drafted_steps had at least one drafted row.
     *
     * @generated from field: uint64 drafted_steps = 2;
     */
    draftedSteps: bigint;
    /**
     * drafted_tokens verified.
     *
     * @generated from field: uint64 drafted_tokens = 3;
     */
    draftedTokens: bigint;
    /**
     * accepted_tokens kept.
     *
     * @generated from field: uint64 accepted_tokens = 4;
     */
    acceptedTokens: bigint;
    /**
     * drafted_by_depth[d] counts steps whose tree reached depth d + 1.
     *
     * @generated from field: repeated uint64 drafted_by_depth = 5;
     */
    draftedByDepth: bigint[];
    /**
     * accepted_by_depth[d] counts steps that accepted a node at depth d + 1.
     *
     * @generated from field: repeated uint64 accepted_by_depth = 6;
     */
    acceptedByDepth: bigint[];
    /**
     * draft_wait_nanoseconds the request spent waiting for its draft.
     *
     * @generated from field: uint64 draft_wait_nanoseconds = 7;
     */
    draftWaitNanoseconds: bigint;
    /**
     * fallback_steps ran without a draft because it was late or down.
     *
     * @generated from field: uint64 fallback_steps = 8;
     */
    fallbackSteps: bigint;
};
/**
 * Describes the message outrider.v1.SpeculationTotals.
 * Use `create(SpeculationTotalsSchema)` to create a new message.
 */
export declare const SpeculationTotalsSchema: GenMessage<SpeculationTotals>;
/**
 * RequestTimes are the phases of one request.
 *
 * @generated from message outrider.v1.RequestTimes
 */
export type RequestTimes = Message<"outrider.v1.RequestTimes"> & {
    /**
     * queue_nanoseconds from arrival to the first prefill.
     *
     * @generated from field: uint64 queue_nanoseconds = 1;
     */
    queueNanoseconds: bigint;
    /**
     * prefill_nanoseconds from there to the first token.
     *
     * @generated from field: uint64 prefill_nanoseconds = 2;
     */
    prefillNanoseconds: bigint;
    /**
     * decode_nanoseconds from there to the last token.
     *
     * @generated from field: uint64 decode_nanoseconds = 3;
     */
    decodeNanoseconds: bigint;
};
/**
 * Describes the message outrider.v1.RequestTimes.
 * Use `create(RequestTimesSchema)` to create a new message.
 */
export declare const RequestTimesSchema: GenMessage<RequestTimes>;
/**
 * VerifyRequest is one frame from a client that drafts for itself.
 *
 * @generated from message outrider.v1.VerifyRequest
 */
export type VerifyRequest = Message<"outrider.v1.VerifyRequest"> & {
    /**
     * frame is what is asked.
     *
     * @generated from oneof outrider.v1.VerifyRequest.frame
     */
    frame: {
        /**
         * open starts a sequence.
         *
         * @generated from field: outrider.v1.OpenVerification open = 1;
         */
        value: OpenVerification;
        case: "open";
    } | {
        /**
         * tree asks for one step.
         *
         * @generated from field: outrider.v1.VerifyTree tree = 2;
         */
        value: VerifyTree;
        case: "tree";
    } | {
        /**
         * close ends a sequence.
         *
         * @generated from field: outrider.v1.CloseVerification close = 3;
         */
        value: CloseVerification;
        case: "close";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message outrider.v1.VerifyRequest.
 * Use `create(VerifyRequestSchema)` to create a new message.
 */
export declare const VerifyRequestSchema: GenMessage<VerifyRequest>;
/**
 * OpenVerification starts a sequence.
 *
 * @generated from message outrider.v1.OpenVerification
 */
export type OpenVerification = Message<"outrider.v1.OpenVerification"> & {
    /**
     * client_tag is echoed in opened, to tell several opens apart.
     *
     * @generated from field: uint64 client_tag = 1;
     */
    clientTag: bigint;
    /**
     * token_ids of the prompt, at least one. The last is the first root.
     *
     * @generated from field: repeated uint32 token_ids = 2;
     */
    tokenIds: number[];
    /**
     * sampling says how tokens are drawn.
     *
     * @generated from field: outrider.v1.SamplingParameters sampling = 3;
     */
    sampling?: SamplingParameters;
    /**
     * mode of verification. Default: GREEDY at temperature 0, COUPLED above it.
     *
     * @generated from field: outrider.v1.VerificationMode mode = 4;
     */
    mode: VerificationMode;
};
/**
 * Describes the message outrider.v1.OpenVerification.
 * Use `create(OpenVerificationSchema)` to create a new message.
 */
export declare const OpenVerificationSchema: GenMessage<OpenVerification>;
/**
 * VerifyTree asks for one step.
 *
 * @generated from message outrider.v1.VerifyTree
 */
export type VerifyTree = Message<"outrider.v1.VerifyTree"> & {
    /**
     * sequence_id from opened; NOT_FOUND when it is not open on this stream.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * step that this tree is for, as in opened or in the last verdict. The same step again returns the same verdict;
     * a lower one is ABORTED, a higher one FAILED_PRECONDITION.
     *
     * @generated from field: uint64 step = 2;
     */
    step: bigint;
    /**
     * tree to verify. Its root must be the last committed token; else FAILED_PRECONDITION.
     *
     * @generated from field: outrider.v1.TokenTree tree = 3;
     */
    tree?: TokenTree;
};
/**
 * Describes the message outrider.v1.VerifyTree.
 * Use `create(VerifyTreeSchema)` to create a new message.
 */
export declare const VerifyTreeSchema: GenMessage<VerifyTree>;
/**
 * CloseVerification ends a sequence.
 *
 * @generated from message outrider.v1.CloseVerification
 */
export type CloseVerification = Message<"outrider.v1.CloseVerification"> & {
    /**
     * sequence_id to end. An id that is not open is ignored.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
};
/**
 * Describes the message outrider.v1.CloseVerification.
 * Use `create(CloseVerificationSchema)` to create a new message.
 */
export declare const CloseVerificationSchema: GenMessage<CloseVerification>;
/**
 * VerifyResponse is one frame to a client that drafts for itself.
 *
 * @generated from message outrider.v1.VerifyResponse
 */
export type VerifyResponse = Message<"outrider.v1.VerifyResponse"> & {
    /**
     * frame is what happened.
     *
     * @generated from oneof outrider.v1.VerifyResponse.frame
     */
    frame: {
        /**
         * opened acknowledges an open.
         *
         * @generated from field: outrider.v1.VerificationOpened opened = 1;
         */
        value: VerificationOpened;
        case: "opened";
    } | {
        /**
         * verdict answers a tree.
         *
         * @generated from field: outrider.v1.Verdict verdict = 2;
         */
        value: Verdict;
        case: "verdict";
    } | {
        /**
         * status reports that one frame failed. Unless the sequence's engine failed, the sequence stays open.
         *
         * @generated from field: outrider.v1.VerificationStatus status = 3;
         */
        value: VerificationStatus;
        case: "status";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * timings of this frame.
     *
     * @generated from field: outrider.v1.Timings timings = 4;
     */
    timings?: Timings;
};
/**
 * Describes the message outrider.v1.VerifyResponse.
 * Use `create(VerifyResponseSchema)` to create a new message.
 */
export declare const VerifyResponseSchema: GenMessage<VerifyResponse>;
/**
 * VerificationOpened acknowledges an open.
 *
 * @generated from message outrider.v1.VerificationOpened
 */
export type VerificationOpened = Message<"outrider.v1.VerificationOpened"> & {
    /**
     * client_tag as in the open.
     *
     * @generated from field: uint64 client_tag = 1;
     */
    clientTag: bigint;
    /**
     * sequence_id minted by the target.
     *
     * @generated from field: uint64 sequence_id = 2;
     */
    sequenceId: bigint;
    /**
     * step that the first tree must carry.
     *
     * @generated from field: uint64 step = 3;
     */
    step: bigint;
    /**
     * seed in force, for clients that rank candidates by the shared noise.
     *
     * @generated from field: fixed64 seed = 4;
     */
    seed: bigint;
    /**
     * mode of verification in force.
     *
     * @generated from field: outrider.v1.VerificationMode mode = 5;
     */
    mode: VerificationMode;
    /**
     * max_rows a tree of this sequence may have, the root included.
     *
     * @generated from field: uint32 max_rows = 6;
     */
    maxRows: number;
};
/**
 * Describes the message outrider.v1.VerificationOpened.
 * Use `create(VerificationOpenedSchema)` to create a new message.
 */
export declare const VerificationOpenedSchema: GenMessage<VerificationOpened>;
/**
 * Verdict is the result of one step.
 *
 * @generated from message outrider.v1.Verdict
 */
export type Verdict = Message<"outrider.v1.Verdict"> & {
    /**
     * sequence_id that was verified.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * step that was verified.
     *
     * @generated from field: uint64 step = 2;
     */
    step: bigint;
    /**
     * accepted_rows of the tree, from the root's child down. Empty when none was.
     *
     * @generated from field: repeated uint32 accepted_rows = 3;
     */
    acceptedRows: number[];
    /**
     * token_ids committed: the accepted rows' tokens and the target's own next token. The last is the next root.
     * Shorter by what a stop cut off.
     *
     * @generated from field: repeated uint32 token_ids = 4;
     */
    tokenIds: number[];
    /**
     * next_step that the next tree must carry.
     *
     * @generated from field: uint64 next_step = 5;
     */
    nextStep: bigint;
    /**
     * finish_reason when the sequence ended.
     *
     * @generated from field: outrider.v1.FinishReason finish_reason = 6;
     */
    finishReason: FinishReason;
    /**
     * logprobs, one per token, when asked for.
     *
     * @generated from field: repeated outrider.v1.TokenLogprobs logprobs = 7;
     */
    logprobs: TokenLogprobs[];
};
/**
 * Describes the message outrider.v1.Verdict.
 * Use `create(VerdictSchema)` to create a new message.
 */
export declare const VerdictSchema: GenMessage<Verdict>;
/**
 * VerificationStatus reports that a frame failed.
 *
 * @generated from message outrider.v1.VerificationStatus
 */
export type VerificationStatus = Message<"outrider.v1.VerificationStatus"> & {
    /**
     * sequence_id the frame named; 0 for an open that failed.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * client_tag of an open that failed.
     *
     * @generated from field: uint64 client_tag = 2;
     */
    clientTag: bigint;
    /**
     * step the frame carried.
     *
     * @generated from field: uint64 step = 3;
     */
    step: bigint;
    /**
     * status is the reason, with google.rpc.ErrorInfo and, for bad input, google.rpc.BadRequest details.
     *
     * @generated from field: google.rpc.Status status = 4;
     */
    status?: Status;
};
/**
 * Describes the message outrider.v1.VerificationStatus.
 * Use `create(VerificationStatusSchema)` to create a new message.
 */
export declare const VerificationStatusSchema: GenMessage<VerificationStatus>;
/**
 * GetTargetInfoRequest asks what is served.
 *
 * @generated from message outrider.v1.GetTargetInfoRequest
 */
export type GetTargetInfoRequest = Message<"outrider.v1.GetTargetInfoRequest"> & {};
/**
 * Describes the message outrider.v1.GetTargetInfoRequest.
 * Use `create(GetTargetInfoRequestSchema)` to create a new message.
 */
export declare const GetTargetInfoRequestSchema: GenMessage<GetTargetInfoRequest>;
/**
 * GetTargetInfoResponse describes the target.
 *
 * @generated from message outrider.v1.GetTargetInfoResponse
 */
export type GetTargetInfoResponse = Message<"outrider.v1.GetTargetInfoResponse"> & {
    /**
     * model is the served model's name.
     *
     * @generated from field: string model = 1;
     */
    model: string;
    /**
     * vocabulary_size that every token id is below.
     *
     * @generated from field: uint32 vocabulary_size = 2;
     */
    vocabularySize: number;
    /**
     * tokenizer_fingerprint is the SHA-256 of the tokenizer, in hex.
     *
     * @generated from field: string tokenizer_fingerprint = 3;
     */
    tokenizerFingerprint: string;
    /**
     * max_context of a sequence, in tokens, prompt and output together.
     *
     * @generated from field: uint32 max_context = 4;
     */
    maxContext: number;
    /**
     * max_rows of a tree, the root included.
     *
     * @generated from field: uint32 max_rows = 5;
     */
    maxRows: number;
    /**
     * dtype of the model, for example "float32".
     *
     * @generated from field: string dtype = 6;
     */
    dtype: string;
    /**
     * page_size of the KV cache, in tokens.
     *
     * @generated from field: uint32 page_size = 7;
     */
    pageSize: number;
    /**
     * kv_tokens that fit into the KV cache.
     *
     * @generated from field: uint64 kv_tokens = 8;
     */
    kvTokens: bigint;
    /**
     * modes of verification on offer.
     *
     * @generated from field: repeated outrider.v1.VerificationMode modes = 9;
     */
    modes: VerificationMode[];
    /**
     * drafter that the target uses; empty when it has none.
     *
     * @generated from field: string drafter = 10;
     */
    drafter: string;
    /**
     * end_token_ids of the model.
     *
     * @generated from field: repeated uint32 end_token_ids = 11;
     */
    endTokenIds: number[];
    /**
     * version of the software.
     *
     * @generated from field: string version = 12;
     */
    version: string;
};
/**
 * Describes the message outrider.v1.GetTargetInfoResponse.
 * Use `create(GetTargetInfoResponseSchema)` to create a new message.
 */
export declare const GetTargetInfoResponseSchema: GenMessage<GetTargetInfoResponse>;
/**
 * FinishReason says why a sequence ended.
 *
 * @generated from enum outrider.v1.FinishReason
 */
export declare enum FinishReason {
    /**
     * FINISH_REASON_UNSPECIFIED means that it has not ended.
     *
     * @generated from enum value: FINISH_REASON_UNSPECIFIED = 0;
     */
    UNSPECIFIED = 0,
    /**
     * FINISH_REASON_END_OF_SEQUENCE means that the model produced its end token.
     *
     * @generated from enum value: FINISH_REASON_END_OF_SEQUENCE = 1;
     */
    END_OF_SEQUENCE = 1,
    /**
     * FINISH_REASON_STOP means that a stop string or stop token id was met.
     *
     * @generated from enum value: FINISH_REASON_STOP = 2;
     */
    STOP = 2,
    /**
     * FINISH_REASON_LENGTH means that max_tokens, or the model's context, was reached.
     *
     * @generated from enum value: FINISH_REASON_LENGTH = 3;
     */
    LENGTH = 3
}
/**
 * Describes the enum outrider.v1.FinishReason.
 */
export declare const FinishReasonSchema: GenEnum<FinishReason>;
/**
 * TargetService generates text, and verifies trees for clients that draft for themselves.
 *
 * @generated from service outrider.v1.TargetService
 */
export declare const TargetService: GenService<{
    /**
     * Generate streams the continuation of a prompt. Cancelling the call ends the request and frees what it held.
     * RESOURCE_EXHAUSTED when the queue is full, UNAVAILABLE while draining.
     *
     * @generated from rpc outrider.v1.TargetService.Generate
     */
    generate: {
        methodKind: "server_streaming";
        input: typeof GenerateRequestSchema;
        output: typeof GenerateResponseSchema;
    };
    /**
     * Verify checks trees that the client drafts. One stream carries many sequences; they share batches with
     * Generate's. A stream that ends without close frames aborts its sequences.
     *
     * @generated from rpc outrider.v1.TargetService.Verify
     */
    verify: {
        methodKind: "bidi_streaming";
        input: typeof VerifyRequestSchema;
        output: typeof VerifyResponseSchema;
    };
    /**
     * GetTargetInfo says which model is served, and within which limits.
     *
     * @generated from rpc outrider.v1.TargetService.GetTargetInfo
     */
    getTargetInfo: {
        methodKind: "unary";
        input: typeof GetTargetInfoRequestSchema;
        output: typeof GetTargetInfoResponseSchema;
    };
}>;
