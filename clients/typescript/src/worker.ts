/** A worker: it leases tasks, runs your function for each, and reports the result until the gate has received it. */
import { PayloadDamaged, Refusal, SchemaMismatch, Unreachable } from "./errors.js";
import { Gate, type GateOptions } from "./gate.js";
import { Heart, Pulse, type Me } from "./heart.js";
import { isTemporary, pauseAfter, sleep, writeJson } from "./http.js";
import { Done, Fail, Job, Park, Retry, StepsLost, TooLarge, type KeptConsole, type LogLevel } from "./job.js";
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
export interface TaskOptions<Payload> {
  /**
   * A schema of the payload, of zod, valibot or another library of Standard Schema: another payload fails the task.
   * Where the library says it as JSON schema, the gate refuses the payload when the task is created.
   */
  payload?: StandardSchema<unknown, Payload>;
  /** The same of the result. */
  result?: StandardSchema<any, any>;
  /** What such a task does, for agents that look for it. */
  description?: string;
  /** Whether an error allows another attempt; default: all but Fail and what no attempt can mend. */
  retry?: boolean | ((error: unknown) => boolean);
}

/** What runs for a task: its value is the result. */
export type TaskFunction<Payload = unknown> = (payload: Payload, job: Job<Payload>) => unknown;

interface Task { run: TaskFunction<any>; options: TaskOptions<any> }
interface Running { job: Job; done: Promise<void>; settled: boolean }

