// The agent of the story in TypeScript's client: a JSON line for each command, a JSON line for each answer.
import { createInterface } from "node:readline";
import { Gate, NotAGate, Refusal, TaskCanceled, TaskFailed, Unreachable, WaitTimeout } from "asyncgate";

const gates = new Map();
const KINDS = { NotAGate, Unreachable, Refusal, TaskFailed, TaskCanceled, TimeoutError: WaitTimeout };

async function collect(items, most) {
  const seen = [];
  for await (const item of items) if (seen.push(item) >= most) break;
  return seen;
}

const VERBS = {
  submit: async (gate, { type, payload, ...told }) => {
    const handle = await gate.submit(type, payload, told);
    return { task_id: handle.taskId, differs: handle.payloadDiffers };
  },
  result: (gate, { task_id, timeout }) => gate.handle(task_id).result(timeout === undefined ? {} : { timeoutSeconds: timeout }),
  cancel: (gate, { task_id }) => gate.handle(task_id).cancel("the story says so"),
  updates: async (gate, { task_id }) => (await collect(gate.handle(task_id).updates(), Infinity)).map(task => task.status),
  first: async (gate, { task_id, held, progress }) => {
    for await (const task of gate.handle(task_id).updates()) if ((held && task.held) || (progress && task.progress?.checkpoint)) return task;
    return null;
  },
  each: async (gate, { operation, most = 1000, ...fields }) => await collect(gate.each(operation, fields), most),
  stream: async (gate, { task_id, after }) => await collect(gate.handle(task_id).stream({ after }), Infinity),
  call: (gate, { operation, ...fields }) => gate.call(operation, fields),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { verb, url, credential, patience = 10, ...told } = JSON.parse(line), name = JSON.stringify([url, credential]);
  try {
    if (!gates.has(name)) gates.set(name, new Gate({ agentId: "ada", patienceSeconds: patience, ...(url && { url }), ...(credential && { key: credential }) }));
    console.log(JSON.stringify({ value: await VERBS[verb](gates.get(name), told) ?? null }));
  } catch (error) {
    const [kind] = Object.entries(KINDS).find(([, kind]) => error instanceof kind) ?? [error.name];
    console.log(JSON.stringify({ error: kind, code: error.code ?? null, status: error.status ?? null, told: error.error ?? null, text: error.message }));
  }
}
