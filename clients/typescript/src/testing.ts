/** A gate for your own tests: a real one, in a process of its own and in memory. It needs the Python package on the path. */
import { spawn, type ChildProcess } from "node:child_process";
import { createInterface } from "node:readline";
import { Gate, type GateOptions } from "./gate.js";
import { Worker, type WorkerOptions } from "./worker.js";

/** How the gate is started. */
export interface TestGateOptions {
  /** The program; default: `asyncgate`, or what ASYNCGATE_TEST_COMMAND says, such as `uvx asyncgate`. */
  command?: readonly string[];
  /** Settings of the gate, such as `{ default_max_attempts: 1 }`. */
  settings?: Readonly<Record<string, string | number | boolean>>;
  /** A database that outlives the gate, such as `sqlite:///gate.db`; default: memory. */
  database?: string;
  /** A port; default: one that is free. */
  port?: number;
}

const DEFAULTS = { expiry_jitter_seconds: 0, shutdown_seconds: 5 };

/** A running gate: `await using gate = await startGate()`, or call `stop` in the end. */
export class TestGate {
  readonly #process: ChildProcess;

  constructor(process: ChildProcess, readonly url: string, readonly key: string) { this.#process = process; }

  /** A client of this gate, for an agent. */
  client(options: GateOptions = {}): Gate { return new Gate({ agentId: "tester", ...options, url: this.url, key: this.key }); }

  /** A worker of this gate that keeps nothing on disk; start it with `serve`. */
  worker(options: WorkerOptions = {}): Worker { return new Worker({ workerId: "worker", state: null, ...options, url: this.url, key: this.key }); }

  /** End the gate; SIGKILL is the power cut. */
  async stop(signal: "SIGTERM" | "SIGKILL" = "SIGTERM"): Promise<void> {
    if (this.#process.exitCode !== null || this.#process.signalCode !== null) return;
    const ended = new Promise(resolve => this.#process.once("exit", resolve));
    this.#process.kill(signal);
    await ended;
  }

  async [Symbol.asyncDispose](): Promise<void> { await this.stop(); }
}

/** Start a gate for a test, and wait until it serves. */
export async function startGate(options: TestGateOptions = {}): Promise<TestGate> {
  const [program = "asyncgate", ...first] = options.command ?? (process.env["ASYNCGATE_TEST_COMMAND"] ?? "asyncgate").split(" ");
  const sets = Object.entries({ ...DEFAULTS, ...options.settings }).flatMap(([name, value]) => ["--set", `${name}=${String(value)}`]);
  const key = crypto.randomUUID();
  const child = spawn(program, [...first, "serve", "--port", String(options.port ?? 0), "--database", options.database ?? "memory://", ...sets],
    { env: { ...process.env, ASYNCGATE_API_KEY: key }, stdio: ["ignore", "ignore", "pipe"] });
  const lines: string[] = [];
  return await new Promise((resolve, reject) => {
    child.once("error", error => reject(new Error(`${program} cannot be started (${error.message}): pip install asyncgate, or set ASYNCGATE_TEST_COMMAND`)));
    child.once("exit", code => reject(new Error(`the gate ended with ${code} before it served:\n${lines.join("\n")}`)));
    createInterface({ input: child.stderr }).on("line", line => {
      lines.push(line);
      const url = / serves (https?:\S+)/.exec(line)?.[1];
      if (url) resolve(new TestGate(child, url, key));
    });
  });
}
