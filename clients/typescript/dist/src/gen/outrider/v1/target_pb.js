// The target service: it runs the model, verifies token trees, and streams accepted tokens.
import { enumDesc, fileDesc, messageDesc, serviceDesc } from "@bufbuild/protobuf/codegenv2";
import { file_google_rpc_status } from "../../google/rpc/status_pb.js";
import { file_outrider_v1_tree } from "./tree_pb.js";
/**
 * Describes the file outrider/v1/target.proto.
 */
export const file_outrider_v1_target = /*@__PURE__*/ fileDesc("ChhvdXRyaWRlci92MS90YXJnZXQucHJvdG8SC291dHJpZGVyLnYxIvUBCg9HZW5lcmF0ZVJlcXVlc3QSDQoFbW9kZWwYASABKAkSDgoEdGV4dBgCIAEoCUgAEiYKBGNoYXQYAyABKAsyFi5vdXRyaWRlci52MS5DaGF0SW5wdXRIABIpCgZ0b2tlbnMYBCABKAsyFy5vdXRyaWRlci52MS5Ub2tlbklucHV0SAASMQoIc2FtcGxpbmcYBSABKAsyHy5vdXRyaWRlci52MS5TYW1wbGluZ1BhcmFtZXRlcnMSNAoLc3BlY3VsYXRpb24YBiABKAsyHy5vdXRyaWRlci52MS5TcGVjdWxhdGlvbk9wdGlvbnNCBwoFaW5wdXQiNwoJQ2hhdElucHV0EioKCG1lc3NhZ2VzGAEgAygLMhgub3V0cmlkZXIudjEuQ2hhdE1lc3NhZ2UiLAoLQ2hhdE1lc3NhZ2USDAoEcm9sZRgBIAEoCRIPCgdjb250ZW50GAIgASgJIh8KClRva2VuSW5wdXQSEQoJdG9rZW5faWRzGAEgAygNIpkBChJTcGVjdWxhdGlvbk9wdGlvbnMSFAoHZW5hYmxlZBgBIAEoCEgAiAEBEisKBG1vZGUYAiABKA4yHS5vdXRyaWRlci52MS5WZXJpZmljYXRpb25Nb2RlEhYKCW1heF9ub2RlcxgDIAEoDUgBiAEBEg4KBmNvcnB1cxgEIAEoCUIKCghfZW5hYmxlZEIMCgpfbWF4X25vZGVzItMBChBHZW5lcmF0ZVJlc3BvbnNlEi8KB3N0YXJ0ZWQYASABKAsyHC5vdXRyaWRlci52MS5HZW5lcmF0ZVN0YXJ0ZWRIABIrCgVjaHVuaxgCIAEoCzIaLm91dHJpZGVyLnYxLkdlbmVyYXRlQ2h1bmtIABIxCghmaW5pc2hlZBgDIAEoCzIdLm91dHJpZGVyLnYxLkdlbmVyYXRlRmluaXNoZWRIABIlCgd0aW1pbmdzGAQgASgLMhQub3V0cmlkZXIudjEuVGltaW5nc0IHCgVldmVudCKcAQoPR2VuZXJhdGVTdGFydGVkEhMKC3NlcXVlbmNlX2lkGAEgASgEEhUKDXByb21wdF90b2tlbnMYAiABKA0SDAoEc2VlZBgDIAEoBhIrCgRtb2RlGAQgASgOMh0ub3V0cmlkZXIudjEuVmVyaWZpY2F0aW9uTW9kZRITCgtzcGVjdWxhdGluZxgFIAEoCBINCgVtb2RlbBgGIAEoCSKEAQoNR2VuZXJhdGVDaHVuaxIRCgl0b2tlbl9pZHMYASADKA0SDAoEdGV4dBgCIAEoCRIWCg5kcmFmdGVkX3Rva2VucxgDIAEoDRIsCghsb2dwcm9icxgEIAMoCzIaLm91dHJpZGVyLnYxLlRva2VuTG9ncHJvYnMSDAoEc3RlcBgFIAEoBCJGCg1Ub2tlbkxvZ3Byb2JzEg8KB2xvZ3Byb2IYASABKAISJAoDdG9wGAIgAygLMhcub3V0cmlkZXIudjEuVG9wTG9ncHJvYiIvCgpUb3BMb2dwcm9iEhAKCHRva2VuX2lkGAEgASgNEg8KB2xvZ3Byb2IYAiABKAIigQIKEEdlbmVyYXRlRmluaXNoZWQSMAoNZmluaXNoX3JlYXNvbhgBIAEoDjIZLm91dHJpZGVyLnYxLkZpbmlzaFJlYXNvbhIXCg1zdG9wX3Rva2VuX2lkGAIgASgNSAASFQoLc3RvcF9zdHJpbmcYAyABKAlIABIhCgV1c2FnZRgEIAEoCzISLm91dHJpZGVyLnYxLlVzYWdlEjMKC3NwZWN1bGF0aW9uGAUgASgLMh4ub3V0cmlkZXIudjEuU3BlY3VsYXRpb25Ub3RhbHMSKAoFdGltZXMYBiABKAsyGS5vdXRyaWRlci52MS5SZXF1ZXN0VGltZXNCCQoHbWF0Y2hlZCI5CgVVc2FnZRIVCg1wcm9tcHRfdG9rZW5zGAEgASgNEhkKEWNvbXBsZXRpb25fdG9rZW5zGAIgASgNItcBChFTcGVjdWxhdGlvblRvdGFscxINCgVzdGVwcxgBIAEoBBIVCg1kcmFmdGVkX3N0ZXBzGAIgASgEEhYKDmRyYWZ0ZWRfdG9rZW5zGAMgASgEEhcKD2FjY2VwdGVkX3Rva2VucxgEIAEoBBIYChBkcmFmdGVkX2J5X2RlcHRoGAUgAygEEhkKEWFjY2VwdGVkX2J5X2RlcHRoGAYgAygEEh4KFmRyYWZ0X3dhaXRfbmFub3NlY29uZHMYByABKAQSFgoOZmFsbGJhY2tfc3RlcHMYCCABKAQiYgoMUmVxdWVzdFRpbWVzEhkKEXF1ZXVlX25hbm9zZWNvbmRzGAEgASgEEhsKE3ByZWZpbGxfbmFub3NlY29uZHMYAiABKAQSGgoSZGVjb2RlX25hbm9zZWNvbmRzGAMgASgEIqEBCg1WZXJpZnlSZXF1ZXN0Ei0KBG9wZW4YASABKAsyHS5vdXRyaWRlci52MS5PcGVuVmVyaWZpY2F0aW9uSAASJwoEdHJlZRgCIAEoCzIXLm91dHJpZGVyLnYxLlZlcmlmeVRyZWVIABIvCgVjbG9zZRgDIAEoCzIeLm91dHJpZGVyLnYxLkNsb3NlVmVyaWZpY2F0aW9uSABCBwoFZnJhbWUimQEKEE9wZW5WZXJpZmljYXRpb24SEgoKY2xpZW50X3RhZxgBIAEoBBIRCgl0b2tlbl9pZHMYAiADKA0SMQoIc2FtcGxpbmcYAyABKAsyHy5vdXRyaWRlci52MS5TYW1wbGluZ1BhcmFtZXRlcnMSKwoEbW9kZRgEIAEoDjIdLm91dHJpZGVyLnYxLlZlcmlmaWNhdGlvbk1vZGUiVQoKVmVyaWZ5VHJlZRITCgtzZXF1ZW5jZV9pZBgBIAEoBBIMCgRzdGVwGAIgASgEEiQKBHRyZWUYAyABKAsyFi5vdXRyaWRlci52MS5Ub2tlblRyZWUiKAoRQ2xvc2VWZXJpZmljYXRpb24SEwoLc2VxdWVuY2VfaWQYASABKAQizwEKDlZlcmlmeVJlc3BvbnNlEjEKBm9wZW5lZBgBIAEoCzIfLm91dHJpZGVyLnYxLlZlcmlmaWNhdGlvbk9wZW5lZEgAEicKB3ZlcmRpY3QYAiABKAsyFC5vdXRyaWRlci52MS5WZXJkaWN0SAASMQoGc3RhdHVzGAMgASgLMh8ub3V0cmlkZXIudjEuVmVyaWZpY2F0aW9uU3RhdHVzSAASJQoHdGltaW5ncxgEIAEoCzIULm91dHJpZGVyLnYxLlRpbWluZ3NCBwoFZnJhbWUimAEKElZlcmlmaWNhdGlvbk9wZW5lZBISCgpjbGllbnRfdGFnGAEgASgEEhMKC3NlcXVlbmNlX2lkGAIgASgEEgwKBHN0ZXAYAyABKAQSDAoEc2VlZBgEIAEoBhIrCgRtb2RlGAUgASgOMh0ub3V0cmlkZXIudjEuVmVyaWZpY2F0aW9uTW9kZRIQCghtYXhfcm93cxgGIAEoDSLJAQoHVmVyZGljdBITCgtzZXF1ZW5jZV9pZBgBIAEoBBIMCgRzdGVwGAIgASgEEhUKDWFjY2VwdGVkX3Jvd3MYAyADKA0SEQoJdG9rZW5faWRzGAQgAygNEhEKCW5leHRfc3RlcBgFIAEoBBIwCg1maW5pc2hfcmVhc29uGAYgASgOMhkub3V0cmlkZXIudjEuRmluaXNoUmVhc29uEiwKCGxvZ3Byb2JzGAcgAygLMhoub3V0cmlkZXIudjEuVG9rZW5Mb2dwcm9icyJvChJWZXJpZmljYXRpb25TdGF0dXMSEwoLc2VxdWVuY2VfaWQYASABKAQSEgoKY2xpZW50X3RhZxgCIAEoBBIMCgRzdGVwGAMgASgEEiIKBnN0YXR1cxgEIAEoCzISLmdvb2dsZS5ycGMuU3RhdHVzIhYKFEdldFRhcmdldEluZm9SZXF1ZXN0IqECChVHZXRUYXJnZXRJbmZvUmVzcG9uc2USDQoFbW9kZWwYASABKAkSFwoPdm9jYWJ1bGFyeV9zaXplGAIgASgNEh0KFXRva2VuaXplcl9maW5nZXJwcmludBgDIAEoCRITCgttYXhfY29udGV4dBgEIAEoDRIQCghtYXhfcm93cxgFIAEoDRINCgVkdHlwZRgGIAEoCRIRCglwYWdlX3NpemUYByABKA0SEQoJa3ZfdG9rZW5zGAggASgEEiwKBW1vZGVzGAkgAygOMh0ub3V0cmlkZXIudjEuVmVyaWZpY2F0aW9uTW9kZRIPCgdkcmFmdGVyGAogASgJEhUKDWVuZF90b2tlbl9pZHMYCyADKA0SDwoHdmVyc2lvbhgMIAEoCSqCAQoMRmluaXNoUmVhc29uEh0KGUZJTklTSF9SRUFTT05fVU5TUEVDSUZJRUQQABIhCh1GSU5JU0hfUkVBU09OX0VORF9PRl9TRVFVRU5DRRABEhYKEkZJTklTSF9SRUFTT05fU1RPUBACEhgKFEZJTklTSF9SRUFTT05fTEVOR1RIEAMy+QEKDVRhcmdldFNlcnZpY2USSQoIR2VuZXJhdGUSHC5vdXRyaWRlci52MS5HZW5lcmF0ZVJlcXVlc3QaHS5vdXRyaWRlci52MS5HZW5lcmF0ZVJlc3BvbnNlMAESRQoGVmVyaWZ5Ehoub3V0cmlkZXIudjEuVmVyaWZ5UmVxdWVzdBobLm91dHJpZGVyLnYxLlZlcmlmeVJlc3BvbnNlKAEwARJWCg1HZXRUYXJnZXRJbmZvEiEub3V0cmlkZXIudjEuR2V0VGFyZ2V0SW5mb1JlcXVlc3QaIi5vdXRyaWRlci52MS5HZXRUYXJnZXRJbmZvUmVzcG9uc2VCK1opb3V0cmlkZXIvY2xpZW50cy9nby9vdXRyaWRlcnYxO291dHJpZGVydjFiBnByb3RvMw", [file_google_rpc_status, file_outrider_v1_tree]);
/**
 * Describes the message outrider.v1.GenerateRequest.
 * Use `create(GenerateRequestSchema)` to create a new message.
 */
