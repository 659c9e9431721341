/** The client: hand over work and get its result, even if the gate or a worker restarts meanwhile. */
import { TaskCanceled, TaskFailed, Unreachable, NotAGate, WaitTimeout } from "./errors.js";
import { follow, followOutput, type FollowOptions, type GateEvent } from "./events.js";
import { Connection, isTemporary, pauseAfter, refuseUnknown, sleep, type CallOptions, type ConnectOptions } from "./http.js";
import { CALLS, LISTED, OperationMethods } from "./operations.js";
import type { Answered, CreateTask, EntryRecord, InputAction, InputRecord, Lists, OperationName, Operations, Status, TaskRecord } from "./operations.js";
import type { Payloads } from "./payloads.js";
import { parse, type OutputOf, type StandardSchema } from "./schema.js";

/** How to reach a gate, and who calls if the credential does not say it. */
export interface GateOptions extends ConnectOptions {
  /** The agent in whose name tasks are created, for a credential that names nobody. */
  agentId?: string;
  /** The worker in whose name leases are taken, for a credential that names nobody. */
  workerId?: string;
  /** The store of large payloads and results, of `asyncgate/payloads`; a worker has to have the same one. */
  payloads?: Payloads;
}

/** Terms of a task, besides its type and payload. */
export interface SubmitOptions extends Omit<Partial<CreateTask>, "type" | "payload" | "requirements" | "idempotency_key" | "parent_task_id"> {
  /** Names the request: the same key again returns the first task. */
  key?: string;
  /** Capabilities that a worker must have. */
  needs?: readonly string[];
  /** The task whose child it is: its id, its handle, or the job of its worker. */
  parent?: string | { readonly taskId: string };
  /** Ends the call; the task may have been created. */
  signal?: AbortSignal;
}

/** How long to wait for a task. */
export interface WaitOptions {
  /** Give up after so many seconds, with WaitTimeout; the task goes on. Default: never. */
  timeoutSeconds?: number;
  /** Stop waiting; the task goes on. */
  signal?: AbortSignal;
}

/** From where to follow the output of a task. */
export interface OutputOptions {
  /** Go on behind the entry with this offset; default: from the beginning. */
  after?: number;
  signal?: AbortSignal;
}

export const GATE_OPTIONS = ["url", "key", "patienceSeconds", "fetch", "agentId", "workerId", "payloads"] as const satisfies (keyof GateOptions)[];
const LONG_POLL_SECONDS = 25;
const ENDED: readonly Status[] = ["succeeded", "failed", "canceled"];
const CALLER_FIELDS = ["principal_id", "agent_id", "worker_id", "created_by", "tasker_principal"];
const FOLLOWED = ["list_receipts", "list_open_obligations"];

/** A client of a gate. Many calls may run at once; there is nothing to close. */
export class Gate extends OperationMethods {
  readonly agentId: string | undefined;
  readonly workerId: string | undefined;
  readonly connection: Connection;
  readonly payloads: Payloads | undefined;

  constructor(options: GateOptions = {}) {
    super();
    refuseUnknown(options, GATE_OPTIONS, "Gate");
    this.agentId = options.agentId;
    this.workerId = options.workerId;
    this.connection = new Connection(options);
    this.payloads = options.payloads;
  }

  get url(): string { return this.connection.url; }

  /** A client for another caller, over the same connection. */
  speakingAs(who: { agentId?: string; workerId?: string }): Gate {
    return Object.create(this, { agentId: { value: who.agentId }, workerId: { value: who.workerId } }) as Gate;
  }

  /** Create a task; a repeated `key` returns the handle of the first one. Its worker stores the result in the gate. */
  async submit<Result = unknown>(type: string, payload: unknown, options: SubmitOptions = {}): Promise<Handle<Result>> {
    const { key, needs, parent, signal, ...terms } = options;
    const made = await this.createTask({
      result_delivery: "inline", ...terms, type, payload: payload ?? null, ...(key !== undefined && { idempotency_key: key }),
      ...(parent !== undefined && { parent_task_id: typeof parent === "string" ? parent : parent.taskId }),
      ...(needs?.length && { requirements: { capabilities: [...needs] } }) }, signal && { signal });
    return new Handle<Result>(this, made.task_id, made.payload_differs ?? false, made.warnings ?? []);
  }

