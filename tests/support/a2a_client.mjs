// The client of @a2a-js/sdk against a gate: node a2a_client.mjs SDK URL BINDING TOKEN RECEIVER
// It prints {"kill": true} when everything is to be killed, reads a line when that is done, and at last prints what it saw.
import { createInterface } from "node:readline";

const [sdk, url, binding, token, receiver] = process.argv.slice(-5);
const { ClientFactory, JsonRpcTransportFactory, RestTransportFactory } = await import(`${sdk}/dist/client/index.js`);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const fetchImpl = (where, how = {}) => fetch(where, {
  ...how, headers: { ...Object.fromEntries(new Headers(how.headers)), authorization: `Bearer ${token}` } });
const factory = new ClientFactory({
  transports: [new JsonRpcTransportFactory({ fetchImpl }), new RestTransportFactory({ fetchImpl })],
  preferredTransports: [binding] });
const client = await factory.createFromUrl(`${url}/`);
const STATES = ["", "submitted", "working", "completed", "failed", "canceled", "input-required", "rejected"];

const text = (words) => ({ content: { $case: "text", value: words }, metadata: undefined, filename: "", mediaType: "" });
const message = (words, more = {}) => ({ messageId: crypto.randomUUID(), contextId: "", taskId: "", role: 1,
  parts: [text(words)], metadata: undefined, extensions: [], referenceTaskIds: [], ...more });
const request = (words, more, how = {}) => ({ tenant: "", message: message(words, more), metadata: undefined,
  configuration: { acceptedOutputModes: [], taskPushNotificationConfig: undefined, returnImmediately: false, ...how } });
const wordsOf = (parts) => parts.map((part) => part.content?.value).join(" ");
const seen = (task) => ({ id: task.id, context: task.contextId, state: STATES[task.status.state],
  says: task.status.message ? wordsOf(task.status.message.parts) : "",
  gave: task.artifacts.map((artifact) => wordsOf(artifact.parts)) });
const send = async (...given) => seen(await client.sendMessage(request(...given)));
const get = async (id, historyLength) => client.getTask({ tenant: "", id, historyLength });

async function refused(call) {
  try { await call(); } catch (error) { return error.constructor.name.replace(/^(Rest|JsonRpc)/, ""); }
  return "";
}

async function follow(events) {
  const told = [];
  for await (const { payload } of events) {
    const { $case: kind, value } = payload;
    told.push(kind === "task" ? seen(value).state : kind === "artifactUpdate" ? wordsOf(value.artifact.parts)
      : STATES[value.status.state]);
  }
  return told;
}

async function reach(id, state) {
  for (;;) {
    const task = await get(id).catch(() => null);
    if (task && seen(task).state === state) return seen(task);
    await new Promise((done) => setTimeout(done, 50));
  }
}

const card = await client.getAgentCard();
const read = await send("read", { contextId: "talk-1" });
const asking = await send("ask", { contextId: "talk-1" });
const listed = await client.listTasks({ tenant: "", contextId: "talk-1", status: 0, pageToken: "", pageSize: 10,
  includeArtifacts: true });
const history = (await get(read.id, 1)).history.map((row) => wordsOf(row.parts));
const answered = await send("7", { taskId: asking.id, contextId: "talk-1" });
const failed = await send("fail");
const errors = [
  await refused(() => get("none")), await refused(() => client.cancelTask({ tenant: "", id: read.id })),
  await refused(() => send("again", { taskId: read.id })), await refused(() => send("7", { taskId: "none" }))];
const streamed = await follow(client.sendMessageStream(request("read")));
const asked = await follow(client.sendMessageStream(request("ask")));
const canceled = await send("ask");
await client.cancelTask({ tenant: "", id: canceled.id });
const gone = seen(await get(canceled.id));

const push = { tenant: "", id: "c-1", taskId: "", url: receiver, token: "t-1",
  authentication: { scheme: "Bearer", credentials: "s3cr3t" } };
const waiting = await send("ask", {}, { returnImmediately: true });
const slow = await send("slow", {}, { returnImmediately: true, taskPushNotificationConfig: push });
const configs = await client.listTaskPushNotificationConfig({ tenant: "", taskId: slow.id, pageSize: 0, pageToken: "" });
console.log(JSON.stringify({ kill: true }));
await lines.next();
await reach(waiting.id, "input-required");
const late = await send("9", { taskId: waiting.id });
const back = client.resubscribeTask({ tenant: "", id: slow.id });
await back.next();
console.log(JSON.stringify({ go: true }));
const rest = await follow(back);
const done = await reach(slow.id, "completed");

console.log(JSON.stringify({ name: card.name, read, asking, listed: listed.tasks.map((task) => task.id), history, answered,
  failed, errors, streamed, asked, gone, configs: configs.configs.map((config) => config.id), late, rest, done }));
process.exit(0);
