/** Calls of a gate over HTTP: one request each, repeated while that is safe and time is left. */
import { makeRefusal, NotAGate, Refusal, Unreachable } from "./errors.js";
import { CALLS, type OperationName, type Operations } from "./operations.js";

/** How to reach a gate; what is left out comes from the environment. */
export interface ConnectOptions {
  /** The gate; default: ASYNCGATE_URL, or http://127.0.0.1:8080. */
  url?: string;
  /** The credential, or what gives it before each call; default: ASYNCGATE_API_KEY. */
  key?: string | (() => string | Promise<string>);
  /** How long one call may take with all its repetitions, besides its `wait_seconds`; default 30. */
  patienceSeconds?: number;
  /** Another fetch than that of the platform. */
  fetch?: typeof globalThis.fetch;
}

/** How one call is made. */
export interface CallOptions {
  /** Ends the call; it may have been carried out. */
  signal?: AbortSignal;
  /** As that of the client, for this call; 0 makes one attempt. */
  patienceSeconds?: number;
  /** What each attempt has at least to be answered, besides `wait_seconds`; default 5. */
  answerSeconds?: number;
}

export const DEFAULT_URL = "http://127.0.0.1:8080";
const NOT_DONE = new Set([408, 429, 503]);      // the gate did nothing
const OUTCOME_UNKNOWN = new Set(["database_unavailable", "unexpected_answer"]);
const NOT_SENT = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "UND_ERR_CONNECT_TIMEOUT", "ConnectionRefused"]);
const TIMER_MILLISECONDS = 2 ** 31 - 1;     // the longest timer: one that is set for longer ends at once
const PROMPT_SECONDS = 0.05;     // an answer that comes sooner has not waited
const LOSSY = [Map, Set, RegExp, Error, Promise, ArrayBuffer];       // JSON.stringify writes {} for them
const PRIVATE = /^(localhost|127(\.\d+){3}|\[::1\])$/;

/** Read a variable of the environment, where there is one. */
export function readEnvironment(name: string): string | undefined {
  return (globalThis as { process?: { env?: Record<string, string | undefined> } }).process?.env?.[name] || undefined;
}

/** Call a function after so many seconds, also if that is longer than a timer lasts; gives what prevents it. */
export function callAfter(seconds: number, work: () => void): () => void {
  let timer: ReturnType<typeof setTimeout>;
  const wait = (left: number): void => { timer = setTimeout(left > TIMER_MILLISECONDS ? () => wait(left - TIMER_MILLISECONDS) : work, Math.min(left, TIMER_MILLISECONDS)); };
  wait(Math.max(0, seconds) * 1000);
  return () => clearTimeout(timer);
}

/** Wait; ends early, without an error, when the signal is aborted. */
export function sleep(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise(resolve => {
    if (signal?.aborted) return resolve();
    const end = (): void => { forget(); signal?.removeEventListener("abort", end); resolve(); };
    const forget = callAfter(seconds, end);
    signal?.addEventListener("abort", end);
  });
}

/** Wait for the end of something, so long at most and until the signal is aborted; gives whether it has ended. */
export async function within(seconds: number, work: Promise<unknown>, signal?: AbortSignal): Promise<boolean> {
  const ended = new AbortController(), end = (): void => ended.abort();
  let done = false;
  void work.catch(() => undefined).then(() => { done = true; end(); });
  signal?.addEventListener("abort", end);
  if (!signal?.aborted) await sleep(seconds, ended.signal);
  signal?.removeEventListener("abort", end);
  return done;
}

/** A random pause in seconds that grows with each failure, so that clients do not all return at once. */
export function pauseAfter(failures: number, least = 0): number {
  const longest = failures <= 60 ? Math.min(0.05 * 2 ** Math.min(failures - 1, 16), 0.5) : Math.min(0.5 * 2 ** Math.min(failures - 60, 16), 5);
  return longest * (least + Math.random() * (1 - least));
}

/** Write JSON; throws TypeError, with the path below `what`, for what JSON cannot express, instead of losing it. */
export function writeJson(value: unknown, what = "the value"): string {
  const trail: { holder: unknown; path: string }[] = [];      // from the value down to where JSON.stringify is now
  return JSON.stringify(value === undefined ? null : value, function (this: unknown, name, inner: unknown) {
    while (trail.length && trail.at(-1)?.holder !== this) trail.pop();
    const above = trail.at(-1), step = Array.isArray(this) ? `[${name}]` : above?.path ? `.${name}` : name, path = (): string => above ? above.path + step : what;
    if (typeof inner === "number" && !Number.isFinite(inner)) throw new TypeError(`${path()} is ${inner}: JSON has no such number`);
    if (inner === null && (this as Record<string, unknown>)[name] instanceof Date) throw new TypeError(`${path()} is an invalid Date`);
    if (typeof inner === "bigint" || (!above && ["function", "symbol", "undefined"].includes(typeof inner)) || LOSSY.some(kind => inner instanceof kind) || ArrayBuffer.isView(inner))
      throw new TypeError(`${path()} cannot be written as JSON: it is a ${typeof inner === "object" ? (inner as object).constructor.name : typeof inner}`);
    if (typeof inner === "object" && inner !== null) trail.push({ holder: inner, path: path() });
    return inner;
  });
}

