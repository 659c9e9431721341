// What a user writes; it is compiled and not run. A line that must not compile says so.
import { z } from "zod";
import { Done, Gate, Handle, Refusal, Worker, type Job, type TaskRecord, type wire } from "asyncgate";
import { FolderStore, Payloads, type Store } from "asyncgate/payloads";
import { useTask } from "asyncgate/react";
import { webhookHandler } from "asyncgate/webhooks";

const gate = new Gate({ agentId: "ada" });
const handle: Handle<string> = await gate.submit<string>("greet", "ada", { key: "a", needs: ["words"], max_attempts: 2 });
const text: string = await handle.result({ timeoutSeconds: 5 });
const page: number = await gate.handle<number>(text).result({ schema: z.number() });
const many: string[] = (await gate.handle(text).result({ schema: z.object({ lines: z.array(z.string()) }) })).lines;
const made: wire.Created = await gate.createTask({ type: "a", payload: null });
// @ts-expect-error: a task has a payload
await gate.createTask({ type: "a" });
// @ts-expect-error: no operation has that name
await gate.call("create_tusk", {});
// @ts-expect-error: no status has that name
await gate.listTasks({ status: "done" });
for await (const task of gate.each("list_tasks", { status: "queued" })) { const one: TaskRecord = task; void one; }
for await (const event of gate.stream({ taskId: made.task_id })) if (event.type === "receipt") void event.receipt.receipt_type;
for await (const chunk of handle.stream({ after: 3 })) { const given: unknown = chunk; void given; }
for await (const entry of handle.output()) { const offset: number = entry.offset; void (entry.status ?? offset); }
await gate.submit("child", 1, { parent: handle, limits: { openai: "key" } });
await handle.answer("go", { content: { when: page } });
await handle.answer("go", { action: "decline" });
// @ts-expect-error: an acceptance has a content
await handle.answer("go", { action: "accept" });

const store: Store = new FolderStore("/srv/payloads"), payloads = new Payloads(store, { aboveBytes: 100_000 });
const worker = new Worker({ capabilities: ["ocr"], concurrency: 4, keepLogs: "warn", payloads });
worker.task("ocr", { payload: z.object({ page: z.number() }), result: z.array(z.string()), description: "Reads." }, async (payload, job) => {
  const number: number = payload.page;
  const lines: string[] = await job.step("read", async () => [`${number}`]);
  const answer = await job.ask("ok", { message: "ok?" });
  void job.print("page", number, { lines });
  job.log("read");
  await job.message("page", { number });
  await job.artifact(lines, { name: "text", append: true });
  for await (const line of job.stream(lines)) { const text: string = line; void text; }
  if (job.children === undefined) await gate.submit("child", 1, { parent: job });
  else job.park({ children: "any", after: 60 });
  if (answer.action !== "accept") return job.park({ after: 60, checkpoint: lines });
  await fetch("https://example.com", { signal: job.signal });
  return lines;
});
worker.task("coerced", { payload: z.object({ n: z.coerce.number() }), result: z.object({ n: z.number(), more: z.string().default("") }) }, async ({ n }, job) => {
  if (n === 0) return new Done({ n }, { summary: "none" });
  if (n === 1) return job.park({ after: 60 });
  return { n };
});
// @ts-expect-error: the result is a number
worker.task("wrong", { result: z.number() }, () => "no");
// @ts-expect-error: the result has a number
worker.task("lacking", { result: z.object({ n: z.number() }) }, async () => ({}));
worker.task("free", { description: "Gives anything." }, (payload, job) => job.attempt ? many : payload);
worker.task<string>("plain", (name, job: Job) => name.length + job.attempt);
// @ts-expect-error: a function is missing
worker.task("nothing", {});

try { await gate.whoami(); } catch (error) {
  if (error instanceof Refusal && error.code === "unauthenticated") void (error.retryAfter ?? 0).toFixed();
}

export const POST: (request: Request) => Promise<Response> = webhookHandler("whsec_", event => event.data.task_id);
export function View({ id }: { id: string }): string {
  const { task, result } = useTask<string>(id, {
    load: async (taskId, signal) => (await fetch(`/tasks/${taskId}`, { signal })).json() as Promise<TaskRecord>,
    ticket: async taskId => (await fetch(`/tasks/${taskId}/ticket`)).json() as Promise<{ path: string }> });
  return result ?? task?.status ?? "…";
}
