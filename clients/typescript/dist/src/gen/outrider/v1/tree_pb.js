// Token trees and the sampling vocabulary that both services share.
import { enumDesc, fileDesc, messageDesc } from "@bufbuild/protobuf/codegenv2";
/**
 * Describes the file outrider/v1/tree.proto.
 */
export const file_outrider_v1_tree = /*@__PURE__*/ fileDesc("ChZvdXRyaWRlci92MS90cmVlLnByb3RvEgtvdXRyaWRlci52MSJHChFEcmFmdERpc3RyaWJ1dGlvbhIOCgZwYXJlbnQYASABKA0SEQoJdG9rZW5faWRzGAIgAygNEg8KB3dlaWdodHMYAyADKA0idgoJVG9rZW5UcmVlEhEKCXRva2VuX2lkcxgBIAMoDRIPCgdwYXJlbnRzGAIgAygNEg4KBnNjb3JlcxgDIAMoAhI1Cg1kaXN0cmlidXRpb25zGAQgAygLMh4ub3V0cmlkZXIudjEuRHJhZnREaXN0cmlidXRpb24isQEKBlRlbnNvchIoCgVkdHlwZRgBIAEoDjIZLm91dHJpZGVyLnYxLlRlbnNvci5EVHlwZRINCgVzaGFwZRgCIAMoDRIMCgRkYXRhGAMgASgMImAKBURUeXBlEhYKEkRfVFlQRV9VTlNQRUNJRklFRBAAEhIKDkRfVFlQRV9GTE9BVDMyEAESEwoPRF9UWVBFX0JGTE9BVDE2EAISFgoSRF9UWVBFX0ZMT0FUOF9FNE0zEAMi/gMKElNhbXBsaW5nUGFyYW1ldGVycxITCgt0ZW1wZXJhdHVyZRgBIAEoARINCgV0b3BfaxgCIAEoDRISCgV0b3BfcBgDIAEoAUgAiAEBEg0KBW1pbl9wGAQgASgBEh8KEnJlcGV0aXRpb25fcGVuYWx0eRgFIAEoAUgBiAEBEhgKEHByZXNlbmNlX3BlbmFsdHkYBiABKAESGQoRZnJlcXVlbmN5X3BlbmFsdHkYByABKAESQgoKbG9naXRfYmlhcxgIIAMoCzIuLm91dHJpZGVyLnYxLlNhbXBsaW5nUGFyYW1ldGVycy5Mb2dpdEJpYXNFbnRyeRISCgptaW5fdG9rZW5zGAkgASgNEhcKCm1heF90b2tlbnMYCiABKA1IAogBARIMCgRzdG9wGAsgAygJEhYKDnN0b3BfdG9rZW5faWRzGAwgAygNEhIKCmlnbm9yZV9lb3MYDSABKAgSEQoEc2VlZBgOIAEoBkgDiAEBEhUKCGxvZ3Byb2JzGA8gASgNSASIAQEaMAoOTG9naXRCaWFzRW50cnkSCwoDa2V5GAEgASgNEg0KBXZhbHVlGAIgASgCOgI4AUIICgZfdG9wX3BCFQoTX3JlcGV0aXRpb25fcGVuYWx0eUINCgtfbWF4X3Rva2Vuc0IHCgVfc2VlZEILCglfbG9ncHJvYnMiQQoHVGltaW5ncxIZChFxdWV1ZV9uYW5vc2Vjb25kcxgBIAEoBBIbChNjb21wdXRlX25hbm9zZWNvbmRzGAIgASgEKpMBChBWZXJpZmljYXRpb25Nb2RlEiEKHVZFUklGSUNBVElPTl9NT0RFX1VOU1BFQ0lGSUVEEAASHAoYVkVSSUZJQ0FUSU9OX01PREVfR1JFRURZEAESHQoZVkVSSUZJQ0FUSU9OX01PREVfQ09VUExFRBACEh8KG1ZFUklGSUNBVElPTl9NT0RFX1JFSkVDVElPThADQitaKW91dHJpZGVyL2NsaWVudHMvZ28vb3V0cmlkZXJ2MTtvdXRyaWRlcnYxYgZwcm90bzM");
/**
 * Describes the message outrider.v1.DraftDistribution.
 * Use `create(DraftDistributionSchema)` to create a new message.
 */