/** The JSON of a value without NUL and lone surrogates, which no gate stores. */
export function writeClean(value: unknown, what?: string): string {
  return writeJson(value, what).replace(/\\(u0000|ud[89a-f]..|.)/g, (escape, code: string) => code.length > 1 ? "\ufffd" : escape);
}

/** Refuse options that nothing reads, such as one that is misspelt. */
export function refuseUnknown(options: object, known: readonly string[], whose: string): void {
  const name = Object.keys(options).find(each => !known.includes(each));
  if (name !== undefined) throw new TypeError(`${whose} has no option ${name}; it has ${known.join(", ")}`);
}

/** Whether an error may go away by itself, so that a program that waits goes on waiting. */
export function isTemporary(error: unknown): boolean {
  if (error instanceof Refusal) return error.status >= 500 || NOT_DONE.has(error.status) || error.code === "unexpected_answer";
  return error instanceof Unreachable && !(error instanceof NotAGate);
}

/** The connection of a client: where the gate is, the credential, and when to call again. */
export class Connection {
  readonly url: string;
  readonly patienceSeconds: number;
  readonly #key: ConnectOptions["key"];
  readonly #fetch: typeof globalThis.fetch;

  constructor(options: ConnectOptions = {}) {
    const url = (options.url ?? readEnvironment("ASYNCGATE_URL") ?? DEFAULT_URL).replace(/\/+$/, "").replace(/\/(v1|mcp|docs)$/, "");
    const where = URL.canParse(url) ? new URL(url) : undefined;
    if (where?.username || where?.password) throw new TypeError("a gate's URL has no credential in it; give it as `key`");
    if (!where || !/^https?:$/.test(where.protocol)) throw new TypeError(`a gate's URL is like ${DEFAULT_URL}, not ${JSON.stringify(url)}`);
    this.url = url;
    this.patienceSeconds = options.patienceSeconds ?? 30;
    this.#key = options.key ?? readEnvironment("ASYNCGATE_API_KEY");
    if (typeof this.#key === "string") checkKey(this.#key);
    if (this.#key && where.protocol === "http:" && !PRIVATE.test(where.hostname) && !/^(1|true|yes)$/i.test(readEnvironment("ASYNCGATE_PLAIN_HTTP") ?? ""))
      throw new TypeError(`${url} is plain HTTP, so anybody on the network could read the credential: use https://, or set ASYNCGATE_PLAIN_HTTP=true if the network is your own`);
    this.#fetch = options.fetch ?? ((...given) => globalThis.fetch(...given));
  }

  /** Call an operation, again and again while that is safe and time is left. */
  async call<N extends OperationName>(operation: N, fields: Operations[N]["takes"], options: CallOptions = {}): Promise<Operations[N]["gives"]> {
    const { signal } = options, began = Date.now();
    const told = addRepeatKeys(operation, fields as Record<string, unknown>);
    const waits = Number(told["wait_seconds"] ?? (operation === "run_task" ? 30 : 0));
    const until = began + 1000 * (waits + (options.patienceSeconds ?? this.patienceSeconds));
    for (let failures = 1; ; failures++) {
      const asked = Date.now();
      const waitsLeft = Math.max(0, waits - (asked - began) / 1000);
      if (failures > 1 && waits) told["wait_seconds"] = waitsLeft;
      try {
        return await this.send(operation, told, { seconds: Math.max((until - asked) / 1000, waitsLeft + (options.answerSeconds ?? 5)), ...(signal && { signal }) });
      } catch (error) {
        signal?.throwIfAborted();
        // A gate that restarts cuts waiting calls off, and may be back already.
        const cutOff = failures === 1 && error instanceof Unreachable && waits > 0 && Date.now() - asked > 1000 * PROMPT_SECONDS;
        const pause = (cutOff ? 0 : pauseAfter(failures)) + (error instanceof Refusal ? error.retryAfter ?? 0 : 0);
        if (!mayRepeat(error, CALLS[operation][2]) || Date.now() + 1000 * pause >= until) throw error;
        await sleep(pause, signal);
        signal?.throwIfAborted();
      }
    }
  }

  /** Call an operation once; throws Refusal, NotAGate or Unreachable. */
  async send<N extends OperationName>(operation: N, fields: Operations[N]["takes"], how: { seconds: number; signal?: AbortSignal }): Promise<Operations[N]["gives"]> {
    const [verb, path] = CALLS[operation];
    const rest: Record<string, unknown> = {};
    let target: string = path;
    for (const [name, value] of Object.entries(fields)) {
      if (value === undefined || (value === null && name !== "payload")) continue;
      if (target.includes(`{${name}}`)) target = target.replace(`{${name}}`, quoteId(name, String(value)));
      else rest[name] = value;
    }
    const missing = /\{(\w+)\}/.exec(target)?.[1];
    if (missing) throw new TypeError(`${operation} needs the field ${missing}`);
    const query = verb === "GET" ? new URLSearchParams(Object.entries(rest).map(([name, value]) => [name, typeof value === "string" ? value : writeJson(value, name)])).toString() : "";
    const request: RequestInit = verb === "GET" ? { method: verb } : { method: verb, body: writeJson(rest, ""), headers: { "content-type": "application/json" } };
    const response = await this.open(target + (query && `?${query}`), request, how);
    try {
      return readReply(this.url, operation, response.status, response.headers, await response.text()) as Operations[N]["gives"];
    } catch (error) {
      if (error instanceof Refusal || error instanceof NotAGate || how.signal?.aborted) throw error;
      throw new Unreachable(`the connection to ${this.url} broke before the answer was complete`, true, error);
    } finally {
      response.close();
    }
  }

  /** Throw the refusal that an answer is; return if it is none. */
  async readRefusal(response: Response): Promise<void> {
    readReply(this.url, "the stream", response.status, response.headers, response.ok ? "{}" : await response.text());
  }

  /** Send a request with the credential; `close` frees what watches over it. */
  async open(path: string, request: RequestInit, how: { seconds: number; signal?: AbortSignal }): Promise<Response & { close(): void }> {
    how.signal?.throwIfAborted();
    const key = typeof this.#key === "function" ? await this.#key() : this.#key;
    if (key) checkKey(key);
    const headers = { ...(request.headers as Record<string, string>), ...(key && { authorization: `Bearer ${key}` }) };
    const stop = new AbortController(), pass = (): void => stop.abort(how.signal?.reason);
    const forget = how.seconds < Infinity ? callAfter(how.seconds, () => stop.abort()) : undefined;
    const close = (): void => { forget?.(); how.signal?.removeEventListener("abort", pass); };
    how.signal?.addEventListener("abort", pass);
    try {
      return Object.assign(await this.#fetch(this.url + path, { ...request, headers, redirect: "manual", signal: stop.signal }), { close });
    } catch (error) {
      close();
      how.signal?.throwIfAborted();
      if (stop.signal.aborted) throw new Unreachable(`the gate at ${this.url} did not answer in time`, true, error);
      throw explainFailure(this.url, error);
    }
  }
}

// The platform's own error would show the key.
function checkKey(key: string): void {
  if (/[^\x20-\x7e]/.test(key) || key !== key.trim()) throw new TypeError("the key has a character that no HTTP header can have (a line break at its end?)");
}

function explainFailure(url: string, error: unknown): Unreachable {
  const code = String((error as { cause?: { code?: string } }).cause?.code ?? (error as { code?: string }).code ?? "");
  if (code === "ECONNREFUSED" || code === "ConnectionRefused") return new Unreachable(`no gate answers at ${url}; start one with \`asyncgate dev\``, false, error);
  return new Unreachable(`the connection to ${url} failed: ${code || String((error as { cause?: unknown }).cause ?? error)}`, !NOT_SENT.has(code), error);
}

function readReply(url: string, operation: string, status: number, headers: Headers, text: string): unknown {
  let body: unknown;
  try { body = text ? JSON.parse(text) : null; } catch { body = undefined; }
  const answer = typeof body === "object" && body !== null && !Array.isArray(body) ? body as Record<string, unknown> : undefined;
  if (status >= 200 && status < 300) {
    // A browser shows no header of another origin.
    const marked = headers.has("x-asyncgate") || headers.has("content-security-policy") || "document" in globalThis;
    if (answer && marked) return answer;
    throw new NotAGate(url, answer ? `its answer to ${operation} lacks the header X-AsyncGate` : `its answer to ${operation} is not a JSON object`);
  }
  if (!answer?.["error"] && (status < 400 || status === 404 || status === 405)) throw new NotAGate(url, `its answer has the status ${status}`);
  const after = Number(answer?.["retry_after"] ?? headers.get("retry-after") ?? NaN);
  throw makeRefusal(status, answer ?? { message: `${url} does not answer like a gate (status ${status}, no JSON object)` }, Number.isFinite(after) ? after : undefined);
}

function mayRepeat(error: unknown, harmless: boolean): boolean {
  if (error instanceof NotAGate) return false;
  if (error instanceof Unreachable) return harmless || !error.sent;
  if (!(error instanceof Refusal)) return false;
  if (OUTCOME_UNKNOWN.has(error.code)) return harmless && [502, 503, 504].includes(error.status);
  return NOT_DONE.has(error.status) && error.code !== "quota_exceeded";
}

// The gate deduplicates repeated requests by these keys.
function addRepeatKeys(operation: OperationName, fields: Record<string, unknown>): Record<string, unknown> {
  const told: Record<string, unknown> = { ...fields };
  for (const name of CALLS[operation][4]) told[name] ??= crypto.randomUUID();
  if (operation === "create_tasks" && Array.isArray(told["tasks"]))
    told["tasks"] = told["tasks"].map((task: Record<string, unknown>) => ({ ...task, idempotency_key: task["idempotency_key"] ?? crypto.randomUUID() }));
  return told;
}

function quoteId(name: string, id: string): string {
  if (["", ".", ".."].includes(id)) throw new TypeError(`${name} is ${JSON.stringify(id)}, which is not an id`);
  return encodeURIComponent(id);
}
