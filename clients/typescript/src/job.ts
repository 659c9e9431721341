/** One task of a worker: what its function gets, may return, and may throw. */
import { AsyncGateError, LeaseInvalid, Refusal, type Conflict } from "./errors.js";
import type { Me, Pulse } from "./heart.js";
import { isTemporary, pauseAfter, sleep, writeJson } from "./http.js";
import type { Addressee, Children, Input, Offer, OnExpiry, UntilChildren } from "./operations.js";
import { Printer, toPart } from "./output.js";
import type { Gate } from "./gate.js";

const LOSSES: Readonly<Record<string, string>> = {
  asked: "the task waits for an answer", canceled: "the task was canceled", completed: "the task has ended", expired: "it has run out",
  failed: "the attempt has failed", released: "it was given back", stopping: "this worker stops", superseded: "another worker has the task",
  withdrawn: "the ledger has no receipt of it" };
const LOG_BYTES = 100_000;      // of log lines that one run may keep

/** How grave a line of the console has to be. */
export type LogLevel = "debug" | "info" | "warn" | "error";

/** Runs functions whose lines are kept. */
export interface KeptConsole { run<T>(keep: (line: string) => void, work: () => T): T; end(): void }

/** Return it from a task function that has more than its result. */
export class Done<Result = unknown> {
  constructor(readonly result: Result, readonly more: {
    /** Where the result lies, such as `[{ type: "s3", uri: "s3://…" }]`; default: in the task. */
    artifacts?: unknown;
    /** Proof that the result was delivered elsewhere. */
    deliveryProof?: Record<string, unknown>;
    /** The result in a few words. */
    summary?: string;
  } = {}) {}
}

/** Throw it: the task has failed, and no other attempt can succeed. */
export class Fail extends AsyncGateError { constructor(message: string, readonly options: { code?: string; detail?: unknown; cause?: unknown } = {}) { super(options.code ?? "failed", message, options); } }

/** Throw it: this attempt failed, another may succeed, at the earliest `after` seconds from now. */
export class Retry extends AsyncGateError {
  constructor(message = "try again", readonly options: { after?: number; code?: string; stopLimit?: string; cause?: unknown } = {}) { super(options.code ?? "retry", message, options); }
}

/** Until when a task waits without a lease. */
export interface ParkOptions {
  /** For so many seconds. */
  after?: number;
  until?: Date;
  /** Until all children have ended, or any more; with a time, until that at most. */
  children?: UntilChildren;
  reason?: string;
  /** For the next run, as job.save. */
  checkpoint?: unknown;
}

/** Throw it, or call job.park: the task is offered again later, or when children have ended; it costs no attempt. */
export class Park extends AsyncGateError {
  constructor(readonly options: ParkOptions) {
    super("parked", options.reason ?? "parked");
    const { after, until, children } = options;
    if ((after !== undefined && until) || (after === undefined && !until && !children))
      throw new TypeError('park takes after (seconds) or until (a Date), or children ("all" or "any")');
  }
}

/** The lease is gone, so the work is another worker's, or nobody's: the reason of job.signal. */
export class Lost extends AsyncGateError { constructor(readonly reason: string) { super("lost", `the lease is lost: ${LOSSES[reason] ?? reason}`); } }

/** The next step of a function is not the one that an earlier run recorded under its number. */
export class StepMismatch extends AsyncGateError { constructor(message: string) { super("step_mismatch", message); } }

/** What an earlier run recorded is not there any more, because the gate was rebuilt from its receipts. */
export class StepsLost extends StepMismatch {}

/** A checkpoint, a report or the value of a step is larger than the gate takes. */
export class TooLarge extends AsyncGateError { constructor(message: string) { super("too_large", message); } }

/** A question to somebody. */
export interface Question {
  /** What is asked, for people. */
  message: string;
  /** A JSON schema of the answer's content. */
  schema?: Record<string, unknown>;
  /** Who is asked; default: the owner of the task. */
  to?: Addressee;
  expiresInSeconds?: number;
  /** What happens if nobody answers in time; default: the task is offered again. */
  onExpiry?: OnExpiry;
}

// Ends a function whose task waits for an answer; only the worker sees it.
export class Asked extends Lost { constructor() { super("asked"); } }

interface JobParts { gate: Gate; me: Me; pulse: Pulse; mostBytes: number; say: (text: string) => void }

/** A task on lease, as its function sees it. */
export class Job<Payload = unknown> {
  /** What an earlier run has saved last; of any type, so check what you read. */
  readonly checkpoint: unknown;
  readonly #abort = new AbortController();
  readonly #parts: JobParts;
  readonly #held: Me & { task_id: string; lease_id: string; fence: number };
  readonly #printer: Printer;
  #report: Record<string, unknown> = {};
  #saved: unknown;
  #steps = 0;
  #logLeft = LOG_BYTES;
  #recorded: Promise<Map<number, readonly [string, unknown]>> | undefined;

