// The installed package against a real gate, by Node's own test runner.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createHmac } from "node:crypto";
import { createRequire } from "node:module";
import { once } from "node:events";
import { watch } from "node:fs";
import { mkdtemp, readdir, readFile, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import * as valibot from "valibot";
import { z } from "zod";
import { Done, Fail, Forbidden, Gate, InvalidRequest, LeaseInvalid, NotAGate, NotFound, Refusal, Retry, TaskFailed, Unauthenticated, Unreachable, WaitTimeout, Worker } from "asyncgate";
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
  it("asks at once for a type that is registered while it waits, and says what it asks for", async () => {
    const lines = [], late = gate.worker({ workerId: "late", declare: false, log: line => lines.push(line) }).task("early", () => 1);
    const serving = late.serve();
    await (await client.submit("early", null)).result();
    late.task("late", () => 2);
    assert.equal(await (await client.submit("late", null)).result({ timeoutSeconds: 10 }), 2);
    late.stop();
    await serving;
    assert.deepEqual(lines, [`late: asks ${gate.url} for early`]);
  });
  it("has one function for a type, and no option that nobody reads", () => {
    assert.throws(() => gate.worker().task("a", () => 1).task("a", () => 2), /has a function for "a"/);
    assert.throws(() => gate.worker().task("a", { retries: false }, () => 1), /worker\.task\("a", …\) has no option retries/);
    assert.throws(() => new Worker({ url: gate.url, concurency: 2 }), /Worker has no option concurency; it has .*concurrency/);
    assert.throws(() => new Gate({ url: gate.url, token: "a" }), /Gate has no option token; it has url, key/);
  });
  it("names its option where it cannot keep its state", async () => {
    const file = join(await mkdtemp(join(tmpdir(), "state-")), "file");
    await writeFile(file, "");
    await assert.rejects(gate.worker({ state: file }).task("a", () => 1).serve(), /cannot be kept in .*`state: null`/);
  });
  it("that may take for ever to stop finishes its task", async () => {
    const patient = gate.worker({ drainSeconds: Infinity, patienceSeconds: 2 ** 40, declare: false, log: () => undefined });
    patient.task("drained", async () => { patient.stop(); await new Promise(resolve => setTimeout(resolve, 300)); return "done"; });
    const handle = await client.submit("drained", null);
    await patient.serve();
    assert.equal(await handle.status(), "succeeded");
  });
  it("needs a function, and numbers that are ones", async () => {
    await assert.rejects(new Worker({ url: gate.url, state: null }).serve(), /no function/);
    for (const wrong of [{ concurrency: 0 }, { concurrency: 1.5 }, { ttlSeconds: 0.5 }, { ttlSeconds: NaN }, { drainSeconds: -1 }, { outageSeconds: NaN }])
      assert.throws(() => new Worker({ url: gate.url, ...wrong }), new RegExp(`RangeError: ${Object.keys(wrong)[0]} must be .* or more, not ${Object.values(wrong)[0]}`));
  });
});