  /** The handle of an existing task, for example after a restart. */
  handle<Result = unknown>(taskId: string): Handle<Result> { return new Handle<Result>(this, taskId); }

  /** Wait until a task has ended, in success or not. */
  wait(taskId: string, options?: WaitOptions): Promise<TaskRecord> { return this.handle(taskId).ended(options); }

  /** Answer a question of a task: with content, or `{ action: "decline" }` or `{ action: "cancel" }`. */
  answer(taskId: string, key: string, answer: { content: unknown } | { action: Exclude<InputAction, "accept"> }): Promise<Answered> {
    return this.answerInput({ task_id: taskId, key, ..."action" in answer ? answer : { action: "accept" as const, content: answer.content } });
  }

  /** Everything that a list operation lists, page after page: `for await (const task of gate.each("list_tasks"))`. */
  async *each<N extends keyof Lists & OperationName>(operation: N, fields: Operations[N]["takes"] = {} as Operations[N]["takes"], options?: CallOptions): AsyncGenerator<Lists[N], void, undefined> {
    const position = FOLLOWED.includes(operation) ? "since_receipt_id" : "cursor";
    for (let told = fields; ;) {
      const page = await this.call(operation, told, options) as unknown as { next_cursor: string | null } & Record<string, Lists[N][]>;
      yield* page[LISTED[operation]] ?? [];
      if (page.next_cursor === null) return;
      told = { ...told, [position]: page.next_cursor };
    }
  }

  /** Follow receipts and changes as they come, without an end; `signal` ends it. */
  stream(options?: FollowOptions): AsyncGenerator<GateEvent, void, undefined> { return follow(this.connection, options); }

  /** Call an operation by its name; it is repeated while that is safe and time is left. */
  async call<N extends OperationName>(operation: N, fields?: Operations[N]["takes"], options?: CallOptions): Promise<Operations[N]["gives"]> {
    const told = { ...nameCaller(this, operation, fields ?? {}), ...fields };
    return await this.connection.call(operation, this.payloads ? await this.payloads.stow(operation, told) as typeof told : told, options);
  }
}

// Who calls, for a credential that names nobody.
function nameCaller({ agentId, workerId }: Gate, operation: OperationName, fields: object): Record<string, string> {
  const caller = CALLS[operation][3];
  if (CALLER_FIELDS.some(name => (fields as Record<string, unknown>)[name] != null)) return {};
  if (agentId && caller === "principal") return { principal_kind: "agent", principal_id: agentId };
  return workerId && caller === "worker" ? { worker_id: workerId } : {};
}

/** A task that was handed over; to find it again after a restart, keep only its id. */
export class Handle<Result = unknown> {
  constructor(
    readonly gate: Gate, readonly taskId: string,
    /** Whether the key had made this task from another request. */
    readonly payloadDiffers = false,
    /** What the gate remarked, such as that nobody serves this type. */
    readonly warnings: readonly string[] = []) {}

  /** The whole task. */
  task(options?: CallOptions): Promise<TaskRecord> { return this.gate.getTask({ task_id: this.taskId }, options); }

  /** The task's status. */
  async status(): Promise<Status> { return (await this.task()).status; }

  /** The worker's latest progress. */
  async progress(): Promise<unknown> { return (await this.task()).progress; }

  /** Cancel the task; gives whether it is canceled now: false if it had ended already. */
  async cancel(reason?: string): Promise<boolean> {
    return (await this.gate.cancelTask({ task_id: this.taskId, ...(reason && { reason }) })).status === "canceled";
  }

  /** The questions of the task. */
  async questions(): Promise<InputRecord[]> { return (await this.gate.listInputs({ task_id: this.taskId })).inputs; }