  constructor(readonly payload: Payload, readonly offer: Offer, parts: JobParts) {
    const before = offer.progress as { checkpoint?: unknown } | null;
    this.checkpoint = this.#saved = typeof before === "object" && before !== null ? before.checkpoint : undefined;
    this.#parts = parts;
    this.#held = { ...parts.me, task_id: offer.task_id, lease_id: offer.lease_id, fence: offer.fence };
    this.#printer = new Printer(async (chunks, position, stream) =>
      (await this.#insist(() => this.#parts.gate.appendOutput({ ...this.#held, chunks, position, stream }, { signal: this.signal }))).chunks,
    offer.chunks ?? 0, (what, error) => { if (!this.lost) parts.say(`task ${this.taskId}: ${what} is not sent: ${String(error)}`); });
    parts.pulse.lost = reason => this.lose(reason);
  }

  get taskId(): string { return this.offer.task_id; }
  get type(): string { return this.offer.type; }

  /** How many attempts have failed before this one. */
  get attempt(): number { return this.offer.attempt; }

  /** The latest progress of an earlier run. */
  get progress(): unknown { return this.offer.progress; }

  /** Aborted when the task is canceled, the lease is lost or the worker stops; pass it to fetch and others. */
  get signal(): AbortSignal { return this.#abort.signal; }

  /** Its children, and how the last ones of them ended; undefined if it has none. */
  get children(): Children | undefined { return this.offer.children; }

  /** The answers to what earlier runs asked, by key. */
  get inputs(): Readonly<Record<string, Input>> { return this.offer.inputs ?? {}; }

  /** Why the lease is lost; empty while it is not. */
  get lost(): string { return this.signal.aborted ? (this.signal.reason as Lost).reason : ""; }

  /** Report progress to people. Newer progress replaces older; await it only to know that the gate has it. */
  report(progress: unknown): Promise<void> {
    const told = typeof progress === "object" && progress !== null && !Array.isArray(progress) ? progress as Record<string, unknown> : { progress };
    return this.#tell(told, this.#saved);
  }

  /** Save a checkpoint from which the next worker goes on if this one dies. Await it to know that the gate has it. */
  save(checkpoint: unknown): Promise<void> { return this.#tell(this.#report, checkpoint); }

  #tell(report: Record<string, unknown>, checkpoint: unknown): Promise<void> {
    const sent = (async () => {
      this.signal.throwIfAborted();
      await this.#parts.pulse.tell(this.#note(report, checkpoint));
    })();
    sent.catch(() => undefined);    // who does not await it learns of a lost lease by the signal
    return sent;
  }

  #note(report: Record<string, unknown>, checkpoint: unknown): Record<string, unknown> {
    const progress = checkpoint === undefined ? report : { ...report, checkpoint };
    const bytes = new TextEncoder().encode(writeJson(progress, "progress")).length;
    if (bytes > this.#parts.mostBytes)
      throw new TooLarge(`report and checkpoint of task ${this.taskId} have ${bytes} bytes, and the gate takes ${this.#parts.mostBytes} (max_progress_bytes): record what is done by job.step, or save a pointer`);
    this.#report = report;
    this.#saved = checkpoint;
    return progress;
  }

  /** Print to the output of the task, which others follow with handle.stream(). Await it to print no faster than the gate takes it. */
  print(...values: unknown[]): Promise<void> {
    return this.signal.aborted ? Promise.resolve() : this.#printer.print(`${values.map(show).join(" ")}\n`);
  }

  /** Keep a line of a log with the task, beside its output: 100 KB in one run; what comes after is left out. */
  log(text: string): void {
    if (this.#logLeft <= 0 || this.signal.aborted) return;
    this.#logLeft -= new TextEncoder().encode(text).length + 1;
    void this.#printer.print(`${text}\n${this.#logLeft > 0 ? "" : "(further lines of this run are not kept)\n"}`, "log");
  }

  /** Say something to whoever follows the task, as a message of its own in A2A: texts, parts as A2A has them, or other JSON. */
  message(...parts: unknown[]): Promise<void> { return this.#append({ role: "ROLE_AGENT", parts: parts.map(toPart) }); }

  /** Give an artifact of a name while the task is worked on, or append to it; without `append` it is replaced. */
  artifact(parts: readonly unknown[], { name = "artifact", append = false }: { name?: string; append?: boolean } = {}): Promise<void> {
    return this.#append({ artifactId: name, append, parts: parts.map(toPart) });
  }

  async #append(chunk: unknown): Promise<void> {
    this.signal.throwIfAborted();
    await this.#printer.append(chunk);
  }

  /** Append each chunk to the output of the task, and give it on: `for await (const token of job.stream(tokens))`. */
  async *stream<Chunk>(chunks: Iterable<Chunk> | AsyncIterable<Chunk>): AsyncGenerator<Chunk, void, undefined> {
    for await (const chunk of chunks) {
      await this.#append(chunk);
      yield chunk;
    }
  }

  /** Wait until what was printed is at the gate, so that it stands before the end of the task. */
  endOutput(): Promise<void> { return this.#printer.end(); }

  /**
   * Do something unless an earlier run of the task has done it: `await job.step("fetch", () => fetchIt())`. The gate keeps what each step
   * gave, as JSON; take the same steps in the same order each time. A worker that dies between a step and its record does it again.
   */
  async step<Value>(name: string, work: () => Value | Promise<Value>): Promise<Value> {
    const seq = ++this.#steps;
    this.signal.throwIfAborted();
    this.#recorded ??= this.#readSteps();
    const recorded = (await this.#recorded).get(seq);
    if (recorded && recorded[0] !== name)
      throw new StepMismatch(`step ${seq} of task ${this.taskId} was recorded as ${JSON.stringify(recorded[0])}, and is ${JSON.stringify(name)} now: a function takes its steps in the same order each time; let the code that began such tasks end them, or cancel them`);
    if (recorded) return recorded[1] as Value;
    const text = writeJson(await work(), `step ${name}`), value = JSON.parse(text) as Value;
    const reply = await this.#insist(() => this.#parts.gate.recordStep({ ...this.#held, seq, name, value }, { signal: this.signal }), `what step ${name} gave`);
    return (reply.replayed ? reply.value : value) as Value;
  }

  async #readSteps(): Promise<Map<number, readonly [string, unknown]>> {
    const known = new Map<number, readonly [string, unknown]>();
    if (this.offer.steps_lost)
      throw new StepsLost(`what an earlier run of task ${this.taskId} recorded is lost, because the gate was rebuilt from its receipts: check what is done, and create a new task for the rest`);
    if (!this.offer.steps) return known;
    return await this.#insist(async () => {
      for await (const step of this.#parts.gate.each("list_steps", { ...this.#parts.me, task_id: this.taskId, limit: 200 }, { signal: this.signal })) known.set(step.seq, [step.name, step.value]);
      return known;
    });
  }

  /**
   * Ask somebody. The first time this ends the run without a lease; when there is an answer, the task is offered again,
   * the function runs anew, and this returns the answer at once. Do what must not be done twice in steps before it.
   */
  async ask(key: string, question: Question & { checkpoint?: unknown }): Promise<Input> {
    const known = this.inputs[key];
    if (known) return known;
    this.signal.throwIfAborted();
    const checkpoint = question.checkpoint === undefined ? this.#saved : question.checkpoint;
    const progress = this.#note(this.#report, checkpoint);
    await this.#printer.flush();
    const reply = await this.#insist(() => this.#parts.gate.requestInput({
      ...this.#held, key, message: question.message, schema: question.schema ?? null, to: question.to ?? null,
      expires_in_seconds: question.expiresInSeconds ?? null, on_expiry: question.onExpiry ?? null,
      ...(Object.keys(progress).length > 0 && { checkpoint: progress }) }, { signal: this.signal }));
    if (reply.input) return reply.input;
    const asked = new Asked();
    this.#abort.abort(asked);
    throw asked;
  }

  /** End this run and let the task be offered again later, or when children have ended; that costs no attempt. */
  park(options: ParkOptions): never { throw new Park(options); }

  /** What release_lease is told to park the task. */
  makeParking({ options }: Park): Record<string, unknown> {
    const progress = this.#note(this.#report, options.checkpoint === undefined ? this.#saved : options.checkpoint);
    return { after_seconds: options.after, until: options.until?.toISOString(), until_children: options.children, reason: options.reason, ...(Object.keys(progress).length > 0 && { checkpoint: progress }) };
  }

  /** Stop the work: the lease is gone. */
  lose(reason: string): void { if (!this.signal.aborted) this.#abort.abort(new Lost(reason)); }

  // Calls until the gate answers, or the lease is lost.
  async #insist<T>(call: () => Promise<T>, what = "the request"): Promise<T> {
    for (let failures = 1; ; failures++) {
      this.signal.throwIfAborted();
      try {
        return await call();
      } catch (error) {
        this.signal.throwIfAborted();
        if (error instanceof LeaseInvalid) this.lose(error.reason ?? "unknown");
        else if (error instanceof Refusal && error.code === "step_conflict") throw new StepMismatch((error as Conflict).message);
        else if (error instanceof Refusal && error.status === 413) throw new TooLarge(`${what} is too large for the gate (${error.message}): keep it elsewhere, and give its address instead`);
        else if (!isTemporary(error) || (error instanceof Refusal && error.code === "quota_exceeded")) throw error;
        await sleep(pauseAfter(failures, 0.5) + (error instanceof Refusal ? error.retryAfter ?? 0 : 0), this.signal);
      }
    }
  }
}

/** A value for people to read. */
export function show(value: unknown): string {
  if (typeof value !== "object" || value instanceof Error) return String(value);
  try { return JSON.stringify(value); } catch { return String(value); }
}
