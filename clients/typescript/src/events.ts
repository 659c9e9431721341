/** The stream of receipts and changes: server-sent events over fetch. */
import { NotAGate, Unreachable } from "./errors.js";
import { isTemporary, pauseAfter, sleep, type Connection } from "./http.js";
import type { ChangeRecord, EntryRecord, ReceiptRecord } from "./operations.js";

/** What a stream follows, and from where. */
export interface FollowOptions {
  /** Only what is about this task. */
  taskId?: string;
  /** Only receipts to this principal. */
  toId?: string;
  /** Only receipts of this type, and no changes. */
  receiptType?: string;
  /** Go on behind the event with this id. */
  after?: string;
  /** Only receipts created then or later. */
  createdAfter?: Date;
  signal?: AbortSignal;
}

/** A receipt, or a change that has no receipt, such as progress or a hold. */
export type GateEvent =
  | { readonly type: "receipt"; readonly id: string; readonly receipt: ReceiptRecord }
  | { readonly type: "change"; readonly change: ChangeRecord };

const QUIET_SECONDS = 30;       // a gate sends a comment every five seconds

/** Follow receipts and changes without an end; a connection that breaks is opened again behind the last receipt. */
export async function* follow(connection: Connection, options: FollowOptions = {}): AsyncGenerator<GateEvent, void, undefined> {
  const told = { task_id: options.taskId, to_id: options.toId, receipt_type: options.receiptType, created_after: options.createdAfter?.toISOString() };
  const query = new URLSearchParams(Object.entries(told).filter((pair): pair is [string, string] => pair[1] !== undefined)).toString();
  for await (const { type, id, data } of insist(connection, `/v1/receipts/stream${query && `?${query}`}`, options.after, options.signal))
    yield type === "receipt" ? { type, id, receipt: JSON.parse(data) as ReceiptRecord } : { type: "change", change: JSON.parse(data) as ChangeRecord };
}

/** Follow the output of a task until it has ended; a connection that breaks is opened again behind the last entry. */
export async function* followOutput(connection: Connection, path: string, after: number, signal?: AbortSignal): AsyncGenerator<EntryRecord, void, undefined> {
  for await (const { type, data } of insist(connection, path, after ? String(after) : undefined, signal)) {
    if (type === "end") return;
    yield JSON.parse(data) as EntryRecord;
  }
}

async function* insist(connection: Connection, path: string, last: string | undefined, signal: AbortSignal | undefined): AsyncGenerator<Block> {
  for (let failures = 0; !signal?.aborted;) {
    try {
      for await (const block of readBlocks(connection, path, last, signal)) {
        failures = 0;
        if (block.id) last = block.id;
        yield block;
      }
    } catch (error) {
      if (signal?.aborted) return;
      if (!isTemporary(error)) throw error;
    }
    await sleep(pauseAfter(++failures, 0.5), signal);
  }
}

interface Block { type: string; data: string; id: string }

async function* readBlocks(connection: Connection, path: string, last: string | undefined, signal: AbortSignal | undefined): AsyncGenerator<Block> {
  const quiet = new AbortController(), pass = (): void => quiet.abort(signal?.reason);
  let timer = setTimeout(() => quiet.abort(), QUIET_SECONDS * 1000);
  signal?.addEventListener("abort", pass);
  try {
    const response = await connection.open(path, { headers: { accept: "text/event-stream", ...(last && { "last-event-id": last }) } }, { seconds: Infinity, signal: quiet.signal });
    if (response.status === 204) return yield { type: "end", data: "", id: "" };     // nothing comes any more
    if (response.headers.get("content-type") !== "text/event-stream" || !response.body) {
      await connection.readRefusal(response);
      throw new NotAGate(connection.url, "it does not answer with a stream of events");
    }
    const decoder = new TextDecoder(), reader = response.body.getReader();
    let rest = "";
    try {
      for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
        clearTimeout(timer);
        timer = setTimeout(() => quiet.abort(), QUIET_SECONDS * 1000);
        const blocks = (rest + decoder.decode(chunk.value, { stream: true })).split("\n\n");
        rest = blocks.pop() ?? "";
        for (const block of blocks) {
          const parsed = parseBlock(block);
          if (parsed) yield parsed;
        }
      }
    } finally {
      await reader.cancel().catch(() => undefined);
    }
  } catch (error) {
    if (quiet.signal.aborted) throw new Unreachable(`the stream of ${connection.url} has gone silent`, true, error);
    throw error instanceof TypeError ? new Unreachable(`the stream of ${connection.url} broke`, true, error) : error;
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", pass);
  }
}

function parseBlock(block: string): Block | undefined {
  const fields: Record<string, string> = {};
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at > 0) fields[line.slice(0, at)] = line.slice(at + 1).replace(/^ /, "");
  }
  return fields["data"] === undefined ? undefined : { type: fields["event"] ?? "message", data: fields["data"], id: fields["id"] ?? "" };
}
