// The driver of Restate: a service in this process, which its server calls; requests go through its ingress.
"use strict";

const http = require("node:http");
const net = require("node:net");
const { needed } = require("./child.cjs");
const restate = needed("@restatedev/restate-sdk");

const NAME = "bench";
const PATIENCE_MS = 30_000;
const AGAIN_MS = 50;

function freePort() {
  return new Promise((resolve) => {
    const server = net.createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

function ask(agent, port, method, path, body) {
  return new Promise((resolve, reject) => {
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    const request = http.request({ agent, host: "127.0.0.1", port, method, path, headers }, (reply) => {
      const pieces = [];
      reply.on("data", (piece) => pieces.push(piece));
      reply.on("end", () => {
        const text = Buffer.concat(pieces).toString();
        if (reply.statusCode >= 300) reject(new Error(`${path}: ${reply.statusCode} ${text}`));
        else resolve(text ? JSON.parse(text) : undefined);
      });
    });
    request.on("error", reject);
    request.end(body === undefined ? undefined : JSON.stringify(body));
  });
}

// The ingress accepts connections a moment before the server can take a service, and its partitions calls.
async function askUntilReady(...asked) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    try {
      return await ask(...asked);
    } catch (wrong) {
      if (Date.now() > deadline) throw wrong;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

exports.openPeer = async (url, clients, payload) => {
  const where = new URL(url);
  const [ingress, admin] = [Number(where.port), Number(where.pathname.slice(1))];
  const agent = new http.Agent({ keepAlive: true, maxSockets: clients });
  const port = await freePort();
  const service = restate.service({ name: NAME, handlers: { run: async () => ({ ok: true }) } });
  await restate.serve({ services: [service], port });
  await askUntilReady(agent, admin, "POST", "/deployments", { uri: `http://127.0.0.1:${port}` });
  await askUntilReady(agent, ingress, "POST", `/${NAME}/run`, payload);

  async function* cycle() {
    const { invocationId } = await ask(agent, ingress, "POST", `/${NAME}/run/send`, payload);
    yield "create";
    await ask(agent, ingress, "GET", `/restate/invocation/${invocationId}/attach`);
    yield "complete";
  }

  return { modes: { cycle } };
};
