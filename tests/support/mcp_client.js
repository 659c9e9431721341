// A story told to a gate by a TypeScript client of MCP: node mcp_client.js CLIENT ERA URL TOKEN
// CLIENT is "v2" (@modelcontextprotocol/client) or "v1" (@modelcontextprotocol/sdk), which knows no ERA but "legacy".

const [generation, era, url, token] = process.argv.slice(2);

async function libraries() {
  if (generation === "v2") return import("@modelcontextprotocol/client");
  const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
  const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
  return { Client, StreamableHTTPClientTransport };
}

const { Client, StreamableHTTPClientTransport } = await libraries();
const options = generation === "v2" ? { versionNegotiation: { mode: era } } : {};
const client = new Client({ name: "a-test", version: "1" }, options);
const transport = new StreamableHTTPClientTransport(new URL(url), {
  requestInit: { headers: { Authorization: `Bearer ${token}` } },
});
await client.connect(transport);
const version = generation === "v2" ? client.getNegotiatedProtocolVersion() : transport.protocolVersion;

const call = (operation, fields) => client.callTool({ name: `asyncgate.${operation}`, arguments: fields });
const said = async (operation, fields) => (await call(operation, fields)).structuredContent;

const { tools } = await client.listTools();
const made = await said("create_task", { type: "demo", agent_id: "ada", payload: { word: "zwölf" } });
const { tasks } = await said("lease_next", { worker_id: "w1" });
const held = { task_id: tasks[0].task_id, lease_id: tasks[0].lease_id, worker_id: "w1" };
const done = await said("complete", { ...held, result: { count: 12 }, artifacts: [{ uri: "file:///x" }] });
const task = await said("get_task", { task_id: made.task_id });
const late = await call("renew_lease", held);
await client.close();

console.log(JSON.stringify({ version, tools: tools.map((tool) => tool.name), task, done, late }));