  /** Answer a question of the task; see Gate.answer. */
  answer(key: string, answer: { content: unknown } | { action: Exclude<InputAction, "accept"> }): Promise<Answered> {
    return this.gate.answer(this.taskId, key, answer);
  }

  /** Wait for the result, checked by a schema if there is one; throws TaskFailed, TaskCanceled or WaitTimeout. */
  result<Schema extends StandardSchema<any, any>>(options: WaitOptions & { schema: Schema }): Promise<OutputOf<Schema>>;
  result(options?: WaitOptions & { schema?: undefined }): Promise<Result>;
  async result(options: WaitOptions & { schema?: StandardSchema | undefined } = {}): Promise<unknown> {
    const ended = await this.ended(options);
    if (ended.status === "failed") throw new TaskFailed(ended);
    if (ended.status === "canceled") throw new TaskCanceled(ended);
    const value = ended.result && this.gate.payloads ? await this.gate.payloads.fetchResult(ended.result) : ended.result?.result;
    return await parse(options.schema, value, `the result of task ${this.taskId}`);
  }

  /** Wait until the task has ended, in success or not. A gate that is away does not end the wait. */
  async ended(options: WaitOptions = {}): Promise<TaskRecord> {
    const { timeoutSeconds = Infinity, signal } = options, until = Date.now() + 1000 * timeoutSeconds;
    for (let pauses = 1, answered = false; ; pauses++) {
      signal?.throwIfAborted();
      const asked = Date.now(), left = Math.max(0, (until - asked) / 1000);
      let least = 0;
      try {
        const task = await this.gate.getTask({ task_id: this.taskId, wait_seconds: Math.min(LONG_POLL_SECONDS, left) }, { patienceSeconds: Math.min(30, left), ...(signal && { signal }) });
        if (ENDED.includes(task.status)) return task;
        answered = true;
      } catch (error) {
        // Where a gate has answered, a captive portal or a proxy that answers for it goes away again.
        if (signal?.aborted || !(isTemporary(error) || (error instanceof NotAGate && answered))) throw error;
        least = error instanceof Unreachable ? 0 : (error as { retryAfter?: number }).retryAfter ?? 0;
      }
      if (Date.now() >= until) throw new WaitTimeout(this.taskId, timeoutSeconds);
      // A gate that is stopping answers long polls at once: pause, so that this loop does not spin.
      if (Date.now() - asked > 500 * LONG_POLL_SECONDS) pauses = 0;
      await sleep(Math.min(least + pauseAfter(pauses + 1), (until - Date.now()) / 1000), signal);
    }
  }

  /** What the worker prints and streams, as it comes, until the task has ended; a gate that restarts does not end it. */
  async *stream(options: OutputOptions = {}): AsyncGenerator<unknown, void, undefined> {
    for await (const entry of this.output(options)) if ("chunk" in entry && entry.stream === undefined) yield entry.chunk;
  }

  /** The same with the offset of each chunk, and with the changes of the task's state between them. */
  output({ after = 0, signal }: OutputOptions = {}): AsyncGenerator<EntryRecord, void, undefined> {
    const query = new URLSearchParams(nameCaller(this.gate, "read_output", {})).toString();
    return followOutput(this.gate.connection, `/v1/tasks/${encodeURIComponent(this.taskId)}/output${query && `?${query}`}`, after, signal);
  }

  /** The task now, and after each change of its status, hold or progress, until it has ended. */
  async *updates(options: { signal?: AbortSignal } = {}): AsyncGenerator<TaskRecord, void, undefined> {
    let last = "";
    const told = options.signal && { signal: options.signal };
    for await (const _ of following(this, options.signal)) {
      const task = await this.task(told), now = JSON.stringify([task.status, task.held, task.progress]);
      if (now !== last) yield task;
      if (ENDED.includes(task.status)) return;
      last = now;
    }
  }
}

// Says when to look at a task again: first at once, then at each event.
async function* following(handle: Handle, signal: AbortSignal | undefined): AsyncGenerator<void, void, undefined> {
  yield;
  for await (const _ of handle.gate.stream({ taskId: handle.taskId, ...(signal && { signal }) })) yield;
}
