/** A worker: it leases tasks, runs your function for each, and reports the result until the gate has received it. */
import { PayloadDamaged, Refusal, SchemaMismatch, Unreachable } from "./errors.js";
import { Gate, GATE_OPTIONS, type GateOptions } from "./gate.js";
import { Heart, Pulse, type Me } from "./heart.js";
import { isTemporary, pauseAfter, refuseUnknown, sleep, within, writeClean, writeJson } from "./http.js";
import { Done, Fail, Job, Park, Retry, show, StepsLost, TooLarge, type KeptConsole, type LogLevel } from "./job.js";
import { MemoryPlace, type Letter } from "./letters.js";
import type { LeaseRecord, Offer } from "./operations.js";
import { describeSchema, parse, type StandardSchema } from "./schema.js";

/** How a worker works; every member has a default. */
export interface WorkerOptions extends Omit<GateOptions, "agentId" | "workerId"> {
  /** The name of the worker, stable across its restarts; default: the principal of the key, or the host's name. */
  workerId?: string;
  /** What it can do: tasks that need more stay with the gate. */
  capabilities?: readonly string[];
  /** How many tasks it does at once; default 1. */
  concurrency?: number;
  /** The length of a lease, renewed at a third of it; default 30. So long a task waits if its worker is killed. */
  ttlSeconds?: number;
  /** How long tasks may go on after SIGTERM, before they are given back; default 20. */
  drainSeconds?: number;
  /** How long work goes on beyond its lease while the gate is away; default 300. */
  outageSeconds?: number;
  /** The folder for what must outlive the process; null keeps nothing. Default: ~/.local/state/asyncgate. */
  state?: string | null;
  /** Whether the gate learns what your functions take and give, so that it refuses what does not fit; default true. */
  declare?: boolean;
  /** Whether the error of a task tells where in your code it was thrown; default true. */
  traces?: boolean;
  /** Keep with each task what its function says by console, from this level on: 100 KB in one run. Default: nothing. */
  keepLogs?: LogLevel;
  /** Where the worker says what is wrong; default: console.warn. */
  log?: (line: string) => void;
}

/** What a task function may be told besides its type. */
export interface TaskOptions<Payload, Result = any> {
  /**
   * A schema of the payload, of zod, valibot or another library of Standard Schema: another payload fails the task.
   * Where the library says it as JSON schema, the gate refuses the payload when the task is created.
   */
  payload?: StandardSchema<unknown, Payload>;
  /** The same of the result: what the function gives has to fit. */
  result?: StandardSchema<Result, any>;
  /** What such a task does, for agents that look for it. */
  description?: string;
  /** Whether an error allows another attempt; default: all but Fail and what no attempt can mend. */
  retry?: boolean | ((error: unknown) => boolean);
}

/** What runs for a task: its value is the result. */
export type TaskFunction<Payload = unknown, Result = any> = (payload: Payload, job: Job<Payload>) => Result | Done<Result> | PromiseLike<Result | Done<Result>>;

type Given<T> = [T][T extends any ? 0 : never];        // nothing is inferred from it; NoInfer came with TypeScript 5.4
interface Task { run: TaskFunction<any>; options: TaskOptions<any> }
interface Running { job: Job; done: Promise<void>; settled: boolean }

const CLAIM_SECONDS = 25;
const QUIET_SECONDS = 1;        // how long the gate may be away before that is said
const AWAY_LOG_SECONDS = 600;
const CANCEL_SECONDS = 10;      // what a function has to end in once its signal is aborted
const DELIVERY_TRIES = 50;      // about twenty seconds in all
const SLOW_SECONDS = 1;         // after which an end that the gate has not taken is on disk
const MESSAGE_LENGTH = 4000, MOST_CAUSES = 5, LOGGED_LINES = 10;
const WORKER_OPTIONS = ["capabilities", "concurrency", "ttlSeconds", "drainSeconds", "outageSeconds", "state", "declare", "traces", "keepLogs", "log"] as const satisfies (keyof WorkerOptions)[];

