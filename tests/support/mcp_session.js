// A session of a TypeScript client of MCP, told by standard input: node mcp_session.js GENERATION ERA URL TOKEN
// It answers as mcp_session.py does.
import { createInterface } from "node:readline";

const [generation, era, url, token] = process.argv.slice(2);

async function libraries() {
  if (generation === "v2") return import("@modelcontextprotocol/client");
  const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
  const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
  return { Client, StreamableHTTPClientTransport };
}

const { Client, StreamableHTTPClientTransport } = await libraries();
const options = generation === "v2" ? { versionNegotiation: { mode: era } } : {};
let client;

async function connect() {
  client = new Client({ name: "a-test", version: "1" }, options);
  await client.connect(new StreamableHTTPClientTransport(new URL(url), {
    requestInit: { headers: { Authorization: `Bearer ${token}` } },
  }));
  return { connected: true };
}

function tell({ progress, total = null, message = null }) {
  console.log(JSON.stringify({ told: [progress, total, message] }));
}

function call([name, args, ...wishes]) {
  const more = wishes.length ? { onprogress: tell } : {};
  return client.callTool({ name, arguments: args }, ...(generation === "v2" ? [more] : [undefined, more]));
}

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  let told;
  try {
    told = asked === "connect" ? await connect() : await call(asked);
  } catch (error) {
    told = { failed: error.name, text: String(error), data: error.data };
  }
  console.log(JSON.stringify(told));
}
process.exit(0);