export const DraftDistributionSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_tree, 0);
/**
 * Describes the message outrider.v1.TokenTree.
 * Use `create(TokenTreeSchema)` to create a new message.
 */
export const TokenTreeSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_tree, 1);
/**
 * Describes the message outrider.v1.Tensor.
 * Use `create(TensorSchema)` to create a new message.
 */
export const TensorSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_tree, 2);
/**
 * DType names the element type.
 *
 * @generated from enum outrider.v1.Tensor.DType
 */
export var Tensor_DType;
(function (Tensor_DType) {
    /**
     * D_TYPE_UNSPECIFIED is INVALID_ARGUMENT.
     *
     * @generated from enum value: D_TYPE_UNSPECIFIED = 0;
     */
    Tensor_DType[Tensor_DType["UNSPECIFIED"] = 0] = "UNSPECIFIED";
    /**
     * D_TYPE_FLOAT32 is IEEE 754 binary32.
     *
     * @generated from enum value: D_TYPE_FLOAT32 = 1;
     */
    Tensor_DType[Tensor_DType["FLOAT32"] = 1] = "FLOAT32";
    /**
     * D_TYPE_BFLOAT16 is the upper half of binary32.
     *
     * @generated from enum value: D_TYPE_BFLOAT16 = 2;
     */
    Tensor_DType[Tensor_DType["BFLOAT16"] = 2] = "BFLOAT16";
    /**
     * D_TYPE_FLOAT8_E4M3 is the OCP 8-bit float with 4 exponent bits and no infinities.
     *
     * @generated from enum value: D_TYPE_FLOAT8_E4M3 = 3;
     */
    Tensor_DType[Tensor_DType["FLOAT8_E4M3"] = 3] = "FLOAT8_E4M3";
})(Tensor_DType || (Tensor_DType = {}));
/**
 * Describes the enum outrider.v1.Tensor.DType.
 */
export const Tensor_DTypeSchema = /*@__PURE__*/ enumDesc(file_outrider_v1_tree, 2, 0);
/**
 * Describes the message outrider.v1.SamplingParameters.
 * Use `create(SamplingParametersSchema)` to create a new message.
 */
export const SamplingParametersSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_tree, 3);
/**
 * Describes the message outrider.v1.Timings.
 * Use `create(TimingsSchema)` to create a new message.
 */
export const TimingsSchema = /*@__PURE__*/ messageDesc(file_outrider_v1_tree, 4);
/**
 * VerificationMode says how the target decides which drafted tokens it keeps.
 *
 * @generated from enum outrider.v1.VerificationMode
 */
export var VerificationMode;
(function (VerificationMode) {
    /**
     * VERIFICATION_MODE_UNSPECIFIED lets the target choose: GREEDY at temperature 0, COUPLED above it.
     *
     * @generated from enum value: VERIFICATION_MODE_UNSPECIFIED = 0;
     */
    VerificationMode[VerificationMode["UNSPECIFIED"] = 0] = "UNSPECIFIED";
    /**
     * VERIFICATION_MODE_GREEDY keeps a drafted token when it is the target's most probable token.
     * Equal to plain greedy decoding, token for token. Needs temperature 0.
     *
     * @generated from enum value: VERIFICATION_MODE_GREEDY = 1;
     */
    VerificationMode[VerificationMode["GREEDY"] = 1] = "GREEDY";
    /**
     * VERIFICATION_MODE_COUPLED keeps a drafted token when it is the target's own seeded sample.
     * Equal to plain seeded sampling, token for token, whatever the draft proposes.
     *
     * @generated from enum value: VERIFICATION_MODE_COUPLED = 2;
     */
    VerificationMode[VerificationMode["COUPLED"] = 2] = "COUPLED";
    /**
     * VERIFICATION_MODE_REJECTION runs recursive rejection sampling without replacement.
     * Equal to plain sampling in law, provided that drafts were drawn from the distributions sent with them.
     *
     * @generated from enum value: VERIFICATION_MODE_REJECTION = 3;
     */
    VerificationMode[VerificationMode["REJECTION"] = 3] = "REJECTION";
})(VerificationMode || (VerificationMode = {}));
/**
 * Describes the enum outrider.v1.VerificationMode.
 */
export const VerificationModeSchema = /*@__PURE__*/ enumDesc(file_outrider_v1_tree, 0);