/** Leases the tasks that it has functions for, and runs those functions until it is stopped. */
export class Worker {
  readonly #options: WorkerOptions;
  readonly #tasks = new Map<string, Task>();
  readonly #running = new Map<string, Running>();
  readonly #gate: Gate;
  readonly #stopping = new AbortController();
  readonly #hurried = new AbortController();
  #me: Me = { worker_id: "" };
  #place: MemoryPlace = new MemoryPlace();
  #heart!: Heart;
  #console: KeptConsole | undefined;
  #instance = "";
  #process: string | undefined;
  #mostBytes = 65_536;
  #claimId = crypto.randomUUID();
  #claimed = false;
  #cut: AbortController | undefined;      // ends the claim that waits now
  #tellAt = 0;
  #warned: readonly string[] = [];

  constructor(options: WorkerOptions = {}) {
    refuseUnknown(options, [...GATE_OPTIONS.filter(name => name !== "agentId"), ...WORKER_OPTIONS], "Worker");
    for (const name of ["concurrency", "ttlSeconds"] as const) {
      const count = options[name] ?? 1;
      if (!(count >= 1 && Number.isInteger(count))) throw new RangeError(`${name} must be a whole number of 1 or more, not ${count}`);
    }
    for (const name of ["drainSeconds", "outageSeconds"] as const) {
      const seconds = options[name] ?? 0;
      if (!(seconds >= 0)) throw new RangeError(`${name} must be 0 or more, not ${seconds}`);
    }
    this.#options = options;
    const reached = Object.fromEntries(Object.entries(options).filter(([name]) => GATE_OPTIONS.includes(name as "url")));
    this.#gate = new Gate({ patienceSeconds: 0, ...reached });      // what is to be repeated is repeated here
  }

