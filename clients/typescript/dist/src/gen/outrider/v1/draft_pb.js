// The draft service: it streams token trees ahead of the target.
import { fileDesc, messageDesc, serviceDesc } from "@bufbuild/protobuf/codegenv2";
import { file_google_rpc_status } from "../../google/rpc/status_pb.js";
import { file_outrider_v1_tree } from "./tree_pb.js";
/**
 * Describes the file outrider/v1/draft.proto.
 */
export const file_outrider_v1_draft = /*@__PURE__*/ fileDesc("ChdvdXRyaWRlci92MS9kcmFmdC5wcm90bxILb3V0cmlkZXIudjEiywEKDlByb3Bvc2VSZXF1ZXN0EikKBG9wZW4YASABKAsyGS5vdXRyaWRlci52MS5PcGVuU2VxdWVuY2VIABIwCgdhZHZhbmNlGAIgASgLMh0ub3V0cmlkZXIudjEuQWR2YW5jZVNlcXVlbmNlc0gAEiwKBWNsb3NlGAMgASgLMhsub3V0cmlkZXIudjEuQ2xvc2VTZXF1ZW5jZXNIABIlCgZjcmVkaXQYBCABKAsyEy5vdXRyaWRlci52MS5DcmVkaXRIAEIHCgVmcmFtZSLNAQoPUHJvcG9zZVJlc3BvbnNlEi0KBm9wZW5lZBgBIAEoCzIbLm91dHJpZGVyLnYxLlNlcXVlbmNlT3BlbmVkSAASLAoGZ3Jvd3RoGAIgASgLMhoub3V0cmlkZXIudjEuR3Jvd1NlcXVlbmNlc0gAEi0KBnN0YXR1cxgDIAEoCzIbLm91dHJpZGVyLnYxLlNlcXVlbmNlU3RhdHVzSAASJQoHdGltaW5ncxgEIAEoCzIULm91dHJpZGVyLnYxLlRpbWluZ3NCBwoFZnJhbWUiwAIKDE9wZW5TZXF1ZW5jZRITCgtzZXF1ZW5jZV9pZBgBIAEoBBIOCgZ0ZW5hbnQYAiABKAkSDgoGY29ycHVzGAMgASgJEhEKCXRva2VuX2lkcxgEIAMoDRIVCg1wcm9tcHRfbGVuZ3RoGAUgASgNEgwKBHN0ZXAYBiABKAQSDAoEc2VlZBgHIAEoBhIrCgRtb2RlGAggASgOMh0ub3V0cmlkZXIudjEuVmVyaWZpY2F0aW9uTW9kZRIxCghzYW1wbGluZxgJIAEoCzIfLm91dHJpZGVyLnYxLlNhbXBsaW5nUGFyYW1ldGVycxInCgZsaW1pdHMYCiABKAsyFy5vdXRyaWRlci52MS5UcmVlTGltaXRzEhcKD3ZvY2FidWxhcnlfc2l6ZRgLIAEoDRITCgt0cmFjZXBhcmVudBgMIAEoCSIyCgpUcmVlTGltaXRzEhEKCW1heF9ub2RlcxgBIAEoDRIRCgltYXhfZGVwdGgYAiABKA0iTgoOU2VxdWVuY2VPcGVuZWQSEwoLc2VxdWVuY2VfaWQYASABKAQSJwoGbGltaXRzGAIgASgLMhcub3V0cmlkZXIudjEuVHJlZUxpbWl0cyJDChBBZHZhbmNlU2VxdWVuY2VzEi8KCXNlcXVlbmNlcxgBIAMoCzIcLm91dHJpZGVyLnYxLlNlcXVlbmNlQWR2YW5jZSJuCg9TZXF1ZW5jZUFkdmFuY2USEwoLc2VxdWVuY2VfaWQYASABKAQSDAoEc3RlcBgCIAEoBBIRCgl0b2tlbl9pZHMYAyADKA0SJQoIZmVhdHVyZXMYBCABKAsyEy5vdXRyaWRlci52MS5UZW5zb3IiJgoOQ2xvc2VTZXF1ZW5jZXMSFAoMc2VxdWVuY2VfaWRzGAEgAygEIhgKBkNyZWRpdBIOCgZmcmFtZXMYASABKA0iPwoNR3Jvd1NlcXVlbmNlcxIuCglzZXF1ZW5jZXMYASADKAsyGy5vdXRyaWRlci52MS5TZXF1ZW5jZUdyb3d0aCLPAQoOU2VxdWVuY2VHcm93dGgSEwoLc2VxdWVuY2VfaWQYASABKAQSEQoJYmFzZV9zdGVwGAIgASgEEhUKDWZpcnN0X25vZGVfaWQYAyABKA0SEgoKcGFyZW50X2lkcxgEIAMoDRIRCgl0b2tlbl9pZHMYBSADKA0SDgoGc2NvcmVzGAYgAygCEjUKDWRpc3RyaWJ1dGlvbnMYByADKAsyHi5vdXRyaWRlci52MS5EcmFmdERpc3RyaWJ1dGlvbhIQCghyZXBsYWNlcxgIIAEoCCJJCg5TZXF1ZW5jZVN0YXR1cxITCgtzZXF1ZW5jZV9pZBgBIAEoBBIiCgZzdGF0dXMYAiABKAsyEi5nb29nbGUucnBjLlN0YXR1cyIVChNHZXREcmFmdEluZm9SZXF1ZXN0It0BChRHZXREcmFmdEluZm9SZXNwb25zZRIPCgdkcmFmdGVyGAEgASgJEhcKD3ZvY2FidWxhcnlfc2l6ZRgCIAEoDRIdChV0b2tlbml6ZXJfZmluZ2VycHJpbnQYAyABKAkSJwoGbGltaXRzGAQgASgLMhcub3V0cmlkZXIudjEuVHJlZUxpbWl0cxITCgttYXhfY29udGV4dBgFIAEoDRItCghmZWF0dXJlcxgGIAEoCzIbLm91dHJpZGVyLnYxLkZlYXR1cmVSZXF1ZXN0Eg8KB3ZlcnNpb24YByABKAkibAoORmVhdHVyZVJlcXVlc3QSDgoGbGF5ZXJzGAEgAygNEg0KBXdpZHRoGAIgASgNEigKBWR0eXBlGAMgASgOMhkub3V0cmlkZXIudjEuVGVuc29yLkRUeXBlEhEKCXByb2plY3RlZBgEIAEoCCJFChBBZGRDb3JwdXNSZXF1ZXN0Eg4KBnRlbmFudBgBIAEoCRIOCgZjb3JwdXMYAiABKAkSEQoJdG9rZW5faWRzGAMgAygNIjIKEUFkZENvcnB1c1Jlc3BvbnNlEg4KBnRva2VucxgBIAEoBBINCgVub2RlcxgCIAEoBDL7AQoMRHJhZnRTZXJ2aWNlEkgKB1Byb3Bvc2USGy5vdXRyaWRlci52MS5Qcm9wb3NlUmVxdWVzdBocLm91dHJpZGVyLnYxLlByb3Bvc2VSZXNwb25zZSgBMAESUwoMR2V0RHJhZnRJbmZvEiAub3V0cmlkZXIudjEuR2V0RHJhZnRJbmZvUmVxdWVzdBohLm91dHJpZGVyLnYxLkdldERyYWZ0SW5mb1Jlc3BvbnNlEkwKCUFkZENvcnB1cxIdLm91dHJpZGVyLnYxLkFkZENvcnB1c1JlcXVlc3QaHi5vdXRyaWRlci52MS5BZGRDb3JwdXNSZXNwb25zZSgBQitaKW91dHJpZGVyL2NsaWVudHMvZ28vb3V0cmlkZXJ2MTtvdXRyaWRlcnYxYgZwcm90bzM", [file_google_rpc_status, file_outrider_v1_tree]);
/**
 * Describes the message outrider.v1.ProposeRequest.
 * Use `create(ProposeRequestSchema)` to create a new message.
 */
