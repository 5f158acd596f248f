export { type GenerateSettings, Outrider } from "./client.js";
export { type ConnectOptions, type TlsOptions } from "./connection.js";
export { draftRefused, errorOf, errorOfStatus, type Field, OutriderError, type Reason, SERVICE_REASONS } from "./errors.js";
export * from "./gen/outrider/v1/draft_pb.js";
export * from "./gen/outrider/v1/target_pb.js";
export * from "./gen/outrider/v1/tree_pb.js";
export { exponential, noiseWord, raceWinner } from "./noise.js";
export { FrameQueue } from "./queue.js";
export { Verification } from "./verification.js";
