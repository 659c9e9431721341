/** What a task function prints and streams: sent in the background, in order, each chunk once. */
import { AsyncGateError, InvalidRequest } from "./errors.js";
import { sleep, within, writeClean } from "./http.js";
import type { OutputKind } from "./operations.js";

const GATHER_SECONDS = 0.05;            // for which texts are gathered before they are sent
const MOST_WAITING_BYTES = 2 ** 20;     // that wait for a slow gate; then who awaits waits, too
const MOST_CALL_BYTES = 100_000, MOST_CALL_CHUNKS = 100;
const LONGEST_TEXT = 16_000;            // letters of one chunk of printed text
const FLUSH_SECONDS = 30;               // that the end of a task waits for its output

interface Chunk { value: unknown; bytes: number; readonly printed: boolean; readonly stream: OutputKind }

/** Sends the output of one task. */
export class Printer {
  readonly #waiting: Chunk[] = [];
  #bytes = 0;
  #sending = 0;
  #most = MOST_CALL_CHUNKS;
  #closed = false;
  #running: Promise<void> | undefined;
  #blocked: (() => void)[] = [];

  /** `send` appends chunks behind a position and gives the next one; `drop` is told what is not sent, and why. */
  constructor(private readonly send: (chunks: unknown[], position: number, stream: OutputKind) => Promise<number>, private position: number, private readonly drop: (what: string, error: unknown) => void) {}

  /** Append text; pieces that are printed within a moment are one chunk. Ends when there is room for more. */
  print(text: string, stream: OutputKind = "output"): Promise<void> {
    for (let rest = text.toWellFormed().replaceAll("\0", "\ufffd"); rest;) {
      const at = rest.length > LONGEST_TEXT && (rest.codePointAt(LONGEST_TEXT - 1) ?? 0) > 0xffff ? LONGEST_TEXT - 1 : LONGEST_TEXT;
      this.#add(rest.slice(0, at), true, stream);
      rest = rest.slice(at);
    }
    return this.#findRoom();
  }

  /** Append one chunk. Ends when there is room for more. */
  async append(chunk: unknown): Promise<void> {
    this.#add(JSON.parse(writeClean(chunk, "the chunk")), false, "output");
    await this.#findRoom();
  }

  /** Wait until everything is sent, if that does not take too long. */
  async flush(): Promise<void> {
    if (this.#running) await within(FLUSH_SECONDS, this.#running);
  }

  /** Wait until everything is sent, and send nothing more. */
  async end(): Promise<void> {
    await this.flush();
    this.#close();
  }

  #add(value: unknown, printed: boolean, stream: OutputKind): void {
    if (this.#closed) return;
    const bytes = new TextEncoder().encode(JSON.stringify(value)).length, last = this.#waiting.length > this.#sending ? this.#waiting.at(-1) : undefined;
    if (printed && last?.printed && last.stream === stream && `${String(last.value)}${String(value)}`.length <= LONGEST_TEXT) {
      last.value = `${String(last.value)}${String(value)}`;
      last.bytes += bytes;
    } else this.#waiting.push({ value, bytes, printed, stream });
    this.#bytes += bytes;
    this.#running ??= this.#run();
  }

  async #run(): Promise<void> {
    try {
      while (this.#waiting.length && !this.#closed) {
        await sleep(GATHER_SECONDS);
        const chunks = this.#choose();
        this.#sending = chunks.length;
        try {
          this.position = await this.send(chunks.map(chunk => chunk.value), this.position, chunks[0]?.stream ?? "output");
        } catch (error) {       // what the gate does not take is left out, and nothing else: which one is it?
          if (!(error instanceof InvalidRequest || (error instanceof AsyncGateError && error.code === "too_large"))) throw error;
          this.#most = chunks.length > 1 ? 1 : MOST_CALL_CHUNKS;
          if (chunks.length > 1) continue;
          this.drop("a chunk of its output", error);
        }
        this.#sending = 0;
        for (const { bytes } of this.#waiting.splice(0, chunks.length)) this.#bytes -= bytes;
        this.#wake();
      }
    } catch (error) {       // output is for those who watch, and must not end the work
      if (!this.#closed) this.drop("its further output", error);
      this.#close();
    } finally {
      this.#running = undefined;
    }
  }

  #choose(): Chunk[] {
    let bytes = 0, count = 0;
    for (const chunk of this.#waiting.slice(0, this.#most)) {
      bytes += chunk.bytes;
      if (count && (bytes > MOST_CALL_BYTES || chunk.stream !== this.#waiting[0]?.stream)) break;
      count++;
    }
    return this.#waiting.slice(0, count);
  }

  async #findRoom(): Promise<void> {
    while (this.#bytes > MOST_WAITING_BYTES && !this.#closed) await new Promise<void>(resolve => this.#blocked.push(resolve));
  }

  #wake(): void { for (const resolve of this.#blocked.splice(0)) resolve(); }

  #close(): void {
    this.#closed = true;
    this.#wake();
  }
}

/** A value as a part of a message or an artifact of A2A. */
export function toPart(value: unknown): unknown {
  const isPart = typeof value === "object" && value !== null && ["text", "raw", "url", "data"].filter(name => name in value).length === 1;
  return isPart ? value : typeof value === "string" ? { text: value } : { data: value };
}