describe("what a function throws", () => {
  const lines = [], hostile = new Error("x"), circle = new Error("round");
  Object.defineProperty(hostile, "message", { get() { throw new Error("no"); } });
  circle.cause = circle;
  const thrown = {
    caused: () => new Error("fetch failed", { cause: new Error("connect refused", { cause: Object.assign(new AggregateError([]), { code: "ECONNREFUSED" }) }) }),
    several: () => new AggregateError([new Error("the first")], "all failed"), plain: () => ({ code: "busy", message: "the printer is busy" }), other: () => ({ page: 7 }),
    circle: () => circle, hostile: () => hostile, bare: () => Object.create(null), proxy: () => new Proxy({}, { getPrototypeOf() { throw hostile; }, get() { throw hostile; } }),
    detail: () => new Fail("no", { code: "bad", detail: { when: 1n } }), after: () => new Retry("later", { after: NaN }), text: () => "just\0 text" };
  let failing, serving;

  before(() => {
    failing = gate.worker({ workerId: "failing", concurrency: 10, declare: false, log: line => lines.push(line) });
    for (const [name, make] of Object.entries(thrown)) failing.task(name, () => { throw make(); });
    failing.task("chooses", { retry: () => { throw new Error("no"); } }, () => { throw new Error("mine"); });
    failing.task("artifacts", () => new Done(1, { artifacts: [{ type: "x", uri: "y", size: 1n }] }));
    failing.task("parks", (_, job) => job.park({ after: NaN }));
    serving = failing.serve();
  });
  after(async () => {
    failing.stop();
    await serving;
  });
  const fail = async (type, terms = {}) => {
    const handle = await client.submit(type, null, { max_attempts: 1, ...terms });
    return await handle.result({ timeoutSeconds: 20 }).then(() => assert.fail(), failure => { assert.ok(failure instanceof TaskFailed, String(failure)); return failure.error; });
  };

  it("tells its causes, and what an object says of itself", async () => {
    const told = async type => { const { code, message } = await fail(type); return [code, message]; };
    assert.deepEqual(await told("caused"), ["Error", "fetch failed: connect refused: ECONNREFUSED"]);
    assert.deepEqual(await told("several"), ["AggregateError", "all failed: the first"]);
    assert.deepEqual(await told("plain"), ["busy", "the printer is busy"]);
    assert.deepEqual(await told("other"), ["error", '{"page":7}']);
    assert.deepEqual(await told("bare"), ["error", "{}"]);
    assert.deepEqual(await told("circle"), ["Error", "round"]);
    assert.deepEqual(await told("text"), ["error", "just\ufffd text"]);
    assert.deepEqual(await told("chooses"), ["Error", "mine"]);
  });
  it("fails the task, whatever it is: nothing runs out its lease", async () => {
    for (const type of ["hostile", "proxy"]) assert.match((await fail(type)).message, /cannot be read/);
    assert.deepEqual(await fail("detail"), { code: "bad", message: "no" });
    assert.equal((await fail("after")).message, "later");
    assert.match((await fail("artifacts")).message, /^Done\.artifacts\[0\]\.size cannot be written as JSON: it is a bigint$/);
    assert.match((await fail("parks")).message, /after_seconds is NaN/);
    assert.deepEqual(lines.filter(line => line.includes("its lease will run out")), []);
  });
  it("is in the log with its place, and the last attempt is called so", async () => {
    lines.length = 0;
    await fail("caused", { max_attempts: 2, retry_backoff_seconds: 0 });
    const [first, second, last, ...more] = lines;
    assert.match(first, /attempt 1 failed: fetch failed: connect refused: ECONNREFUSED\n\s+at .*package\.test\.mjs/);
    assert.match(second, /attempt 2 failed: /);
    assert.match(last, /that was its last attempt; it failed for good$/);
    assert.deepEqual(more, []);
  });
});