const CLAIM_SECONDS = 25;
const QUIET_SECONDS = 1;        // how long the gate may be away before that is said
const AWAY_LOG_SECONDS = 600;
const CANCEL_SECONDS = 10;      // what a function has to end in once its signal is aborted
const DELIVERY_TRIES = 50;      // about twenty seconds in all
const MESSAGE_LENGTH = 4000;

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
  #tellAt = 0;
  #warned: readonly string[] = [];

  constructor(options: WorkerOptions = {}) {
    if (options.concurrency !== undefined && !(options.concurrency >= 1)) throw new RangeError(`concurrency must be 1 or more, not ${options.concurrency}`);
    this.#options = options;
    this.#gate = new Gate({ patienceSeconds: 0, ...options });      // what is to be repeated is repeated here
  }

  /** The name of the worker; empty until the gate has told it, if none was given. */
  get workerId(): string { return this.#me.worker_id || (this.#options.workerId ?? ""); }

  /** Register the function for tasks of a type. */
  task<Payload = any>(type: string, run: TaskFunction<Payload>): this;
  task<Payload>(type: string, options: TaskOptions<Payload>, run: TaskFunction<Payload>): this;
  task(type: string, options: TaskOptions<any> | TaskFunction<any>, run?: TaskFunction<any>): this {
    const [told, work] = typeof options === "function" ? [{}, options] : [options, run];
    if (typeof work !== "function") throw new TypeError(`worker.task(${JSON.stringify(type)}, …) takes a function`);
    this.#tasks.set(type, { run: work, options: told });
    return this;
  }

  /** Work until SIGTERM or SIGINT: then take no more tasks, finish the running ones, and give the rest back. */
  async run(): Promise<void> {
    const stop = (): void => this.stop();
    const { process } = globalThis as { process?: { on?: Listen; off?: Listen } };
    for (const signal of ["SIGTERM", "SIGINT"]) process?.on?.(signal, stop);
    try {
      await this.serve();
    } finally {
      for (const signal of ["SIGTERM", "SIGINT"]) process?.off?.(signal, stop);
    }
  }

  /** Take no more tasks and finish the running ones within `drainSeconds`; a second call stops at once. */
  stop(): void { (this.#stopping.signal.aborted ? this.#hurried : this.#stopping).abort(); }

  /** Work until `stop`, whatever signals the process gets. */
  async serve(): Promise<void> {
    if (this.#tasks.size === 0) throw new Error('this worker has no function; register one with worker.task("TYPE", …)');
    await this.#insist(() => this.#beNamed());
    if (!this.#me.worker_id) return;
    try {
      await this.#insist(() => this.#comeBack());
      if (this.#options.declare !== false) void this.#insist(() => this.#declare()).catch(error => this.#say(`its types are not declared: ${String(error)}`));
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
  async #declare(): Promise<void> {
    for (const [type, { options }] of this.#tasks) {
      const payload_schema = describeSchema(options.payload, "input"), result_schema = describeSchema(options.result, "output");
      if (!payload_schema && !result_schema && options.description === undefined) continue;
      try {
        await this.#gate.declareType({ ...this.#me, type, ...(options.description !== undefined && { description: options.description }),
          ...(payload_schema && { payload_schema }), ...(result_schema && { result_schema }) });
      } catch (error) {
        if (!(error instanceof Refusal) || isTemporary(error)) throw error;
        this.#say(`the type ${type} is not declared: ${error.message}`);
      }
    }
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
    while (full() && !this.#stopping.signal.aborted) await Promise.race([...[...this.#running.values()].map(each => each.done), aborted(this.#stopping.signal)]);
    if (!this.#stopping.signal.aborted) await this.#insist(() => this.#claim(most - this.#running.size));
  }

  async #claim(room: number): Promise<void> {
    const left = await this.#replay(this.#place), asked = Date.now();
    // One that is cut off by stop may have leased tasks: they are given back when the worker leaves.
    const claim = this.#gate.leaseNext({
      ...this.#me, accept_types: [...this.#tasks.keys()], capabilities: [...this.#options.capabilities ?? []], max_tasks: room,
      lease_ttl_seconds: this.#heart.ttlSeconds, wait_seconds: left ? 1 : CLAIM_SECONDS, claim_id: this.#claimId,
      ...(this.#process && { process: this.#process }) }, { signal: this.#stopping.signal });
    const { tasks, warnings = [] } = await claim;
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
      letter = this.#failure(job, task, error);
    } finally {
      running.settled = true;
    }
    if (job.lost) {
      if (job.lost !== "input_required") this.#say(`task ${job.taskId}: dropped, the lease is lost (${job.lost})`);
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
    const fields: Record<string, unknown> = { artifacts, delivery_proof: more.deliveryProof, result_summary: more.summary };
    try {
      fields["result"] = JSON.parse(writeJson(result, "the result"));
    } catch (error) {
      throw new Fail(`the result cannot be written as JSON: ${String(error)}`, { code: "invalid_result" });
    }
    return await this.#gate.payloads?.stow("complete", fields).catch((error: Error) => {
      throw new Retry(`the store does not take the result: ${error.message}`, { code: "result_unavailable" });
    }) ?? fields;
  }

  #failure(job: Job, task: Task, error: unknown): Letter {
    if (error instanceof Park) {
      try {
        return this.#letter(job, "release_lease", job.makeParking(error));
      } catch (tooLarge) { error = tooLarge; }
    }
    const { code, message, stack } = describe(error);
    const retryable = mayRetry(task, error);
    if (!job.lost) this.#say(`task ${job.taskId}: ${retryable ? "this attempt failed, and another may follow" : "failed for good"}: ${message}`);
    const trace = this.#options.traces !== false && stack && !(error instanceof Fail || error instanceof Retry) ? { traceback: stack } : {};
    const detail = error instanceof Fail && error.options.detail !== undefined ? { detail: error.options.detail } : {};
    return this.#letter(job, "fail", { error: { code, message, ...trace, ...detail }, retryable, ...(error instanceof Retry && { retry_after_seconds: error.options.after, ...(error.options.stopLimit && { stop_limit: error.options.stopLimit }) }) });
  }

  #letter(job: Job, operation: Letter["operation"], fields: Record<string, unknown>): Letter {
    const { task_id, lease_id, fence } = job.offer;
    return { operation, fields: { ...this.#me, task_id, lease_id, fence, ...fields }, why: "the worker was stopped" };
  }

  // Reporting their ends.

  async #deliver(job: Job, letter: Letter | undefined): Promise<void> {
    for (let tries = 1; letter && tries <= DELIVERY_TRIES && !isSuperseded(job) && !this.#hurried.signal.aborted; tries++) {
      const [left, wait]: [Letter | undefined, number] = await this.#send(letter);
      letter = left;
      if (letter) await sleep(Math.max(wait, pauseAfter(tries, 0.75)), this.#hurried.signal);
    }
    if (letter && !isSuperseded(job)) this.#say(`task ${job.taskId}: its end is kept in ${await this.#place.keep(letter)} until the gate has it: ${letter.why}`);
  }

  // Sends a letter; gives what is left to send, and the seconds to wait before that.
  async #send(letter: Letter): Promise<[Letter | undefined, number]> {
    try {
      await this.#gate.call(letter.operation, letter.fields as never, { patienceSeconds: 0, answerSeconds: 30 });
      return [undefined, 0];
    } catch (error) {
      if (error instanceof Unreachable) return [{ ...letter, why: error.message }, 0];
      if (!(error instanceof Refusal)) throw error;
      if (isTemporary(error) || error.status === 401 || error.status === 403) return [{ ...letter, why: error.message }, error.retryAfter ?? 0];
      const changed = makeFailure(letter, error);
      if ([400, 413].includes(error.status) && changed) return [changed, 0];
      this.#say(`task ${String(letter.fields["task_id"])}: its end is dropped: ${error.message} (${error.reason ?? error.code})`);
      return [undefined, 0];
    }
  }

  // Sends the kept letters, each under its own lease; gives whether any is left.
  async #replay(place: MemoryPlace): Promise<boolean> {
    for (const letter of await place.letters()) {
      const [left] = await this.#send(letter);
      if (left && left.operation === letter.operation) return true;
      if (left) await place.keep(left);
      await place.forget(letter);
    }
    return false;
  }

  // Stopping.

  async #drain(): Promise<void> {
    const ended = new AbortController(), hurry = (): void => ended.abort();
    this.#hurried.signal.addEventListener("abort", hurry);
    void Promise.all([...this.#running.values()].map(each => each.done)).then(hurry);
    if (this.#running.size) await sleep(this.#options.drainSeconds ?? 20, ended.signal);
  }

  // Stops the running jobs and gives all leases back, those of a claim whose answer was lost among them.
  async #leave(): Promise<void> {
    this.#hurried.abort();      // what is not delivered now is kept
    const left = [...this.#running.values()];
    for (const { job } of left) job.lose("stopping");
    const ended = new AbortController();
    void Promise.all(left.map(each => each.done)).then(() => ended.abort());
    if (left.length) await sleep(CANCEL_SECONDS, ended.signal);
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

type Listen = (signal: string, listener: () => void) => void;

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
  return typeof retry === "function" ? retry(error) : retry;
}

function describe(error: unknown): { code: string; message: string; stack?: string } {
  const clean = (text: string): string => text.slice(0, MESSAGE_LENGTH).toWellFormed().replaceAll("\0", "\ufffd");
  if (!(error instanceof Error)) return { code: "error", message: clean(String(error)) };
  const code = error instanceof Fail || error instanceof Retry ? error.code : error.name;
  return { code: clean(code), message: clean(error.message || error.name), ...(error.stack && { stack: clean(error.stack) }) };
}

// An end that the gate refuses for good becomes a failure that says so.
function makeFailure({ operation, fields, why }: Letter, refusal: Refusal): Letter | undefined {
  const error = { code: refusal.code, message: `the gate refused the ${{ complete: "result", fail: "error", release_lease: "checkpoint" }[operation]}: ${refusal.message}` };
  if (operation === "fail" && (fields["error"] as { code?: string }).code === refusal.code) return undefined;
  const { task_id, lease_id, fence, worker_id, worker_kind, worker_instance_id, retryable = false } = fields;
  return { operation: "fail", fields: { worker_id, worker_kind, worker_instance_id, task_id, lease_id, fence, retryable, error }, why };
}

// "expired": the gate's clock decides, so try. "completed": an earlier attempt of this worker may have done it.
function isSuperseded(job: Job): boolean { return job.lost !== "" && !["completed", "expired", "stopping"].includes(job.lost); }

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise(resolve => { if (signal.aborted) resolve(); else signal.addEventListener("abort", () => resolve(), { once: true }); });
}
