// The installed package against a real gate, by Node's own test runner.
import assert from "node:assert/strict";
import { createHmac } from "node:crypto";
import { createRequire } from "node:module";
import { once } from "node:events";
import { mkdtemp, readdir, readFile, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import * as valibot from "valibot";
import { z } from "zod";
import { Fail, Forbidden, Gate, InvalidRequest, LeaseInvalid, NotAGate, NotFound, Refusal, TaskFailed, Unauthenticated, Unreachable, WaitTimeout, Worker } from "asyncgate";
import { aiTool, claudeTool, mastraTool } from "asyncgate/ai";
import { FolderStore, NotInStore, PayloadDamaged, Payloads } from "asyncgate/payloads";
import { startGate } from "asyncgate/testing";
import { verifyWebhook, webhookHandler, WebhookRejected } from "asyncgate/webhooks";

let gate, client, worker, working, runs = 0;

before(async () => {
  gate = await startGate();
  client = gate.client();
  worker = gate.worker({ concurrency: 10, declare: false, log: () => undefined });
  worker.task("echo", payload => payload);
  worker.task("zod", { payload: z.object({ page: z.number(), name: z.string().default("a") }) }, payload => payload);
  worker.task("valibot", { payload: valibot.object({ page: valibot.number() }) }, payload => payload.page);
  worker.task("never", { retry: false }, () => { runs += 1; throw new Error("once is enough"); });
  worker.task("chosen", { retry: error => error.code === "EAGAIN" }, () => { runs += 1; throw Object.assign(new Error("no"), { code: "EPERM" }); });
  worker.task("waits", (_, job) => new Promise((_, reject) => job.signal.addEventListener("abort", () => reject(job.signal.reason))));
  worker.task("sees", async (_, job) => { await job.report({ at: 1 }); await job.report({ at: 2 }); return (await client.getTask({ task_id: job.taskId })).progress; });
  working = worker.serve();
});

after(async () => {
  worker.stop();
  await working;
  await gate.stop();
});

describe("the package", () => {
  it("can be required as CommonJS, which is one module for all its entry points", () => {
    const require = createRequire(import.meta.url), root = require("asyncgate");
    assert.equal(typeof root.Gate, "function");
    assert.ok(new (require("asyncgate/webhooks").WebhookRejected)("x") instanceof root.AsyncGateError);
  });

  it("has a type for every entry point, and no dependency", async () => {
    const { default: told } = await import("asyncgate/package.json", { with: { type: "json" } });
    assert.equal(told.dependencies, undefined);
    assert.deepEqual(Object.keys(told.exports), [".", "./ai", "./payloads", "./react", "./testing", "./webhooks", "./package.json"]);
  });
});

describe("a payload with a schema", () => {
  it("is what zod makes of it, defaults included", async () => assert.deepEqual(await (await client.submit("zod", { page: 1 })).result(), { page: 1, name: "a" }));
  it("is what valibot makes of it", async () => assert.equal(await (await client.submit("valibot", { page: 1, more: 2 })).result(), 1));
  it("fails the task if it is another one, and says where", async () => {
    await assert.rejects((await client.submit("zod", { page: "x" })).result(), error => {
      assert.ok(error instanceof TaskFailed);
      assert.equal(error.error.code, "invalid_payload");
      assert.match(error.error.message, /page: /);
      return true;
    });
  });
  it("is declared as zod says it, so the gate refuses another one, and a result is held to its schema", async () => {
    const declaring = gate.worker({ workerId: "declaring", log: () => undefined });
    declaring.task("page", { payload: z.object({ page: z.number().int(), name: z.string().default("a") }), result: z.string(), description: "Reads a page." },
      ({ page, name }) => page ? `${name} ${page}` : page);
    const serving = declaring.serve();
    let known;
    while (!known?.payload_schema) [known] = (await client.listTypes({ type: "page" })).types;
    assert.deepEqual([known.description, known.payload_schema.required, known.result_schema.type], ["Reads a page.", ["page"], "string"]);
    await assert.rejects(client.submit("page", { page: 1.5 }), error => error instanceof InvalidRequest && error.code === "payload_invalid" && error.more.path === "payload.page");
    assert.equal(await (await client.submit("page", { page: 7 })).result(), "a 7");
    await assert.rejects((await client.submit("page", { page: 0 })).result(), error => error instanceof TaskFailed && error.error.code === "invalid_result");
    declaring.stop();
    await serving;
  });
  it("checks a result, too", async () => {
    const handle = await client.submit("echo", 7);
    assert.equal(await handle.result({ schema: z.number() }), 7);
    await assert.rejects(handle.result({ schema: z.string() }), { name: "SchemaMismatch" });
  });
});

describe("a worker", () => {
  it("lets an error be for good where the task says so", async () => {
    for (const type of ["never", "chosen"]) {
      const handle = await client.submit(type, null, { max_attempts: 3, retry_backoff_seconds: 0 });
      await assert.rejects(handle.result(), TaskFailed);
    }
    assert.equal(runs, 2);
  });
  it("has told progress that is awaited", async () => assert.deepEqual(await (await client.submit("sees", null)).result(), { at: 2 }));
  it("that is not one of this gate ends with the gate's words", async () => {
    const stranger = new Worker({ url: gate.url, key: "wrong", state: null }).task("echo", () => 1);
    await assert.rejects(stranger.serve(), Unauthenticated);
  });
  it("needs a function, and a number of places", async () => {
    await assert.rejects(new Worker({ url: gate.url, state: null }).serve(), /no function/);
    assert.throws(() => new Worker({ url: gate.url, concurrency: 0 }), RangeError);
  });
});

describe("what a function says by console", () => {
  it("is kept with its task, from a level on, and shown all the same", async () => {
    const shown = [], { warn, log } = console;
    console.warn = (...values) => shown.push(values.join(" "));
    console.log = (...values) => shown.push(values.join(" "));
    try {
      const keeping = gate.worker({ workerId: "keeping", keepLogs: "info", concurrency: 2, declare: false, log: () => undefined });
      keeping.task("says", async (name, job) => {
        console.debug("too quiet");
        console.log("%s begins", name, { page: 7 });
        job.print("output of", name);
        await new Promise(done => setTimeout(done, 20));
        console.warn(`${name} goes on`);
        job.log("a line of its own");
        if (name === "much") for (let line = 0; line < 30; line++) console.warn("x".repeat(10_000));
      });
      const serving = keeping.serve(), handles = await Promise.all(["ada", "bob", "much"].map(name => client.submit("says", name)));
      for (const handle of handles) await handle.result();
      keeping.stop();
      await serving;
      console.warn("nobody keeps this");
      const kept = [];
      for (const handle of handles) {
        const entries = [];
        for await (const entry of handle.output()) if (entry.chunk !== undefined) entries.push(entry);
        kept.push(entries.filter(({ stream }) => stream === "log").map(({ chunk }) => chunk).join(""));
        assert.match(entries.filter(({ stream }) => stream !== "log").map(({ chunk }) => chunk).join(""), /^output of \w+\n$/);
      }
      for (const [at, name] of ["ada", "bob"].entries()) assert.equal(kept[at], `info: ${name} begins { page: 7 }\nwarn: ${name} goes on\na line of its own\n`);
      assert.match(kept[2], /x\n\(further lines of this run are not kept\)\n$/);
      assert.ok(kept[2].length < 112_000 && kept[2].length > 100_000);
      assert.ok(shown.includes("ada goes on") && shown.at(-1) === "nobody keeps this");
    } finally {
      Object.assign(console, { warn, log });
    }
  });
  it("is not kept where nobody has asked for it", async () => {
    const handle = await client.submit("echo", 1);
    await handle.result();
    assert.deepEqual((await client.readOutput({ task_id: handle.taskId })).entries.filter(({ stream }) => stream === "log"), []);
  });
});

describe("a message and an artifact", () => {
  it("have the form that A2A streams on", async () => {
    const talking = gate.worker({ workerId: "talking", declare: false, log: () => undefined }).task("talks", async (_, job) => {
      await job.message("I begin", { page: 7 }, { url: "https://example.com/a.png" });
      await job.artifact(["one "], { name: "report" });
      await job.artifact(["two"], { name: "report", append: true });
    });
    const serving = talking.serve(), handle = await client.submit("talks", null), chunks = [];
    for await (const chunk of handle.stream()) chunks.push(chunk);
    talking.stop();
    await serving;
    assert.deepEqual(chunks, [
      { role: "ROLE_AGENT", parts: [{ text: "I begin" }, { data: { page: 7 } }, { url: "https://example.com/a.png" }] },
      { artifactId: "report", append: false, parts: [{ text: "one " }] }, { artifactId: "report", append: true, parts: [{ text: "two" }] }]);
  });
});

describe("a large value", () => {
  const large = { text: "é".repeat(2000) };
  let folder, payloads, rich, serving, reading;

  before(async () => {
    folder = await mkdtemp(join(tmpdir(), "pay loads-"));
    payloads = new Payloads(new FolderStore(folder), { aboveBytes: 1000 });
    rich = gate.client({ payloads });
    reading = gate.worker({ workerId: "reading", declare: false, payloads, log: () => undefined });
    reading.task("large", payload => payload === "small" ? "small" : { ...payload, more: payload.text });
    serving = reading.serve();
  });
  after(async () => {
    reading.stop();
    await serving;
  });

  it("goes through the store, and the gate and the receipts have its hash", async () => {
    const handle = await rich.submit("large", large, { key: "once" });
    assert.deepEqual(await handle.result(), { ...large, more: large.text });
    const { payload, payload_pointer: pointer, result } = await handle.task(), [artifact] = result.artifacts;
    assert.deepEqual([payload, result.result, artifact.type], [null, null, "result"]);
    assert.match(pointer, /^file:.*#sha256=[0-9a-f]{64}&bytes=4011$/);
    assert.equal(JSON.parse(await readFile(fileURLToPath(artifact.uri), "utf8")).more, large.text);
    assert.equal((await rich.submit("large", large, { key: "once" })).taskId, handle.taskId);
    assert.equal(await (await client.handle(handle.taskId)).result(), null);       // who has no store gets what the gate has
    const { receipts } = await client.listReceipts({ task_id: handle.taskId });
    assert.ok(receipts.some(({ body }) => JSON.stringify(body).includes(artifact.sha256)));
    assert.equal((await readdir(folder)).length, 2);
  });
  it("stays in the gate if it is small", async () => {
    const handle = await rich.submit("large", "small");
    assert.equal(await handle.result(), "small");
    assert.equal((await handle.task()).payload_pointer, null);
  });
  it("that somebody has changed fails the task for good, and a result is not believed", async () => {
    const { results: [made] } = await rich.createTasks({ tasks: [{ type: "later", payload: { text: "ü".repeat(2000) } }] });
    const file = fileURLToPath((await rich.getTask({ task_id: made.task_id })).payload_pointer.replace(/#.*/, ""));
    await writeFile(file, (await readFile(file, "utf8")).replace("ü", "ö"));
    const later = gate.worker({ workerId: "later", declare: false, payloads, log: () => undefined }).task("later", () => 1);
    const laterServing = later.serve();
    await assert.rejects(rich.handle(made.task_id).result(), error => error instanceof TaskFailed && error.error.code === "payload_damaged");
    later.stop();
    await laterServing;
    await assert.rejects(payloads.get({ uri: `file://${file}`, sha256: "0".repeat(64), bytes: 1 }), PayloadDamaged);
  });
  it("is not read from elsewhere, nor if it is larger than whoever reads takes", async () => {
    const sha256 = "a".repeat(64);
    for (const uri of ["file:///etc/passwd", `file:///etc/${sha256}`, `s3://bucket/${sha256}`, `https://example.com/${sha256}`, "nothing"])
      await assert.rejects(payloads.get({ uri, sha256, bytes: 10 }), error => error instanceof NotInStore && /is not in the store/.test(error.message));
    const uri = `${new URL(`file://${folder}/`)}aa/${sha256}`;
    await assert.rejects(payloads.get({ uri, sha256, bytes: 10 }), error => error instanceof NotInStore && /is gone/.test(error.message));
    await assert.rejects(payloads.get({ uri, sha256, bytes: 2 ** 31 }), PayloadDamaged);
  });
});

describe("an error", () => {
  it("is of a class by its kind, and has a code, its meaning and the next call", async () => {
    await assert.rejects(client.getTask({ task_id: "unknown" }), error => {
      assert.ok(error instanceof NotFound && error instanceof Refusal);
      assert.deepEqual([error.code, error.status, error.next], ["task_not_found", 404, "list_tasks"]);
      assert.match(error.meaning, /task/i);
      return true;
    });
    await assert.rejects(client.createTask({ type: "", payload: 1 }), InvalidRequest);
    await assert.rejects(client.renewLease({ lease_id: "none", worker_id: "w" }), error => error instanceof LeaseInvalid && error.next === "lease_next");
    await assert.rejects(new Gate({ url: gate.url, key: "wrong" }).whoami(), Unauthenticated);
  });
  it("says that a credential may not do it", async () => {
    const { api_key } = await client.issueKey({ name: "w", principal_kind: "worker", principal_id: "w" });
    await assert.rejects(new Gate({ url: gate.url, key: api_key }).listAudit(), Forbidden);
  });
  it("says that nobody is there, or somebody else", async () => {
    const other = createServer((_, answer) => answer.end('{"ok": true}')).listen(0, "127.0.0.1");
    await once(other, "listening");
    const url = `http://127.0.0.1:${other.address().port}`;
    await assert.rejects(new Gate({ url }).health(), NotAGate);
    other.close();
    await assert.rejects(new Gate({ url, patienceSeconds: 0.2 }).health(), error => error instanceof Unreachable && !error.sent);
  });
  it("keeps a credential off a plain wire", () => assert.throws(() => new Gate({ url: "http://gate.example.com", key: "k" }), /plain HTTP/));
  it("says where JSON cannot express a value", async () => {
    await assert.rejects(client.submit("echo", { a: { n: NaN } }), /n is NaN/);
    await assert.rejects(client.submit("echo", 1n), /bigint/);
  });
});

describe("waiting", () => {
  it("can be given up, by time and by a signal, and the task goes on", async () => {
    const handle = await client.submit("waits", null), stop = new AbortController();
    await assert.rejects(handle.result({ timeoutSeconds: 0.1 }), WaitTimeout);
    setTimeout(() => stop.abort(new Error("enough")), 100);
    await assert.rejects(handle.result({ signal: stop.signal }), /enough/);
    assert.equal(await handle.cancel(), true);
  });
});

describe("a tool", () => {
  const told = { description: "echoes", inputSchema: z.object({ page: z.number() }) };
  it("of the AI SDK is one task for one call of the model", async () => {
    const tool = aiTool(client, "echo", told);
    const results = [await tool.execute({ page: 1 }, { toolCallId: "c1" }), await tool.execute({ page: 1 }, { toolCallId: "c1" })];
    assert.deepEqual(results, [{ page: 1 }, { page: 1 }]);
    const keys = [];
    for await (const task of client.each("list_tasks", { type: "echo" })) keys.push(task.idempotency_key);
    assert.equal(keys.filter(key => key === "echo:c1").length, 1);
  });
  it("of the AI SDK is called by its own loop", async () => {
    const { generateText, isStepCount, stepCountIs } = await import("ai");
    const { MockLanguageModelV4 } = await import("ai/test");
    const usage = { inputTokens: { total: 1, noCache: 1 }, outputTokens: { total: 1, text: 1 } };
    const say = (content, finishReason) => ({ content, finishReason: { unified: finishReason, raw: finishReason }, usage, warnings: [] });
    const model = new MockLanguageModelV4({ doGenerate: [
      say([{ type: "tool-call", toolCallId: "c9", toolName: "scan", input: '{"page": 9}' }], "tool-calls"), say([{ type: "text", text: "done" }], "stop")] });
    const { steps, text } = await generateText({ model, prompt: "scan page 9", tools: { scan: aiTool(client, "echo", told) }, stopWhen: (isStepCount ?? stepCountIs)(3) });
    assert.deepEqual(steps[0].toolResults[0].output, { page: 9 });
    assert.equal(text, "done");
  });
  it("of Mastra and of Claude has a name that a model may say", async () => {
    assert.equal(mastraTool(client, "ocr.scan", told).id, "ocr_scan");
    assert.deepEqual(await mastraTool(client, "echo", told).execute({ page: 2 }, { agent: { toolCallId: "c2" } }), { page: 2 });
    assert.deepEqual(await claudeTool(client, "echo", told).handler({ page: 3 }), { content: [{ type: "text", text: '{"page":3}' }] });
    const failed = await claudeTool(client, "never", told).handler({ page: 3 });
    assert.equal(failed.isError, true);
  });
  it("that is aborted cancels its task if it is told to", async () => {
    const stop = new AbortController(), tool = aiTool(client, "waits", { ...told, onAbort: "cancel" });
    setTimeout(() => stop.abort(new Error("the user has left")), 200);
    await assert.rejects(tool.execute({ page: 1 }, { toolCallId: "c4", abortSignal: stop.signal }), /the user has left/);
    const tasks = [];
    for await (const task of client.each("list_tasks", { type: "waits", status: "canceled" })) tasks.push(task.idempotency_key);
    assert.ok(tasks.includes("waits:c4"));
  });
});

describe("a webhook", () => {
  const secret = `whsec_${Buffer.from("a secret of some bytes").toString("base64")}`;
  const body = JSON.stringify({ type: "task.completed", timestamp: "2026-01-01T00:00:00Z", data: { task_id: "t" } });
  const sign = (id, moment, text = body) => ({ "webhook-id": id, "webhook-timestamp": String(moment),
    "webhook-signature": `v1,${createHmac("sha256", "a secret of some bytes").update(`${id}.${moment}.${text}`).digest("base64")}` });
  const now = () => Math.floor(Date.now() / 1000);

  it("is verified, with each of several secrets", async () => {
    const event = await verifyWebhook(body, sign("m1", now()), [`whsec_${btoa("another")}`, secret]);
    assert.deepEqual([event.id, event.type, event.data.task_id], ["m1", "task.completed", "t"]);
  });
  it("is refused if it is forged, old or bare", async () => {
    await assert.rejects(verifyWebhook(`${body} `, sign("m1", now()), secret), WebhookRejected);
    await assert.rejects(verifyWebhook(body, sign("m1", now() - 301), secret), /too far from now/);
    await assert.rejects(verifyWebhook(body, {}, secret), /missing/);
  });
  it("of a real gate is handled by a function of requests", async () => {
    const heard = [], handle = webhookHandler(() => undefined, () => undefined);
    assert.equal(typeof handle, "function");
    const receive = webhookHandler(secret, event => { heard.push(event.id); if (event.id === "m3") throw new Error("busy"); });
    const post = headers => receive(new Request("http://x/", { method: "POST", body, headers }));
    const log = console.error;
    console.error = () => undefined;
    assert.deepEqual([(await post(sign("m2", now()))).status, (await post(sign("m3", now()))).status, (await post(sign("m4", 0))).status], [204, 500, 400]);
    console.error = log;
    assert.deepEqual(heard, ["m2", "m3"]);
  });
});
