/** A type of task as a tool of a model: the call survives a restart of the gate, of the worker and of your program. */
import { AsyncGateError } from "./errors.js";
import type { Gate, SubmitOptions } from "./gate.js";
import type { Job } from "./job.js";
import type { StandardSchema } from "./schema.js";

/** What a tool is for the model, and how its tasks are created. */
export interface ToolOptions extends Omit<SubmitOptions, "key" | "signal"> {
  /** What the tool does, and when to use it: the model reads it. */
  description: string;
  /** Stop waiting after so many seconds, with an error that names the task; it goes on. Default: never. */
  timeoutSeconds?: number;
  /** What becomes of the task when the call is aborted; default "leave": it goes on, and its result can be fetched. */
  onAbort?: "leave" | "cancel";
}

/** A tool of the AI SDK (npm `ai`): `tools: { scan: aiTool(gate, "ocr.scan", { description, inputSchema }) }`. */
export function aiTool<Schema>(gate: Gate, type: string, options: ToolOptions & { inputSchema: Schema }): {
  description: string; inputSchema: Schema; execute(input: InputOf<Schema>, call: { toolCallId: string; abortSignal?: AbortSignal | undefined }): Promise<unknown>;
} {
  const { inputSchema, ...told } = options;
  return {
    description: options.description, inputSchema,
    execute: (input, call) => doTask(gate, type, input, told, call.toolCallId, call.abortSignal),
  };
}

/** What Mastra's `createTool` takes: `createTool(mastraTool(gate, "ocr.scan", { description, inputSchema }))`. */
export function mastraTool<Schema>(gate: Gate, type: string, options: ToolOptions & { inputSchema: Schema; id?: string }): {
  id: string; description: string; inputSchema: Schema;
  execute(input: InputOf<Schema>, context?: { abortSignal?: AbortSignal | undefined; agent?: { toolCallId?: string } | undefined }): Promise<unknown>;
} {
  const { inputSchema, id, ...told } = options;
  return {
    id: id ?? nameTool(type), description: options.description, inputSchema,
    execute: (input, context) => doTask(gate, type, input, told, context?.agent?.toolCallId, context?.abortSignal),
  };
}

/** A tool of the Claude Agent SDK: `createSdkMcpServer({ name: "gate", tools: [claudeTool(…)] })`. */
export function claudeTool<Shape>(gate: Gate, type: string, options: ToolOptions & { inputSchema: Shape; name?: string }): {
  name: string; description: string; inputSchema: Shape;
  handler(input: any, extra?: unknown): Promise<{ content: { type: "text"; text: string }[]; isError?: boolean }>;
} {
  const { inputSchema, name, ...told } = options;
  return {
    name: name ?? nameTool(type), description: options.description, inputSchema,
    handler: async (input, extra) => {
      const { signal } = (extra ?? {}) as { signal?: AbortSignal };      // its requestId is unique only in a session, so it is not a key
      try {
        const result = await doTask(gate, type, input, told, undefined, signal);
        return { content: [{ type: "text", text: typeof result === "string" ? result : JSON.stringify(result) }] };
      } catch (error) {
        if (!(error instanceof AsyncGateError)) throw error;
        return { content: [{ type: "text", text: error.message }], isError: true };
      }
    },
  };
}

/**
 * Middleware of the AI SDK: each answer of the model is a step of the task, so a worker that takes the task over does not ask again.
 * `wrapLanguageModel({ model, middleware: durableModel(job) })`
 */
export function durableModel(job: Job<any>): { specificationVersion: "v4"; wrapGenerate(options: { doGenerate(): PromiseLike<any> }): Promise<any> } {
  return {
    specificationVersion: "v4",
    wrapGenerate: ({ doGenerate }) => job.step("model", async () => {
      const { request: _, response: __, ...answer } = await doGenerate();       // what went over the wire is not needed again
      return answer as unknown;
    }),
  };
}

/** Tools of the AI SDK or of Mastra each of whose calls is a step of the task; a call may `job.ask`. */
export function durableTools<Tools extends Record<string, { execute?: any }>>(job: Job<any>, tools: Tools): Tools {
  const wrap = ([name, tool]: [string, { execute?: any }]): [string, unknown] => {
    const execute = (input: unknown, call: unknown): unknown => job.step(name, () => tool.execute(input, call));
    return [name, tool.execute ? Object.assign(Object.create(Object.getPrototypeOf(tool) as object) as object, tool, { execute }) : tool];       // Mastra's are of a class
  };
  return Object.fromEntries(Object.entries(tools).map(wrap)) as Tools;
}

/** The type of what a schema takes: of Standard Schema, else anything. */
export type InputOf<Schema> = Schema extends StandardSchema<any, infer Output> ? Output : any;

// The same call of the model is the same task, also when the program that asked for it has been restarted.
async function doTask(gate: Gate, type: string, input: unknown, options: ToolOptions, callId: string | undefined, signal: AbortSignal | undefined): Promise<unknown> {
  const { description: _, timeoutSeconds, onAbort, ...terms } = options;
  signal?.throwIfAborted();
  const watched = signal && onAbort !== "cancel" ? { signal } : {};     // else it is awaited: an aborted creation may have made the task
  const handle = await gate.submit(type, input, { ...terms, ...(callId && { key: `${type}:${callId}` }), ...watched });
  try {
    return await handle.result({ ...(timeoutSeconds !== undefined && { timeoutSeconds }), ...(signal && { signal }) });
  } catch (error) {
    if (signal?.aborted && onAbort === "cancel") await handle.cancel("the call of the tool was aborted");
    throw error;
  }
}

// Models take letters, digits, - and _ in the name of a tool.
function nameTool(type: string): string { return type.replace(/[^a-zA-Z0-9_-]/g, "_").slice(0, 64); }