export const GenerateRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 0);
/**
 * Describes the message outrider.v1.ChatInput.
 * Use `create(ChatInputSchema)` to create a new message.
 */
export const ChatInputSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 1);
/**
 * Describes the message outrider.v1.ChatMessage.
 * Use `create(ChatMessageSchema)` to create a new message.
 */
export const ChatMessageSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 2);
/**
 * Describes the message outrider.v1.TokenInput.
 * Use `create(TokenInputSchema)` to create a new message.
 */
export const TokenInputSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 3);
/**
 * Describes the message outrider.v1.SpeculationOptions.
 * Use `create(SpeculationOptionsSchema)` to create a new message.
 */
export const SpeculationOptionsSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 4);
/**
 * Describes the message outrider.v1.GenerateResponse.
 * Use `create(GenerateResponseSchema)` to create a new message.
 */
export const GenerateResponseSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 5);
/**
 * Describes the message outrider.v1.GenerateStarted.
 * Use `create(GenerateStartedSchema)` to create a new message.
 */
export const GenerateStartedSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 6);
/**
 * Describes the message outrider.v1.GenerateChunk.
 * Use `create(GenerateChunkSchema)` to create a new message.
 */
export const GenerateChunkSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 7);
/**
 * Describes the message outrider.v1.TokenLogprobs.
 * Use `create(TokenLogprobsSchema)` to create a new message.
 */