export const ProposeRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 0);
/**
 * Describes the message outrider.v1.ProposeResponse.
 * Use `create(ProposeResponseSchema)` to create a new message.
 */
export const ProposeResponseSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 1);
/**
 * Describes the message outrider.v1.OpenSequence.
 * Use `create(OpenSequenceSchema)` to create a new message.
 */
export const OpenSequenceSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 2);
/**
 * Describes the message outrider.v1.TreeLimits.
 * Use `create(TreeLimitsSchema)` to create a new message.
 */
export const TreeLimitsSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 3);
/**
 * Describes the message outrider.v1.SequenceOpened.
 * Use `create(SequenceOpenedSchema)` to create a new message.
 */
export const SequenceOpenedSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 4);
/**
 * Describes the message outrider.v1.AdvanceSequences.
 * Use `create(AdvanceSequencesSchema)` to create a new message.
 */
export const AdvanceSequencesSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 5);
/**
 * Describes the message outrider.v1.SequenceAdvance.
 * Use `create(SequenceAdvanceSchema)` to create a new message.
 */
export const SequenceAdvanceSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 6);
/**
 * Describes the message outrider.v1.CloseSequences.
 * Use `create(CloseSequencesSchema)` to create a new message.
 */
export const CloseSequencesSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 7);
/**
 * Describes the message outrider.v1.Credit.
 * Use `create(CreditSchema)` to create a new message.
 */
export const CreditSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 8);
/**
 * Describes the message outrider.v1.GrowSequences.
 * Use `create(GrowSequencesSchema)` to create a new message.
 */
export const GrowSequencesSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 9);
/**
 * Describes the message outrider.v1.SequenceGrowth.
 * Use `create(SequenceGrowthSchema)` to create a new message.
 */
export const SequenceGrowthSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 10);
/**
 * Describes the message outrider.v1.SequenceStatus.
 * Use `create(SequenceStatusSchema)` to create a new message.
 */
export const SequenceStatusSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 11);
/**
 * Describes the message outrider.v1.GetDraftInfoRequest.
 * Use `create(GetDraftInfoRequestSchema)` to create a new message.
 */
export const GetDraftInfoRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 12);
/**
 * Describes the message outrider.v1.GetDraftInfoResponse.
 * Use `create(GetDraftInfoResponseSchema)` to create a new message.
 */
export const GetDraftInfoResponseSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 13);
/**
 * Describes the message outrider.v1.FeatureRequest.
 * Use `create(FeatureRequestSchema)` to create a new message.
 */
export const FeatureRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 14);
/**
 * Describes the message outrider.v1.AddCorpusRequest.
 * Use `create(AddCorpusRequestSchema)` to create a new message.
 */
export const AddCorpusRequestSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 15);
/**
 * Describes the message outrider.v1.AddCorpusResponse.
 * Use `create(AddCorpusResponseSchema)` to create a new message.
 */
export const AddCorpusResponseSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_draft, 16);
/**
 * DraftService proposes continuations of sequences that a target service owns.
 *
 * @generated from service outrider.v1.DraftService
 */
export const DraftService = /*@__PURE__*/ serviceDesc(file_outrider_v1_draft, 0);
