// The driver of BullMQ: a queue, and a worker that is asked for single jobs.
"use strict";

const { needed } = require("./child.cjs");
const { Queue, Worker } = needed("bullmq");

const NAME = "bench";

exports.openPeer = async (url, clients, payload) => {
  const { hostname, port } = new URL(url);
  const connection = { host: hostname, port: Number(port), maxRetriesPerRequest: null };
  const queue = new Queue(NAME, { connection });
  const worker = new Worker(NAME, null, { connection, autorun: false });
  await Promise.all([queue.waitUntilReady(), worker.waitUntilReady()]);

  async function* cycle(client) {
    await queue.add(NAME, payload);
    yield "create";
    let job;
    while (!job) job = await worker.getNextJob(`client-${client}`, { block: false });
    yield "claim";
    await job.moveToCompleted("done", `client-${client}`, false);
    yield "complete";
  }

  return { modes: { cycle } };
};
