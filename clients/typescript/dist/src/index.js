export { Outrider } from "./client.js";
export { createTransport } from "./connection.js";
export { errorOfStatus, problemOf } from "./errors.js";
export * from "./gen/outrider/v1/draft_pb.js";
export * from "./gen/outrider/v1/target_pb.js";
export * from "./gen/outrider/v1/tree_pb.js";
export { exponential, noiseWord, raceWinner } from "./noise.js";
export { FrameQueue } from "./queue.js";
export { Verification } from "./verification.js";
