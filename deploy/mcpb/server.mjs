// Claude Desktop speaks MCP over standard input and output: each line becomes one POST to the gate's /mcp/u.
import { createInterface } from "node:readline";

const { ASYNCGATE_URL = "http://127.0.0.1:8080", ASYNCGATE_API_KEY: key, ASYNCGATE_AGENT: agent } = process.env;
const VERSION = "io.modelcontextprotocol/protocolVersion";
const NAME_FIELDS = { "tools/call": "name", "prompts/get": "name", "resources/read": "uri" };
const query = new URLSearchParams({ tools: "delegate", ...(agent && { principal_kind: "agent", principal_id: agent }) });
const url = `${ASYNCGATE_URL.replace(/\/+$/, "")}/mcp/u?${query}`;
const underWay = new Map();
let agreed;

const write = message => process.stdout.write(`${JSON.stringify(message)}\n`);
const refuse = (id, message) => write({ jsonrpc: "2.0", id, error: { code: -32603, message } });
const encode = text => /^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$/.test(text) && !text.startsWith("=?base64?") ? text : `=?base64?${Buffer.from(text).toString("base64")}?=`;

function describe({ method, params }) {
  const version = params?._meta?.[VERSION], name = params?.[method.startsWith("tasks/") ? "taskId" : NAME_FIELDS[method]];
  const headers = { "content-type": "application/json", accept: "application/json, text/event-stream", ...(key && { authorization: `Bearer ${key}` }) };
  if (!version) return { ...headers, ...(agreed && { "mcp-protocol-version": agreed }) };
  return { ...headers, "mcp-protocol-version": encode(version), "mcp-method": encode(method), ...(name && { "mcp-name": encode(name) }) };
}

async function carry(line, message) {
  const stop = new AbortController();
  underWay.set(message.id, stop);
  try {
    const answer = await fetch(url, { method: "POST", body: line, headers: describe(message), signal: stop.signal });
    if (answer.headers.get("content-type")?.startsWith("text/event-stream")) {
      for await (const event of createInterface({ input: answer.body })) if (event.startsWith("data:")) process.stdout.write(`${event.slice(5).trim()}\n`);
      return;
    }
    const told = await answer.json().catch(() => ({}));
    if (!told.jsonrpc) return refuse(message.id, told.message ?? `what answers at ${ASYNCGATE_URL} is not an AsyncGate (status ${answer.status})`);
    if (message.method === "initialize") agreed = told.result?.protocolVersion;
    write({ ...told, id: message.id });
  } catch {
    if (!stop.signal.aborted) refuse(message.id, `no gate answers at ${ASYNCGATE_URL}; its tasks are kept, so try again later`);
  } finally {
    underWay.delete(message.id);
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  let message;
  try { message = JSON.parse(line); } catch { continue; }
  if (message.method === "notifications/cancelled") underWay.get(message.params?.requestId)?.abort();
  else if (message.method && message.id !== undefined) void carry(line, message);
}
