import type { GenFile, GenMessage, GenService } from "@bufbuild/protobuf/codegenv2";
import type { Status } from "../../google/rpc/status_pb.js";
import type { DraftDistribution, SamplingParameters, Tensor, Tensor_DType, Timings, VerificationMode } from "./tree_pb.js";
import type { Message } from "@bufbuild/protobuf";
/**
 * Describes the file outrider/v1/draft.proto.
 */
export declare const file_outrider_v1_draft: GenFile;
/**
 * ProposeRequest is one frame from the target.
 *
 * @generated from message outrider.v1.ProposeRequest
 */
export type ProposeRequest = Message<"outrider.v1.ProposeRequest"> & {
    /**
     * frame is what happened.
     *
     * @generated from oneof outrider.v1.ProposeRequest.frame
     */
    frame: {
        /**
         * open starts a sequence on this stream.
         *
         * @generated from field: outrider.v1.OpenSequence open = 1;
         */
        value: OpenSequence;
        case: "open";
    } | {
        /**
         * advance tells what one step committed, for every sequence that ran in it.
         *
         * @generated from field: outrider.v1.AdvanceSequences advance = 2;
         */
        value: AdvanceSequences;
        case: "advance";
    } | {
        /**
         * close ends sequences. Ids that are not open are ignored.
         *
         * @generated from field: outrider.v1.CloseSequences close = 3;
         */
        value: CloseSequences;
        case: "close";
    } | {
        /**
         * credit lets the draft send more frames.
         *
         * @generated from field: outrider.v1.Credit credit = 4;
         */
        value: Credit;
        case: "credit";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message outrider.v1.ProposeRequest.
 * Use `create(ProposeRequestSchema)` to create a new message.
 */
export declare const ProposeRequestSchema: GenMessage<ProposeRequest>;
/**
 * ProposeResponse is one frame from the draft.
 *
 * @generated from message outrider.v1.ProposeResponse
 */
export type ProposeResponse = Message<"outrider.v1.ProposeResponse"> & {
    /**
     * frame is what happened.
     *
     * @generated from oneof outrider.v1.ProposeResponse.frame
     */
    frame: {
        /**
         * opened acknowledges an open.
         *
         * @generated from field: outrider.v1.SequenceOpened opened = 1;
         */
        value: SequenceOpened;
        case: "opened";
    } | {
        /**
         * growth adds nodes to the trees of one or more sequences.
         *
         * @generated from field: outrider.v1.GrowSequences growth = 2;
         */
        value: GrowSequences;
        case: "growth";
    } | {
        /**
         * status reports that one sequence failed. The sequence is closed; the stream and its other sequences go on.
         *
         * @generated from field: outrider.v1.SequenceStatus status = 3;
         */
        value: SequenceStatus;
        case: "status";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * timings of the draft: queueing before, and computing of, this frame.
     *
     * @generated from field: outrider.v1.Timings timings = 4;
     */
    timings?: Timings;
};
/**
 * Describes the message outrider.v1.ProposeResponse.
 * Use `create(ProposeResponseSchema)` to create a new message.
 */
export declare const ProposeResponseSchema: GenMessage<ProposeResponse>;
/**
 * OpenSequence starts a sequence, or resumes one after a reconnect.
 *
 * @generated from message outrider.v1.OpenSequence
 */
export type OpenSequence = Message<"outrider.v1.OpenSequence"> & {
    /**
     * sequence_id is minted by the target and unique on this stream. ALREADY_EXISTS when open.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * tenant owns what is learnt from this sequence. Default "default"; at most 64 characters of [A-Za-z0-9._-].
     *
     * @generated from field: string tenant = 2;
     */
    tenant: string;
    /**
     * corpus names a shared corpus to draft from beside the tenant's own. Default none; NOT_FOUND when unknown.
     *
     * @generated from field: string corpus = 3;
     */
    corpus: string;
    /**
     * token_ids is the prompt and every committed token. At least one, each below the vocabulary size; OUT_OF_RANGE
     * past the draft's max_context.
     *
     * @generated from field: repeated uint32 token_ids = 4;
     */
    tokenIds: number[];
    /**
     * prompt_length says how many of token_ids are prompt. 1 <= prompt_length <= len(token_ids).
     *
     * @generated from field: uint32 prompt_length = 5;
     */
    promptLength: number;
    /**
     * step is the sequence's step so far: 0 for a new one. The first advance must carry step + 1.
     *
     * @generated from field: uint64 step = 6;
     */
    step: bigint;
    /**
     * seed is the request's seed, for drafters that rank candidates by the shared noise in COUPLED mode.
     *
     * @generated from field: fixed64 seed = 7;
     */
    seed: bigint;
    /**
     * mode is how the target will verify.
     *
     * @generated from field: outrider.v1.VerificationMode mode = 8;
     */
    mode: VerificationMode;
    /**
     * sampling is what a drafter may use to shape its candidates. Drafters are free to ignore it.
     *
     * @generated from field: outrider.v1.SamplingParameters sampling = 9;
     */
    sampling?: SamplingParameters;
    /**
     * limits bound every tree of this sequence.
     *
     * @generated from field: outrider.v1.TreeLimits limits = 10;
     */
    limits?: TreeLimits;
    /**
     * vocabulary_size of the target. FAILED_PRECONDITION when the draft's differs.
     *
     * @generated from field: uint32 vocabulary_size = 11;
     */
    vocabularySize: number;
    /**
     * traceparent is the W3C trace context of the request, for a span link. Default none.
     *
     * @generated from field: string traceparent = 12;
     */
    traceparent: string;
};
/**
 * Describes the message outrider.v1.OpenSequence.
 * Use `create(OpenSequenceSchema)` to create a new message.
 */
export declare const OpenSequenceSchema: GenMessage<OpenSequence>;
/**
 * TreeLimits bound the live tree of a sequence. Zero asks for the draft's own default.
 *
 * @generated from message outrider.v1.TreeLimits
 */
export type TreeLimits = Message<"outrider.v1.TreeLimits"> & {
    /**
     * max_nodes is how many nodes below the root are of use. At most 255.
     *
     * @generated from field: uint32 max_nodes = 1;
     */
    maxNodes: number;
    /**
     * max_depth is how many nodes a path may have below the root.
     *
     * @generated from field: uint32 max_depth = 2;
     */
    maxDepth: number;
};
/**
 * Describes the message outrider.v1.TreeLimits.
 * Use `create(TreeLimitsSchema)` to create a new message.
 */
export declare const TreeLimitsSchema: GenMessage<TreeLimits>;
/**
 * SequenceOpened acknowledges an open.
 *
 * @generated from message outrider.v1.SequenceOpened
 */
export type SequenceOpened = Message<"outrider.v1.SequenceOpened"> & {
    /**
     * sequence_id as in the open.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * limits that the draft will keep.
     *
     * @generated from field: outrider.v1.TreeLimits limits = 2;
     */
    limits?: TreeLimits;
};
/**
 * Describes the message outrider.v1.SequenceOpened.
 * Use `create(SequenceOpenedSchema)` to create a new message.
 */
export declare const SequenceOpenedSchema: GenMessage<SequenceOpened>;
/**
 * AdvanceSequences tells what one engine step committed.
 *
 * @generated from message outrider.v1.AdvanceSequences
 */
export type AdvanceSequences = Message<"outrider.v1.AdvanceSequences"> & {
    /**
     * sequences that ran in the step.
     *
     * @generated from field: repeated outrider.v1.SequenceAdvance sequences = 1;
     */
    sequences: SequenceAdvance[];
};
/**
 * Describes the message outrider.v1.AdvanceSequences.
 * Use `create(AdvanceSequencesSchema)` to create a new message.
 */
export declare const AdvanceSequencesSchema: GenMessage<AdvanceSequences>;
/**
 * SequenceAdvance moves one sequence's root.
 *
 * @generated from message outrider.v1.SequenceAdvance
 */
export type SequenceAdvance = Message<"outrider.v1.SequenceAdvance"> & {
    /**
     * sequence_id of an open sequence; NOT_FOUND otherwise.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * step after this commit. The same step again is ignored (idempotent), a lower one is ABORTED, a step that skips
     * one is FAILED_PRECONDITION.
     *
     * @generated from field: uint64 step = 2;
     */
    step: bigint;
    /**
     * token_ids that the step committed, at least one. The last is the new root.
     *
     * @generated from field: repeated uint32 token_ids = 3;
     */
    tokenIds: number[];
    /**
     * features is one vector per committed token ([len(token_ids), width]), when the drafter asked for them.
     *
     * @generated from field: outrider.v1.Tensor features = 4;
     */
    features?: Tensor;
};
/**
 * Describes the message outrider.v1.SequenceAdvance.
 * Use `create(SequenceAdvanceSchema)` to create a new message.
 */
export declare const SequenceAdvanceSchema: GenMessage<SequenceAdvance>;
/**
 * CloseSequences ends sequences.
 *
 * @generated from message outrider.v1.CloseSequences
 */
export type CloseSequences = Message<"outrider.v1.CloseSequences"> & {
    /**
     * sequence_ids to end.
     *
     * @generated from field: repeated uint64 sequence_ids = 1;
     */
    sequenceIds: bigint[];
};
/**
 * Describes the message outrider.v1.CloseSequences.
 * Use `create(CloseSequencesSchema)` to create a new message.
 */
export declare const CloseSequencesSchema: GenMessage<CloseSequences>;
/**
 * Credit lets the draft send this many more growth frames. A draft that sends more is cut off.
 *
 * @generated from message outrider.v1.Credit
 */
export type Credit = Message<"outrider.v1.Credit"> & {
    /**
     * frames is added to what is left. At most 1024 may be outstanding.
     *
     * @generated from field: uint32 frames = 1;
     */
    frames: number;
};
/**
 * Describes the message outrider.v1.Credit.
 * Use `create(CreditSchema)` to create a new message.
 */
export declare const CreditSchema: GenMessage<Credit>;
/**
 * GrowSequences adds nodes to trees.
 *
 * @generated from message outrider.v1.GrowSequences
 */
export type GrowSequences = Message<"outrider.v1.GrowSequences"> & {
    /**
     * sequences whose trees grow.
     *
     * @generated from field: repeated outrider.v1.SequenceGrowth sequences = 1;
     */
    sequences: SequenceGrowth[];
};
/**
 * Describes the message outrider.v1.GrowSequences.
 * Use `create(GrowSequencesSchema)` to create a new message.
 */
export declare const GrowSequencesSchema: GenMessage<GrowSequences>;
/**
 * SequenceGrowth adds nodes to one tree. Node ids are stable: they keep their meaning across advances, so growth
 * that crosses an advance on the wire is attached below the new root or dropped, never misread.
 *
 * @generated from message outrider.v1.SequenceGrowth
 */
export type SequenceGrowth = Message<"outrider.v1.SequenceGrowth"> & {
    /**
     * sequence_id of an open sequence.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * base_step is the step the draft had seen when it grew the tree.
     *
     * @generated from field: uint64 base_step = 2;
     */
    baseStep: bigint;
    /**
     * first_node_id is the id of the first node; the others follow it one by one. Ids start at 1, grow over the life
     * of the sequence, and are never used twice.
     *
     * @generated from field: uint32 first_node_id = 3;
     */
    firstNodeId: number;
    /**
     * parent_ids[i] is the id of an earlier node, or 0 for the root at base_step.
     *
     * @generated from field: repeated uint32 parent_ids = 4;
     */
    parentIds: number[];
    /**
     * token_ids[i] is node i's token. A token that its parent already has as a child gives that child a second id and
     * the new score.
     *
     * @generated from field: repeated uint32 token_ids = 5;
     */
    tokenIds: number[];
    /**
     * scores[i] is the probability, in [0, 1], that the node is accepted given that its parent is.
     *
     * @generated from field: repeated float scores = 6;
     */
    scores: number[];
    /**
     * distributions are sent in VERIFICATION_MODE_REJECTION by drafters that draw their nodes; parent is a node id.
     *
     * @generated from field: repeated outrider.v1.DraftDistribution distributions = 7;
     */
    distributions: DraftDistribution[];
    /**
     * replaces drops every node of the sequence's tree that this growth does not name again.
     *
     * @generated from field: bool replaces = 8;
     */
    replaces: boolean;
};
/**
 * Describes the message outrider.v1.SequenceGrowth.
 * Use `create(SequenceGrowthSchema)` to create a new message.
 */
export declare const SequenceGrowthSchema: GenMessage<SequenceGrowth>;
/**
 * SequenceStatus reports the failure of one sequence.
 *
 * @generated from message outrider.v1.SequenceStatus
 */
export type SequenceStatus = Message<"outrider.v1.SequenceStatus"> & {
    /**
     * sequence_id that failed.
     *
     * @generated from field: uint64 sequence_id = 1;
     */
    sequenceId: bigint;
    /**
     * status is the reason, with google.rpc.ErrorInfo and, for bad input, google.rpc.BadRequest details.
     *
     * @generated from field: google.rpc.Status status = 2;
     */
    status?: Status;
};
/**
 * Describes the message outrider.v1.SequenceStatus.
 * Use `create(SequenceStatusSchema)` to create a new message.
 */
export declare const SequenceStatusSchema: GenMessage<SequenceStatus>;
/**
 * GetDraftInfoRequest asks what the service drafts with.
 *
 * @generated from message outrider.v1.GetDraftInfoRequest
 */
export type GetDraftInfoRequest = Message<"outrider.v1.GetDraftInfoRequest"> & {};
/**
 * Describes the message outrider.v1.GetDraftInfoRequest.
 * Use `create(GetDraftInfoRequestSchema)` to create a new message.
 */
export declare const GetDraftInfoRequestSchema: GenMessage<GetDraftInfoRequest>;
/**
 * GetDraftInfoResponse describes the drafter.
 *
 * @generated from message outrider.v1.GetDraftInfoResponse
 */
export type GetDraftInfoResponse = Message<"outrider.v1.GetDraftInfoResponse"> & {
    /**
     * drafter is its registered name, for example "trie".
     *
     * @generated from field: string drafter = 1;
     */
    drafter: string;
    /**
     * vocabulary_size its token ids are below; 0 when it takes any vocabulary.
     *
     * @generated from field: uint32 vocabulary_size = 2;
     */
    vocabularySize: number;
    /**
     * tokenizer_fingerprint is the SHA-256 of the tokenizer it was made for, in hex; empty when it takes any.
     *
     * @generated from field: string tokenizer_fingerprint = 3;
     */
    tokenizerFingerprint: string;
    /**
     * limits it keeps.
     *
     * @generated from field: outrider.v1.TreeLimits limits = 4;
     */
    limits?: TreeLimits;
    /**
     * max_context is the longest sequence it follows, in tokens.
     *
     * @generated from field: uint32 max_context = 5;
     */
    maxContext: number;
    /**
     * features it wants with every advance; not set when it wants none.
     *
     * @generated from field: outrider.v1.FeatureRequest features = 6;
     */
    features?: FeatureRequest;
    /**
     * version of the software.
     *
     * @generated from field: string version = 7;
     */
    version: string;
};
/**
 * Describes the message outrider.v1.GetDraftInfoResponse.
 * Use `create(GetDraftInfoResponseSchema)` to create a new message.
 */
export declare const GetDraftInfoResponseSchema: GenMessage<GetDraftInfoResponse>;
/**
 * FeatureRequest names the hidden states a drafter wants from the target.
 *
 * @generated from message outrider.v1.FeatureRequest
 */
export type FeatureRequest = Message<"outrider.v1.FeatureRequest"> & {
    /**
     * layers are the target's decoder layers whose outputs are wanted, counted from 0.
     *
     * @generated from field: repeated uint32 layers = 1;
     */
    layers: number[];
    /**
     * width of one vector on the wire.
     *
     * @generated from field: uint32 width = 2;
     */
    width: number;
    /**
     * dtype on the wire.
     *
     * @generated from field: outrider.v1.Tensor.DType dtype = 3;
     */
    dtype: Tensor_DType;
    /**
     * projected says that the target applies the head's projection and sends one vector of this width per token.
     *
     * @generated from field: bool projected = 4;
     */
    projected: boolean;
};
/**
 * Describes the message outrider.v1.FeatureRequest.
 * Use `create(FeatureRequestSchema)` to create a new message.
 */
export declare const FeatureRequestSchema: GenMessage<FeatureRequest>;
/**
 * AddCorpusRequest carries a piece of a corpus. The first message of a stream names the tenant.
 *
 * @generated from message outrider.v1.AddCorpusRequest
 */
export type AddCorpusRequest = Message<"outrider.v1.AddCorpusRequest"> & {
    /**
     * tenant that owns the corpus. Read from the first message; default "default".
     *
     * @generated from field: string tenant = 1;
     */
    tenant: string;
    /**
     * corpus names a shared corpus. Read from the first message; empty adds to the tenant's own trie.
     *
     * @generated from field: string corpus = 2;
     */
    corpus: string;
    /**
     * token_ids of one document, or of one piece of it. At most 65536 a message.
     *
     * @generated from field: repeated uint32 token_ids = 3;
     */
    tokenIds: number[];
};
/**
 * Describes the message outrider.v1.AddCorpusRequest.
 * Use `create(AddCorpusRequestSchema)` to create a new message.
 */
export declare const AddCorpusRequestSchema: GenMessage<AddCorpusRequest>;
/**
 * AddCorpusResponse says what was learnt.
 *
 * @generated from message outrider.v1.AddCorpusResponse
 */
export type AddCorpusResponse = Message<"outrider.v1.AddCorpusResponse"> & {
    /**
     * tokens added.
     *
     * @generated from field: uint64 tokens = 1;
     */
    tokens: bigint;
    /**
     * nodes in the trie now.
     *
     * @generated from field: uint64 nodes = 2;
     */
    nodes: bigint;
};
/**
 * Describes the message outrider.v1.AddCorpusResponse.
 * Use `create(AddCorpusResponseSchema)` to create a new message.
 */
export declare const AddCorpusResponseSchema: GenMessage<AddCorpusResponse>;
/**
 * DraftService proposes continuations of sequences that a target service owns.
 *
 * @generated from service outrider.v1.DraftService
 */
export declare const DraftService: GenService<{
    /**
     * Propose carries all sequences of one target worker over one stream. The target opens sequences, advances them
     * as it commits tokens, and closes them; the draft answers each open and each advance with one growth (possibly
     * empty) and may send more when it knows more. A stream that ends without close frames aborts its sequences.
     *
     * @generated from rpc outrider.v1.DraftService.Propose
     */
    propose: {
        methodKind: "bidi_streaming";
        input: typeof ProposeRequestSchema;
        output: typeof ProposeResponseSchema;
    };
    /**
     * GetDraftInfo says what this service drafts with and for which vocabulary.
     *
     * @generated from rpc outrider.v1.DraftService.GetDraftInfo
     */
    getDraftInfo: {
        methodKind: "unary";
        input: typeof GetDraftInfoRequestSchema;
        output: typeof GetDraftInfoResponseSchema;
    };
    /**
     * AddCorpus teaches a tenant's trie documents or past outputs. FAILED_PRECONDITION where the drafter has no trie,
     * RESOURCE_EXHAUSTED past the tenant's quota (what fitted is kept).
     *
     * @generated from rpc outrider.v1.DraftService.AddCorpus
     */
    addCorpus: {
        methodKind: "client_streaming";
        input: typeof AddCorpusRequestSchema;
        output: typeof AddCorpusResponseSchema;
    };
}>;