describe("an end that the gate does not take at once", () => {
  let folder;
  const letters = async () => (await Promise.all((await readdir(folder)).filter(name => name.endsWith(".letters")).map(name => readFile(join(folder, name), "utf8")))).join("").split("\n").filter(Boolean);
  const until = async count => { while ((await letters().catch(() => [])).length !== count) await new Promise(done => setTimeout(done, 10)); };

  before(async () => { folder = await mkdtemp(join(tmpdir(), "state-")); });

  it("is on disk before it is sent again, each of several, and gone when the gate has it", async () => {
    let away = true;
    const cut = (url, how) => away && url.endsWith("/complete") ? Promise.reject(new TypeError("fetch failed")) : fetch(url, how);
    const ending = gate.worker({ workerId: "ending", concurrency: 5, declare: false, state: folder, fetch: cut, log: () => undefined }).task("ends", n => n);
    const serving = ending.serve(), handles = await Promise.all([1, 2, 3, 4, 5].map(n => client.submit("ends", n)));
    await until(5);
    away = false;
    assert.deepEqual(await Promise.all(handles.map(handle => handle.result())), [1, 2, 3, 4, 5]);
    await until(0);
    const seen = [], watching = watch(folder, (_, name) => seen.push(name));
    for (const n of [6, 7]) assert.equal(await (await client.submit("ends", n)).result(), n);
    ending.stop();
    await serving;
    watching.close();
    assert.deepEqual(seen.filter(name => name.includes(".letters")), []);       // what is delivered at once costs no write
  });
  it("is on disk while a gate that says nothing is waited for", async () => {
    const stop = new AbortController();
    const mute = (url, how) => url.endsWith("/complete") && !stop.signal.aborted ? new Promise((_, reject) => stop.signal.addEventListener("abort", () => reject(new TypeError("cut off")))) : fetch(url, how);
    const ending = gate.worker({ workerId: "muted", declare: false, state: folder, fetch: mute, log: () => undefined }).task("mute", n => n);
    const serving = ending.serve(), handle = await client.submit("mute", 1);
    await until(1);
    stop.abort();
    assert.equal(await handle.result(), 1);
    await until(0);
    ending.stop();
    await serving;
  });
  it("is delivered by the next process if this one is killed, and the work is not done again", async () => {
    const program = `import { Worker } from "asyncgate";
      const cut = (url, how) => url.endsWith("/complete") ? Promise.reject(new TypeError("fetch failed")) : fetch(url, how);
      await new Worker({ workerId: "killed", url: "${gate.url}", key: "${gate.key}", state: ${JSON.stringify(folder)}, fetch: cut }).task("once", () => "first").run();`;
    const child = spawn(process.execPath, ["--input-type=module", "-e", program], { stdio: "ignore" }), handle = await client.submit("once", null);
    await until(1);
    child.kill("SIGKILL");
    await once(child, "exit");
    const next = gate.worker({ workerId: "killed", declare: false, state: folder, log: () => undefined }).task("once", () => "again"), serving = next.serve();
    assert.equal(await handle.result(), "first");
    next.stop();
    await serving;
  });
});

