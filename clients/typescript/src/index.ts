/** AsyncGate: hand over work, any worker leases it, nothing is lost. */
export * from "./errors.js";
export { Gate, Handle, type GateOptions, type OutputOptions, type SubmitOptions, type WaitOptions } from "./gate.js";
export type { CallOptions, ConnectOptions } from "./http.js";
export type { FollowOptions, GateEvent } from "./events.js";
export { Done, Fail, Lost, Park, Retry, StepMismatch, StepsLost, TooLarge, type Job, type LogLevel, type Question } from "./job.js";
export { Worker, type TaskFunction, type TaskOptions, type WorkerOptions } from "./worker.js";
export type { OutputOf, StandardIssue, StandardResult, StandardSchema } from "./schema.js";
export { REFUSALS, type Addressee, type ChangeRecord, type CreateTask, type EntryRecord, type Input, type InputRecord, type Offer, type OperationName, type Operations,
  type ReceiptRecord, type RefusalCode, type Status, type TaskRecord } from "./operations.js";
export type * as wire from "./operations.js";
