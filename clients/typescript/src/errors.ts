/** Errors of the client: what the gate refuses, what does not answer, and how a task has ended. */
import { REFUSALS, type OperationName, type RefusalCode, type TaskRecord } from "./operations.js";

/** What all errors of this package are; `code` is stable. */
export class AsyncGateError extends Error {
  constructor(readonly code: string, message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** A store has nothing under an address, or the address is of another place, which nobody reads for a stranger. */
export class NotInStore extends AsyncGateError { constructor(message: string) { super("not_in_store", message); } }

/** What a store gives is not what the receipt names. */
export class PayloadDamaged extends AsyncGateError { constructor(message: string) { super("payload_damaged", message); } }

// The call that helps after a refusal, where there is one; the message says what to do then.
const NEXT: Partial<Record<RefusalCode, OperationName>> = {
  already_answered: "list_inputs", forbidden: "whoami", idempotency_conflict: "list_tasks", input_expired: "explain_task",
  input_not_found: "list_inputs", invalid_state_transition: "get_task",
  key_conflict: "list_inputs", lease_invalid_or_expired: "lease_next", lease_lifetime_limit: "release_lease",
  lease_renewal_limit: "release_lease", not_addressed: "list_inputs", step_conflict: "list_steps", task_not_found: "list_tasks",
  unauthenticated: "whoami",
};

/** The gate refused a call. Its subclasses say by the status what kind of refusal it is. */
export class Refusal extends AsyncGateError {
  declare readonly code: RefusalCode | (string & {});
  /** Seconds to wait before the next try, if the gate says so. */
  readonly retryAfter?: number;
  /** Why a lease is lost. */
  readonly reason?: string;
  /** The other members of the answer, such as `quota` or `receipt_id`. */
  readonly more: Readonly<Record<string, unknown>>;

  constructor(readonly status: number, body: Record<string, unknown>, retryAfter?: number) {
    const { error, message, detail, ...more } = body;
    super(String(error ?? "unexpected_answer"), String(message ?? detail ?? `the answer has the status ${status}`));
    this.more = more;
    if (retryAfter !== undefined) this.retryAfter = retryAfter;
    if (typeof more["reason"] === "string") this.reason = more["reason"];
  }

  /** What the code means in general; the message says what it means here. */
  get meaning(): string | undefined { return (REFUSALS as Record<string, string>)[this.code]; }

  /** The operation to call next, if one helps. */
  get next(): OperationName | undefined { return NEXT[this.code as RefusalCode]; }
}

/** The request breaks a rule, or is too large (400, 413, 415): another one is needed. */
export class InvalidRequest extends Refusal {}
/** The credential is missing or invalid (401). */
export class Unauthenticated extends Refusal {}
/** The credential does not permit the call (403). */
export class Forbidden extends Refusal {}
/** The tenant has nothing with that id (404). */
export class NotFound extends Refusal {}
/** The state of the task forbids the call (409). */
export class Conflict extends Refusal {}
/** The lease is lost (409 lease_invalid_or_expired): drop the work. `reason` says why. */
export class LeaseInvalid extends Conflict {}
/** A limit or a quota is reached (429); `retryAfter` says when to try again. */
export class LimitReached extends Refusal {}
/** The gate or its database cannot serve now (5xx); the outcome may be unknown. */
export class Unavailable extends Refusal {}

const KINDS: Record<number, typeof Refusal> = {
  400: InvalidRequest, 401: Unauthenticated, 403: Forbidden, 404: NotFound, 409: Conflict, 413: InvalidRequest,
  415: InvalidRequest, 429: LimitReached };

/** Make the error of a refusal. */
export function makeRefusal(status: number, body: Record<string, unknown>, retryAfter?: number): Refusal {
  const kind = body["error"] === "lease_invalid_or_expired" ? LeaseInvalid : KINDS[status] ?? (status >= 500 ? Unavailable : Refusal);
  return new kind(status, body, retryAfter);
}

/** No gate answered. `sent`: the gate may have received the call. */
export class Unreachable extends AsyncGateError { constructor(message: string, readonly sent: boolean, cause?: unknown, code = "unreachable") { super(code, message, { cause }); } }

/** Something else answered: another product, a captive portal, or a gate of an incompatible version. */
export class NotAGate extends Unreachable {
  constructor(url: string, why: string) {
    super(`what answers at ${url} is not an AsyncGate, or is another version: ${why}`, true, undefined, "not_a_gate");
  }
}

/** The task failed and gets no further attempt; `error` is what its worker reported. */
export class TaskFailed extends AsyncGateError {
  readonly error: unknown;

  constructor(readonly task: TaskRecord) {
    const error = task.result?.error;
    super("task_failed", `task ${task.task_id} (${task.type}) failed: ${JSON.stringify(error)?.slice(0, 200)}`);
    this.error = error;
  }
}

/** The task was canceled. */
export class TaskCanceled extends AsyncGateError { constructor(readonly task: TaskRecord) { super("task_canceled", `task ${task.task_id} (${task.type}) was canceled`); } }

/** The task has not ended in time; it goes on, and can be waited for again. */
export class WaitTimeout extends AsyncGateError { constructor(readonly taskId: string, seconds: number) { super("wait_timeout", `task ${taskId} has not ended within ${seconds} s; it goes on, wait for it again`); } }

/** A value does not match its schema; `issues` says where. */
export class SchemaMismatch extends AsyncGateError {
  constructor(what: string, readonly issues: readonly { readonly message: string; readonly path: string }[]) {
    super("schema_mismatch", `${what} does not match its schema: ${issues.map(each => `${each.path || "it"}: ${each.message}`).join("; ")}`);
  }
}