export const TokenLogprobsSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 8);
/**
 * Describes the message outrider.v1.TopLogprob.
 * Use `create(TopLogprobSchema)` to create a new message.
 */
export const TopLogprobSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 9);
/**
 * Describes the message outrider.v1.GenerateFinished.
 * Use `create(GenerateFinishedSchema)` to create a new message.
 */
export const GenerateFinishedSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 10);
/**
 * Describes the message outrider.v1.Usage.
 * Use `create(UsageSchema)` to create a new message.
 */
export const UsageSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 11);
/**
 * Describes the message outrider.v1.SpeculationTotals.
 * Use `create(SpeculationTotalsSchema)` to create a new message.
 */
export const SpeculationTotalsSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 12);
/**
 * Describes the message outrider.v1.RequestTimes.
 * Use `create(RequestTimesSchema)` to create a new message.
 */
export const RequestTimesSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 13);
/**
 * Describes the message outrider.v1.VerifyRequest.
 * Use `create(VerifyRequestSchema)` to create a new message.
 */
export const VerifyRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 14);
/**
 * Describes the message outrider.v1.OpenVerification.
 * Use `create(OpenVerificationSchema)` to create a new message.
 */
export const OpenVerificationSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 15);
/**
 * Describes the message outrider.v1.VerifyTree.
 * Use `create(VerifyTreeSchema)` to create a new message.
 */
