/** The heartbeat of a worker: it renews leases, sends progress, and notices within two seconds that a lease is lost. */
import { LeaseInvalid, Refusal } from "./errors.js";
import { isTemporary, sleep } from "./http.js";
import type { Gate } from "./gate.js";

/** Who a worker is to the gate. */
export interface Me {
  worker_id: string;
  worker_kind?: "worker" | "agent" | "service" | "system" | "human" | "asyncgate" | null;
  worker_instance_id?: string | null;
}

/** What a call under a lease names. */
export type Held = Me & { task_id: string; lease_id: string; fence: number };

const LOOK_SECONDS = 2;
const GRACELESS = 0;

interface News { progress: Record<string, unknown>; waiting: { resolve(): void; reject(error: unknown): void }[] }

/** One lease: when it ends, when to renew it, and which progress is still to be sent. */
export class Pulse {
  /** Called once, when the lease is lost. */
  lost: (reason: string) => void = () => undefined;
  /** Whether the gate has marked the task as running. */
  running = false;
  closed = false;
  #until: number;
  #renewAt: number;
  #restUntil = 0;
  #grace = GRACELESS;       // seconds beyond its end, while the gate is away: it may give the time back
  #news: News | undefined;
  #wake = new AbortController();

  constructor(readonly held: Held, everySeconds: number, readonly heart: Heart) {
    this.#renewAt = now() + everySeconds;
    this.#until = now() + 3 * everySeconds;
  }

  /** Send progress as soon as possible; ends when the gate has it, or newer one. */
  tell(progress: Record<string, unknown>): Promise<void> {
    return new Promise((resolve, reject) => {
      if (this.closed) return reject(new Error("the task has ended"));
      this.#news = { progress, waiting: [...this.#news?.waiting ?? [], { resolve, reject }] };
      this.#wake.abort();
    });
  }

  /** Renew at the next opportunity: the gate no longer lists the lease, and its refusal says why. */
  hurry(): void {
    this.#renewAt = 0;
    this.#wake.abort();
  }

  /** Keep the lease until it is closed or lost. */
  async keep(): Promise<void> {
    while (!this.closed) {
      const end = this.#until + this.#grace, due = Math.max(this.#restUntil, this.#news ? 0 : this.#renewAt);
      if (now() >= end) return this.#end("expired");
      if (now() < due) {
        this.#wake = new AbortController();
        await sleep(Math.min(due, end) - now(), this.#wake.signal);
      } else if (this.#news) await this.#report(this.#news);
      else await this.#renew();
    }
  }

  /** Stop renewing the lease. */
  close(): void {
    this.closed = true;
    this.#settle(new Error("the task has ended"));
    this.#wake.abort();
  }

  /** Mark the task as running. */
  async start(): Promise<void> { this.running = await this.#say(() => this.heart.gate.startTask(this.held, { patienceSeconds: 0 })) !== undefined || this.running; }

  async #report(news: News): Promise<void> {
    const refused = (error: Refusal): void => { this.#heard(news, error); };
    if (await this.#say(() => this.heart.gate.reportProgress({ ...this.held, progress: news.progress }, { patienceSeconds: 0 }), refused)) {
      this.running = true;
      this.#heard(news);
    }
  }

  #heard(news: News, error?: Error): void {
    const told = news.waiting.splice(0);
    if (this.#news === news) this.#news = undefined;
    for (const waiter of told) error ? waiter.reject(error) : waiter.resolve();
  }

  #settle(error: Error): void { if (this.#news) this.#heard(this.#news, error); }

  async #renew(): Promise<void> {
    const asked = now();        // the gate's lease starts later, so this side ends it first
    const reply = await this.#say(() => this.heart.gate.renewLease({ ...this.held, extend_by_seconds: this.heart.ttlSeconds }, { patienceSeconds: 0 }),
      () => { this.#renewAt = this.#until; this.running = true; });     // it cannot be renewed any more, but it lasts until its end
    if (reply) {
      this.#until = asked + 3 * reply.renew_every_seconds;
      this.#renewAt = asked + reply.renew_every_seconds;
    }
  }

  // Calls an operation under the lease; gives undefined if that failed.
  async #say<T>(call: () => Promise<T>, refused?: (error: Refusal) => void): Promise<T | undefined> {
    try {
      const reply = await call();
      this.#grace = GRACELESS;
      return reply;
    } catch (error) {
      const away = !(error instanceof Refusal) || error.status >= 500 || error.code === "unexpected_answer";
      this.#grace = away ? this.heart.outageSeconds : GRACELESS;
      if (error instanceof LeaseInvalid || (error instanceof Refusal && error.code === "task_not_found")) this.#end(error.reason ?? "unknown");
      else if (away || isTemporary(error) || (error as Refusal).status === 401 || (error as Refusal).status === 403) this.#rest((error as Refusal).retryAfter ?? 1);
      else refused?.(error);
      return undefined;
    }
  }

  // So briefly that several attempts fit in before the lease runs out.
  #rest(seconds: number): void { this.#restUntil = now() + Math.min(seconds, Math.max(0.05, (this.#until + this.#grace - now()) / 4)); }

  #end(reason: string): void {
    if (this.closed) return;
    this.closed = true;
    this.lost(reason);
    this.#settle(new Error(`the lease is lost (${reason})`));
  }
}

/** Keeps the leases of one worker. */
export class Heart {
  readonly #pulses = new Set<Pulse>();
  #looking = false;

  constructor(readonly gate: Gate, readonly me: Me, readonly ttlSeconds: number, readonly outageSeconds: number) {}

  /** Keep a lease until it is closed. */
  keep(pulse: Pulse): void {
    this.#pulses.add(pulse);
    void pulse.keep().finally(() => this.#pulses.delete(pulse));
    if (!this.#looking) void this.#look();
  }

  // Finds lost leases long before their renewal, so that the work on a canceled task stops soon.
  async #look(): Promise<void> {
    this.#looking = true;
    for (await sleep(LOOK_SECONDS); this.#pulses.size > 0; await sleep(LOOK_SECONDS)) {
      const known = [...this.#pulses];
      try {
        const { leases } = await this.gate.listLeases({ ...this.me, resume: false }, { patienceSeconds: 0 });
        const live = new Set(leases.map(lease => lease.lease_id));
        for (const pulse of known) {
          if (!live.has(pulse.held.lease_id)) pulse.hurry();
          else if (!pulse.running && !pulse.closed) await pulse.start();
        }
      } catch { /* the renewals will show it */ }
    }
    this.#looking = false;
  }
}

function now(): number { return performance.now() / 1000; }
