// The driver of Graphile Worker: jobs are added, and its own worker does them, as many at once as there are clients.
"use strict";

const { needed } = require("./child.cjs");
const { Logger, makeWorkerUtils, run } = needed("graphile-worker");

const NAME = "bench";
const SETTLE_MS = 1;

exports.openPeer = async (url, clients, payload) => {
  const logger = new Logger(() => () => {});
  const utils = await makeWorkerUtils({ connectionString: url, maxPoolSize: clients, logger });
  await utils.migrate();
  const waiting = new Map();
  let runner;

  const taskList = { [NAME]: async ({ number }) => waiting.get(number)() };

  async function* cycle(number) {
    const done = new Promise((resolve) => waiting.set(number, resolve));
    await utils.addJob(NAME, { ...payload, number });
    yield "create";
    await done;
    yield "complete";
  }

  return {
    modes: { cycle },
    begin: async (concurrency) => {
      runner = await run({ connectionString: url, concurrency, maxPoolSize: concurrency + 2, taskList, logger,
        noHandleSignals: true });
    },
    settle: async () => {
      const left = "SELECT count(*)::int AS jobs FROM graphile_worker.jobs";
      while ((await utils.withPgClient((client) => client.query(left))).rows[0].jobs > 0) {
        await new Promise((resolve) => setTimeout(resolve, SETTLE_MS));
      }
    },
    end: () => runner.stop(),
  };
};