describe("output that no gate stores", () => {
  it("is cleaned, or left out alone, and what is good stays", async () => {
    const lines = [], writing = gate.worker({ workerId: "writing", declare: false, log: line => lines.push(line) }).task("writes", async (_, job) => {
      await job.print("a\0b");
      let deep = 1;
      for (let level = 0; level < 1000; level++) deep = [deep];
      const chunks = ["c\0d", { "\0": "\ud800", path: "C:\\u0000" }, deep, "e", { text: "x".repeat(1_500_000) }, "f"];
      for await (const _ of job.stream(chunks)) continue;
      job.log("g\0h");
    });
    const serving = writing.serve(), handle = await client.submit("writes", null), chunks = [];
    await handle.result();
    for await (const chunk of handle.stream()) chunks.push(chunk);
    writing.stop();
    await serving;
    assert.deepEqual(chunks, ["a\ufffdb\n", "c\ufffdd", { "\ufffd": "\ufffd", path: "C:\\u0000" }, "e", "f"]);
    assert.equal(lines.filter(line => /a chunk of its output is not sent/.test(line)).length, 2);
  });
  it("that is a step says which, and what to do", async () => {
    const writing = gate.worker({ workerId: "stepping", declare: false, log: () => undefined }).task("steps", (_, job) => job.step("scan", () => "x".repeat(5_000_000)));
    const serving = writing.serve();
    await assert.rejects((await client.submit("steps", null)).result(), error => /^what step scan gave is too large for the gate \(.*\): keep it elsewhere, and give its address instead$/.test(error.error.message));
    writing.stop();
    await serving;
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
  const odd = [{ type: "result", uri: "s3://reports/1.pdf", sha256: "ab".repeat(32), bytes: 12 },
    { type: "result", uri: "https://example.com/x", sha256: "abc" }];
  let folder, payloads, rich, serving, reading;

  before(async () => {
    folder = await mkdtemp(join(tmpdir(), "pay loads-"));
    payloads = new Payloads(new FolderStore(folder), { aboveBytes: 1000 });
    rich = gate.client({ payloads });
    reading = gate.worker({ workerId: "reading", declare: false, payloads, log: () => undefined });
    reading.task("large", payload => payload === "small" ? "small" : { ...payload, more: payload.text });
    reading.task("report", payload => new Done(payload.text, { artifacts: odd }));
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
  it("is found behind the worker's own artifacts, and what is not a pointer is passed over", async () => {
    const handle = await rich.submit("report", large);
    assert.equal(await handle.result(), large.text);
    assert.deepEqual((await handle.task()).result.artifacts.slice(0, 2), odd);
    assert.equal(await payloads.fetchResult({ result: null, artifacts: odd.slice(1) }), null);
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
    const same = { b: 1 }, flaws = [
      [{ a: { n: NaN } }, "payload.a.n is NaN: JSON has no such number"], [{ a: [1, Infinity] }, "payload.a[1] is Infinity: JSON has no such number"],
      [{ same, a: [same, [{ c: new Map() }]] }, "payload.a[1][0].c cannot be written as JSON: it is a Map"], [1n, "payload cannot be written as JSON: it is a bigint"],
      [[new Date(NaN)], "payload[0] is an invalid Date"], [{ a: fetch }, undefined], [[/x/], "payload[0] cannot be written as JSON: it is a RegExp"],
      [{ a: new TypeError("x") }, "payload.a cannot be written as JSON: it is a TypeError"], [new Uint8Array(2), "payload cannot be written as JSON: it is a Uint8Array"],
      [{ a: Promise.resolve(1) }, "payload.a cannot be written as JSON: it is a Promise"], [{ a: new Date(0), b: Buffer.from("a"), c: same }, undefined]];
    for (const [payload, message] of flaws)
      assert.equal(await client.submit("later", payload).then(handle => void handle.cancel(), error => error.message), message);
  });
  it("says what is wrong with the address of a gate", () => {
    for (const url of ["127.0.0.1:18231", "", "localhost:8080", "ftp://x"])
      assert.throws(() => new Gate({ url }), { name: "TypeError", message: `a gate's URL is like http://127.0.0.1:8080, not ${JSON.stringify(url)}` });
    assert.throws(() => new Gate({ url: "https://ada:secret@example.com" }), error => /give it as `key`/.test(error.message) && !error.message.includes("secret"));
  });
  it("does not show a key that no header can have", async () => {
    for (const key of ["sec\nret", "secret\n", "secrét", "sec\u2028ret"])
      assert.throws(() => new Gate({ url: gate.url, key }), error => error instanceof TypeError && !error.message.includes("sec"));
    await assert.rejects(new Gate({ url: gate.url, key: async () => "sec\nret" }).whoami(), error => error instanceof TypeError && !error.message.includes("sec"));
  });
  it("says in words why a lease is lost", async () => {
    const handle = await client.submit("reasons", null), reasons = [];
    const canceled = gate.worker({ workerId: "canceled", declare: false, log: () => undefined }).task("reasons", (_, job) => new Promise(done => {
      job.signal.addEventListener("abort", () => done(reasons.push(job.signal.reason.message)));
      void handle.cancel();
    }));
    const serving = canceled.serve();
    while (!reasons.length) await new Promise(done => setTimeout(done, 20));
    canceled.stop();
    await serving;
    assert.deepEqual(reasons, ["the lease is lost: the task was canceled"]);
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
  it("that is aborted while it creates its task cancels that one, too", async () => {
    const stop = new AbortController(), leave = async (url, init) => {
      const answer = await fetch(url, init);
      if (init?.method === "POST" && String(url).endsWith("/v1/tasks")) stop.abort(new Error("the user has left"));
      return answer;
    };
    const tool = aiTool(gate.client({ fetch: leave }), "waits", { ...told, onAbort: "cancel" });
    await assert.rejects(tool.execute({ page: 1 }, { toolCallId: "c5", abortSignal: stop.signal }), /the user has left/);
    const tasks = [];
    for await (const task of client.each("list_tasks", { type: "waits", status: "canceled" })) tasks.push(task.idempotency_key);
    assert.ok(tasks.includes("waits:c5"));
    await assert.rejects(tool.execute({ page: 1 }, { toolCallId: "c6", abortSignal: stop.signal }), /the user has left/);
    assert.equal((await client.call("list_tasks", { type: "waits", limit: 1 })).tasks[0].idempotency_key, "waits:c5");
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
  it("needs its secret", async () => {
    for (const none of ["", undefined, [], "whsec_", [secret, ""]]) await assert.rejects(verifyWebhook(body, sign("m1", now()), none), { name: "TypeError", message: /the secret of the webhook is missing/ });
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
