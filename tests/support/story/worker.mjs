// The worker of the story in TypeScript's client: argv is its name and, as JSON, its options; each function leaves a line in a file.
import { appendFileSync, existsSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import { Done, Fail, Gate, Retry, Worker } from "asyncgate";

const [name, options, diary] = process.argv.slice(2);
const note = (...words) => appendFileSync(diary, words.join(" ") + "\n");
const worker = new Worker({ workerId: name, ttlSeconds: 30, log: () => undefined, ...JSON.parse(options) });
const date = { "~standard": { version: 1, vendor: "story", validate: value => /^\d{4}(-\d\d){2}$/.test(value) ? { value: new Date(value) } : { issues: [{ message: "it is not a date" }] } } };
const page = { "~standard": { version: 1, vendor: "story", validate: value => ({ value }), jsonSchema: {
  input: () => ({ type: "object", properties: { number: { type: "integer" } }, required: ["number"] }) } } };

worker.task("echo", payload => payload);
worker.task("stored", () => new Done({ pages: 3 }, { artifacts: [{ type: "file", uri: "file:///x" }], summary: "three pages" }));
worker.task("fail", () => { throw new Fail("no way", { code: "nope", detail: { page: 3 } }); });
worker.task("error", (_, job) => { note("error", job.attempt); throw new Error("broken"); });
worker.task("second", (_, job) => { if (job.attempt === 0) throw new Retry("not yet", { after: 0.1, code: "later" }); return job.attempt; });
worker.task("typed", { payload: date }, day => day.getUTCDate());
worker.task("infinite", () => Infinity);
worker.task("large", async (_, job) => { await job.save("x".repeat(100_000)); });
worker.task("progress", async (_, job) => {
  await job.report({ done: 0.5 });
  await job.save({ page: 3 });
  note("saved");
  await job.signal.aborted || await new Promise(resolve => job.signal.addEventListener("abort", resolve));
  note("lost", job.signal.reason.reason);
});
worker.task("steps", async (_, job) => {
  const first = await job.step("first", () => { note("first"); return { a: 1 }; });
  if (job.attempt === 0) throw new Retry("again", { after: 0 });
  return [first, await job.step("second", () => { note("second"); return null; })];
});
worker.task("mismatch", async (_, job) => { await job.step(`step ${job.attempt}`, () => 1); throw new Retry("again", { after: 0 }); });
worker.task("park", (_, job) => { if (job.checkpoint === undefined) job.park({ after: 0.2, checkpoint: { seen: 1 } }); return [job.checkpoint, job.attempt]; });
worker.task("talk", async (payload, job) => {
  job.print("thinking about", payload);
  let text = "";
  for await (const chunk of job.stream(["a ", "fox"])) text += chunk;
  note("talks", payload);
  while (payload === "on" && !existsSync(`${diary}.go`)) await pause(20, undefined, { signal: job.signal });
  job.print("😀".repeat(9000));
  return text;
});
worker.task("family", async (numbers, job) => {
  if (job.children) return job.children.ends.map(end => end.status).sort();
  const gate = new Gate({ agentId: "ada" });
  for (const number of numbers) await gate.submit(number ? "echo" : "fail", number, { parent: job, key: `${job.taskId} ${number}` });
  job.park({ children: "all" });
});
worker.task("declared", { payload: page, description: "Read a page." }, page => page.number);
worker.task("ask", async (_, job) => {
  const answer = await job.ask("go", { message: "Go on?", to: { kind: "human", id: "boss" } });
  return [answer.action, answer.content];
});
worker.task("slow", async (seconds, job) => { note("began"); await pause(seconds * 1000, undefined, { signal: job.signal }); note("slept"); return "slept"; });
worker.task("crash", async (_, job) => {
  const done = await job.step("once", () => { note("once"); return "kept"; });
  if (job.checkpoint === undefined) {
    await job.save({ page: 7 });
    note("ready");
    await pause(60_000, undefined, { signal: job.signal });
  }
  return [done, job.checkpoint, job.attempt, job.offer.fence];
});
await worker.run();