export const VerifyTreeSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 16);
/**
 * Describes the message outrider.v1.CloseVerification.
 * Use `create(CloseVerificationSchema)` to create a new message.
 */
export const CloseVerificationSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 17);
/**
 * Describes the message outrider.v1.VerifyResponse.
 * Use `create(VerifyResponseSchema)` to create a new message.
 */
export const VerifyResponseSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 18);
/**
 * Describes the message outrider.v1.VerificationOpened.
 * Use `create(VerificationOpenedSchema)` to create a new message.
 */
export const VerificationOpenedSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 19);
/**
 * Describes the message outrider.v1.Verdict.
 * Use `create(VerdictSchema)` to create a new message.
 */
export const VerdictSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 20);
/**
 * Describes the message outrider.v1.VerificationStatus.
 * Use `create(VerificationStatusSchema)` to create a new message.
 */
export const VerificationStatusSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 21);
/**
 * Describes the message outrider.v1.GetTargetInfoRequest.
 * Use `create(GetTargetInfoRequestSchema)` to create a new message.
 */
export const GetTargetInfoRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 22);
/**
 * Describes the message outrider.v1.GetTargetInfoResponse.
 * Use `create(GetTargetInfoResponseSchema)` to create a new message.
 */
export const GetTargetInfoResponseSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_target, 23);
/**
 * FinishReason says why a sequence ended.
 *
 * @generated from enum outrider.v1.FinishReason
 */
export var FinishReason;
(function (FinishReason) {
    /**
     * FINISH_REASON_UNSPECIFIED means that it has not ended.
     *
     * @generated from enum value: FINISH_REASON_UNSPECIFIED = 0;
     */
    FinishReason[FinishReason["UNSPECIFIED"] = 0] = "UNSPECIFIED";
    /**
     * FINISH_REASON_END_OF_SEQUENCE means that the model produced its end token.
     *
     * @generated from enum value: FINISH_REASON_END_OF_SEQUENCE = 1;
     */
    FinishReason[FinishReason["END_OF_SEQUENCE"] = 1] = "END_OF_SEQUENCE";
    /**
     * FINISH_REASON_STOP means that a stop string or stop token id was met.
     *
     * @generated from enum value: FINISH_REASON_STOP = 2;
     */
    FinishReason[FinishReason["STOP"] = 2] = "STOP";
    /**
     * FINISH_REASON_LENGTH means that max_tokens, or the model's context, was reached.
     *
     * @generated from enum value: FINISH_REASON_LENGTH = 3;
     */
    FinishReason[FinishReason["LENGTH"] = 3] = "LENGTH";
})(FinishReason || (FinishReason = {}));
/**
 * Describes the enum outrider.v1.FinishReason.
 */
export const FinishReasonSchema = /*@__PURE__*/ enumDesc(file_outrider_v1_target, 0);
/**
 * TargetService generates text, and verifies trees for clients that draft for themselves.
 *
 * @generated from service outrider.v1.TargetService
 */
export const TargetService = /*@__PURE__*/ serviceDesc(file_outrider_v1_target, 0);