  /** The name of the worker; empty until the gate has told it, if none was given. */
  get workerId(): string { return this.#me.worker_id || (this.#options.workerId ?? ""); }

  /** Register the function for tasks of a type. */
  task<Payload = any>(type: string, run: TaskFunction<Payload>): this;
  task<Payload, Result = any>(type: string, options: TaskOptions<Payload, Result>, run: TaskFunction<Payload, Given<Result>>): this;
  task(type: string, options: TaskOptions<any> | TaskFunction<any>, run?: TaskFunction<any>): this {
    const [told, work] = typeof options === "function" ? [{}, options] : [options, run];
    if (typeof work !== "function") throw new TypeError(`worker.task(${JSON.stringify(type)}, …) takes a function`);
    refuseUnknown(told, ["payload", "result", "description", "retry"], `worker.task(${JSON.stringify(type)}, …)`);
    if (this.#tasks.has(type)) throw new Error(`this worker has a function for ${JSON.stringify(type)}; a type has one`);
    this.#tasks.set(type, { run: work, options: told });
    if (this.#cut) void this.#declare([type]);
    this.#cut?.abort();     // the next claim asks for it
    return this;
  }

  /** Work until SIGTERM or SIGINT: then take no more tasks, finish the running ones, and give the rest back. */
  async run(): Promise<void> {
    const stop = (): void => this.stop();
    const { process } = globalThis as { process?: { [name in "on" | "off"]?: (signal: string, listener: () => void) => void } };
    for (const signal of ["SIGTERM", "SIGINT"]) process?.on?.(signal, stop);
    try {
      await this.serve();
    } finally {
      for (const signal of ["SIGTERM", "SIGINT"]) process?.off?.(signal, stop);
    }
  }

  /** Take no more tasks and finish the running ones within `drainSeconds`; a second call stops at once. */
  stop(): void { for (const each of [this.#stopping.signal.aborted ? this.#hurried : this.#stopping, this.#cut]) each?.abort(); }

  /** Work until `stop`, whatever signals the process gets. */
  async serve(): Promise<void> {
    if (this.#tasks.size === 0) throw new Error('this worker has no function; register one with worker.task("TYPE", …)');
    await this.#insist(() => this.#beNamed());
    if (!this.#me.worker_id) return;
    try {
      await this.#insist(() => this.#comeBack());
      this.#say(`asks ${this.#gate.url} for ${[...this.#tasks.keys()].join(", ")}`);
      void this.#declare(this.#tasks.keys());
      while (!this.#stopping.signal.aborted) await this.#turn();
      await this.#drain();
    } finally {
      await this.#leave();
      this.#console?.end();
    }
  }

  // Taking tasks.

  async #beNamed(): Promise<void> {
    const you = await this.#gate.whoami({}, { signal: this.#stopping.signal }), wanted = this.#options.workerId ?? "";
    const own = you.principal_id !== null && ["", you.principal_id].includes(wanted);
    const outlives = this.#options.state !== null, disk = await import("./state.js").catch(error => { if (outlives) throw error; return undefined; });
    this.#process = disk?.nameProcess();
    if (this.#options.keepLogs && !disk) throw new Error("keepLogs needs Node's modules, which this platform lacks");
    const worker_id = wanted || you.principal_id || this.#process?.replace(/:\d+$/, "") || "worker";
    this.#place = outlives && disk ? await disk.takePlace(this.#options.state ?? disk.defaultFolder(this.#gate.url), worker_id) : new MemoryPlace();
    this.#me = { worker_id, worker_instance_id: this.#place.instanceId, ...(own && { worker_kind: you.principal_kind as Me["worker_kind"] ?? null }) };
    this.#heart = new Heart(this.#gate, this.#me, this.#options.ttlSeconds ?? 30, this.#options.outageSeconds ?? 300);
    if (this.#options.keepLogs) this.#console ??= disk?.keepConsole(this.#options.keepLogs);
  }

  // Delivers the ends kept from earlier runs, and goes on under the leases of an earlier process.
  async #comeBack(): Promise<void> {
    const config = await this.#gate.getConfig();
    this.#instance = config.instance_id;
    this.#mostBytes = config.max_progress_bytes ?? this.#mostBytes;
    await this.#replay(this.#place);
    for await (const place of this.#place.abandoned()) await this.#replay(place);
    for (const lease of await this.#held(this.#claimId)) if (!this.#running.has(lease.lease_id)) await this.#resume(lease);
  }

  // Beside the work: a gate that does not want to know it is served all the same.
  async #declare(types: Iterable<string>): Promise<void> {
    if (this.#options.declare !== false) for (const type of types) await this.#insist(() => this.#declareType(type)).catch(error => this.#say(`the type ${type} is not declared: ${String(error)}`));
  }

  async #declareType(type: string): Promise<void> {
    const { description, payload, result } = (this.#tasks.get(type) as Task).options;
    const payload_schema = describeSchema(payload, "input"), result_schema = describeSchema(result, "output");
    if (payload_schema || result_schema || description !== undefined)
      await this.#gate.declareType({ ...this.#me, type, ...(description !== undefined && { description }), ...(payload_schema && { payload_schema }), ...(result_schema && { result_schema }) }).catch((error: unknown) => {
        if (!(error instanceof Refusal) || isTemporary(error)) throw error;
        this.#say(`the type ${type} is not declared: ${error.message}`);
      });
  }

  async #held(resumptionId?: string): Promise<LeaseRecord[]> {
    const told = new Set((await this.#place.letters()).map(letter => letter.fields["lease_id"]));
    const { leases } = await this.#gate.listLeases({ ...this.#me, ...(resumptionId ? { resumption_id: resumptionId } : { resume: false }) });
    return leases.filter(lease => !told.has(lease.lease_id));
  }

  async #resume(lease: LeaseRecord): Promise<void> {
    if (!this.#tasks.has(lease.type)) return await this.#release(lease);
    const task = await this.#gate.getTask({ ...this.#me, task_id: lease.task_id });
    this.#say(`task ${lease.task_id}: going on under the lease of an earlier process`);
    const { inputs } = await this.#gate.listInputs({ ...this.#me, task_id: lease.task_id });
    const answers = inputs.filter(input => input.state !== "open").map(input => [input.key, { action: input.state, content: input.content, by: input.answered_by, receipt_id: input.receipt_id }]);
    this.#begin({ ...task, ...lease, inputs: Object.fromEntries(answers), caused_by_receipt_id: task.obligation_receipt_id } as unknown as Offer);
  }

  async #turn(): Promise<void> {
    const most = this.#options.concurrency ?? 1;
    const full = (): boolean => this.#running.size >= most;
    while (full() && !this.#stopping.signal.aborted) await within(CLAIM_SECONDS, Promise.race([...this.#running.values()].map(each => each.done)), this.#stopping.signal);
    if (!this.#stopping.signal.aborted) await this.#insist(() => this.#claim(most - this.#running.size));
  }

  async #claim(room: number): Promise<void> {
    const { signal } = this.#cut = new AbortController();
    const left = await this.#replay(this.#place), asked = Date.now();
    // One that is cut off may have leased tasks: the next one has its id, and when the worker leaves they are given back.
    const claim = await this.#gate.leaseNext({
      ...this.#me, accept_types: [...this.#tasks.keys()], capabilities: [...this.#options.capabilities ?? []], max_tasks: room,
      lease_ttl_seconds: this.#heart.ttlSeconds, wait_seconds: left ? 1 : CLAIM_SECONDS, claim_id: this.#claimId,
      ...(this.#process && { process: this.#process }) }, { signal }).catch((error: unknown) => { if (!signal.aborted) throw error; });
    if (claim === undefined) return;
    const { tasks, warnings = [] } = claim;
    this.#claimed = true;
    this.#claimId = crypto.randomUUID();        // the answer has arrived; only a lost answer needs the same id again
    for (const text of warnings) if (!this.#warned.includes(text)) this.#say(text);
    this.#warned = warnings;
    for (const offer of tasks) this.#begin(offer);
    if (!tasks.length && Date.now() - asked < 50) await sleep(0.05, this.#stopping.signal);      // a gate that is stopping answers at once
  }

  // Calls until the call succeeds or the worker is told to stop; throws if no claim has succeeded and this shows that none can.
  async #insist(call: () => Promise<void>): Promise<void> {
    for (let failures = 1; !this.#stopping.signal.aborted; failures++) {
      try {
        await call();
        this.#tellAt = 0;
        return;
      } catch (error) {
        if (this.#stopping.signal.aborted) return;
        if (!this.#claimed && !isTemporary(error)) throw error;
        this.#sayAway(error);
        await sleep(Math.max(pauseAfter(failures, 0.5), error instanceof Refusal ? error.retryAfter ?? 0 : 0), this.#stopping.signal);
      }
    }
  }

  // A gate that restarts is away for a moment: that is not worth a line.
  #sayAway(error: unknown): void {
    const moment = Date.now() / 1000;
    if (!(error instanceof Unreachable)) this.#say(String(error));
    else if (!this.#tellAt) this.#tellAt = moment + QUIET_SECONDS;
    else if (moment > this.#tellAt) {
      this.#say(`${error.message}; retrying`);
      this.#tellAt = moment + AWAY_LOG_SECONDS;
    }
  }

  #say(text: string): void { (this.#options.log ?? (line => console.warn(line)))(`${this.workerId || "worker"}: ${text}`); }

  // Working on them.

  #begin(offer: Offer): void {
    if (this.#running.has(offer.lease_id)) return;
    const held = { ...this.#me, task_id: offer.task_id, lease_id: offer.lease_id, fence: offer.fence };
    const pulse = new Pulse(held, offer.renew_every_seconds, this.#heart);
    const job = new Job<unknown>(offer.payload, offer, { gate: this.#gate, me: this.#me, pulse, mostBytes: this.#mostBytes, say: text => this.#say(text) });
    this.#heart.keep(pulse);
    const running: Running = { job, settled: false, done: Promise.resolve() };
    running.done = this.#do(job, running).catch(error => this.#say(`task ${job.taskId}: ${String(error)}; its lease will run out`)).finally(() => {
      pulse.close();
      this.#running.delete(offer.lease_id);
    });
    this.#running.set(offer.lease_id, running);
  }

  async #do(job: Job, running: Running): Promise<void> {
    const task = this.#tasks.get(job.type) as Task;
    let letter: Letter;
    try {
      const payload = await this.#readPayload(task, job), run = (): unknown => task.run(payload, job);
      letter = this.#letter(job, "complete", await this.#completion(job, task, await (this.#console ? this.#console.run(line => job.log(line), run) : run())));
    } catch (error) {
      try { letter = this.#failure(job, task, error); } catch {
        letter = this.#letter(job, "fail", { error: { code: "error", message: "the function threw something that cannot be read" }, retryable: true });
      }
    } finally {
      running.settled = true;
    }
    if (job.lost) {
      if (job.lost !== "asked") this.#say(`task ${job.taskId}: dropped, the lease is lost (${job.lost})`);
      return;
    }
    await job.endOutput();
    await this.#deliver(job, letter);
  }

  async #readPayload(task: Task, job: Job): Promise<unknown> {
    const told = job as { payload: unknown }, { payloads } = this.#gate;
    if (payloads) told.payload = await payloads.fetchPayload(job.offer).catch((error: Error) => {
      if (error instanceof PayloadDamaged || error instanceof SyntaxError) throw new Fail(error.message, { code: "payload_damaged" });
      throw new Retry(`the store does not give the payload: ${error.message}`, { code: "payload_unavailable" });
    });
    return told.payload = await readValue(task.options.payload, job.payload, "the payload");
  }

  async #completion(job: Job, task: Task, value: unknown): Promise<Record<string, unknown>> {
    const { result: given, more } = value instanceof Done ? value : new Done(value);
    const result = await readValue(task.options.result, given, "the result");
    const artifacts = more.artifacts ?? (more.deliveryProof ? undefined : [{ type: "inline", uri: `asyncgate://${this.#instance}/tasks/${job.taskId}/result` }]);
    let fields: Record<string, unknown>;
    try {
      fields = JSON.parse(writeJson({ artifacts, delivery_proof: more.deliveryProof, result_summary: more.summary }, "Done")) as typeof fields;
      fields["result"] = JSON.parse(writeJson(result, "the result"));
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      throw new Fail(/^(the result|Done)\b/.test(why) ? why : `the result cannot be written as JSON: ${why}`, { code: "invalid_result" });
    }
    return await this.#gate.payloads?.stow("complete", fields).catch((error: Error) => {
      throw new Retry(`the store does not take the result: ${error.message}`, { code: "result_unavailable" });
    }) ?? fields;
  }

  #failure(job: Job, task: Task, error: unknown): Letter {
    if (error instanceof Park) {
      try {
        return this.#letter(job, "release_lease", JSON.parse(writeJson(job.makeParking(error), "job.park")) as Record<string, unknown>);
      } catch (flaw) { error = flaw; }
    }
    const { code, message, stack } = describe(error), retryable = mayRetry(task, error);
    const logged = stack?.split("\n").filter(line => /^\s+at /.test(line)).slice(0, LOGGED_LINES) ?? [];
    if (!job.lost) this.#say([`task ${job.taskId}: ${retryable ? `attempt ${job.attempt + 1} failed` : "failed for good"}: ${message}`, ...logged].join("\n"));
    const trace = this.#options.traces !== false && stack ? { traceback: stack } : {};
    const detail = error instanceof Fail ? asJson(error.options.detail) : undefined;
    const { after = NaN, stopLimit } = error instanceof Retry ? error.options : {};
    return this.#letter(job, "fail", { error: { code, message, ...trace, ...(detail !== undefined && { detail }) }, retryable, ...(after >= 0 && after < Infinity && { retry_after_seconds: after }), ...(stopLimit && { stop_limit: stopLimit }) });
  }

  #letter(job: Job, operation: Letter["operation"], fields: Record<string, unknown>): Letter {
    const { task_id, lease_id, fence } = job.offer;
    return { operation, fields: { ...this.#me, task_id, lease_id, fence, ...fields }, why: "the worker was stopped" };
  }

  // Reporting their ends.

  async #deliver(job: Job, letter: Letter): Promise<void> {
    let left: Letter | undefined = letter, kept: Letter | undefined, where = "";
    // On disk as soon as the gate does not take it at once: a worker that is killed meanwhile need not do the work again.
    const keep = async (next: Letter | undefined): Promise<void> => {
      const before = kept;
      if (next?.fields === before?.fields) return;
      if (next) where = await this.#place.keep(next);
      kept = next;
      if (before) await this.#place.forget(before);
    };
    for (let tries = 1; left && tries <= DELIVERY_TRIES && !isSuperseded(job) && !this.#hurried.signal.aborted; tries++) {
      const sending = this.#send(left);
      if (!await within(SLOW_SECONDS, sending)) await keep(left);
      const [rest, wait]: [Letter | undefined, number] = await sending;
      await keep(left = rest);
      if (left) await sleep(Math.max(wait, pauseAfter(tries, 0.75)), this.#hurried.signal);
    }
    await keep(isSuperseded(job) ? undefined : left);
    if (left && !isSuperseded(job)) this.#say(`task ${job.taskId}: its end is kept in ${where} until the gate has it: ${left.why}`);
  }

  // Sends a letter; gives what is left to send, and the seconds to wait before that.
  async #send(letter: Letter): Promise<[Letter | undefined, number]> {
    try {
      const { status } = await this.#gate.call(letter.operation, letter.fields as never, { patienceSeconds: 0, answerSeconds: 30 }) as { status?: string };
      if (letter.fields["retryable"] && status === "failed") this.#say(`task ${String(letter.fields["task_id"])}: that was its last attempt; it failed for good`);
      return [undefined, 0];
    } catch (error) {
      if (!(error instanceof Refusal)) return [{ ...letter, why: tell(error) }, 0];
      if (isTemporary(error) || error.status === 401 || error.status === 403) return [{ ...letter, why: error.message }, error.retryAfter ?? 0];
      const changed = makeFailure(letter, error);
      if (([400, 413].includes(error.status) || error.code === "invalid_state_transition") && changed) return [changed, 0];
      this.#say(`task ${String(letter.fields["task_id"])}: its end is dropped: ${error.message} (${error.reason ?? error.code})`);
      return [undefined, 0];
    }
  }

  // Sends the kept letters, each under its own lease; gives whether any is left.
  async #replay(place: MemoryPlace): Promise<boolean> {
    for (const letter of await place.letters()) {
      if (this.#running.has(String(letter.fields["lease_id"]))) continue;      // it is being delivered
      const [left] = await this.#send(letter);
      if (left && left.operation === letter.operation) return true;
      if (left) await place.keep(left);
      await place.forget(letter);
    }
    return false;
  }

  // Stopping.

  async #drain(): Promise<void> {
    if (this.#running.size) await within(this.#options.drainSeconds ?? 20, Promise.all([...this.#running.values()].map(each => each.done)), this.#hurried.signal);
  }

  // Stops the running jobs and gives all leases back, those of a claim whose answer was lost among them.
  async #leave(): Promise<void> {
    this.#hurried.abort();      // what is not delivered now is kept
    const left = [...this.#running.values()];
    for (const { job } of left) job.lose("stopping");
    if (left.length) await within(CANCEL_SECONDS, Promise.all(left.map(each => each.done)));
    const unfinished = new Set(left.filter(each => !each.settled).map(each => each.job.offer.lease_id));
    for (const { job, settled } of left) if (!settled) this.#say(`task ${job.taskId}: its function did not stop in time; the lease is kept until it runs out`);
    try {
      await this.#replay(this.#place);
      for (const lease of await this.#held()) if (!unfinished.has(lease.lease_id)) await this.#release(lease);
    } catch (error) {
      if (!(error instanceof Unreachable || error instanceof Refusal)) throw error;
    } finally {
      await this.#place.close();
    }
  }

  async #release({ task_id, lease_id }: LeaseRecord): Promise<void> {
    try {
      await this.#gate.releaseLease({ ...this.#me, task_id, lease_id });
    } catch (error) {
      if (!(error instanceof Refusal) || isTemporary(error)) throw error;
      this.#say(`task ${task_id}: its lease is not released: ${error.message}`);      // the others are released all the same
    }
  }
}

async function readValue(schema: StandardSchema<unknown, unknown> | undefined, value: unknown, what: string): Promise<unknown> {
  try {
    return await parse(schema, value, what);
  } catch (error) {
    if (error instanceof SchemaMismatch) throw new Fail(error.message, { code: `invalid_${what.slice(4)}`, detail: error.issues });
    throw error;
  }
}

function mayRetry(task: Task, error: unknown): boolean {
  if (error instanceof Retry || error instanceof Fail) return error instanceof Retry;
  if (error instanceof SyntaxError || error instanceof ReferenceError || error instanceof TooLarge || error instanceof StepsLost) return false;
  const { retry = true } = task.options;
  try { return Boolean(typeof retry === "function" ? retry(error) : retry); } catch { return true; }
}

function describe(error: unknown): { code: string; message: string; stack?: string } {
  const clean = (text: unknown): string => String(text).slice(0, MESSAGE_LENGTH).toWellFormed().replaceAll("\0", "\ufffd");
  const { code = "error", name, stack } = Object(error) as { code?: unknown; name?: unknown; stack?: unknown }, meant = error instanceof Fail || error instanceof Retry;
  return { code: clean(error instanceof Error && !meant ? name : code), message: clean(tell(error)), ...(typeof stack === "string" && !meant && { stack: clean(stack) }) };
}

// The words of an error and of its causes.
function tell(error: unknown, depth = 0): string {
  const { message, code, name, cause, errors } = Object(error) as Record<string, unknown>;
  const words = typeof message === "string" && message ? message : error instanceof Error ? String(code ?? name) : show(error);
  const inner = cause ?? (Array.isArray(errors) ? errors[0] as unknown : undefined), more = inner === undefined || depth >= MOST_CAUSES ? "" : tell(inner, depth + 1);
  return words.includes(more) ? words : `${words}: ${more}`;
}

function asJson(value: unknown): unknown {
  try { return value === undefined ? undefined : JSON.parse(writeClean(value)); } catch { return undefined; }
}

// An end that the gate refuses for good becomes a failure that says so.
function makeFailure({ operation, fields, why }: Letter, refusal: Refusal): Letter | undefined {
  const error = { code: refusal.code, message: `the gate refused the ${{ complete: "result", fail: "error", release_lease: "park" }[operation]}: ${refusal.message}` };
  if (operation === "fail" && (fields["error"] as { code?: string }).code === refusal.code) return undefined;
  const { task_id, lease_id, fence, worker_id, worker_kind, worker_instance_id, retryable = false } = fields;
  return { operation: "fail", fields: { worker_id, worker_kind, worker_instance_id, task_id, lease_id, fence, retryable, error }, why };
}

// "expired": the gate's clock decides, so try. An end: an earlier attempt of this worker may have done it.
function isSuperseded(job: Job): boolean { return job.lost !== "" && !["completed", "expired", "failed", "released", "stopping"].includes(job.lost); }
