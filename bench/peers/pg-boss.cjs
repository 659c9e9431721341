// The driver of pg-boss: single jobs, and lists of them.
"use strict";

const { needed, TASKS_PER_BATCH } = require("./child.cjs");
const loaded = needed("pg-boss");

const NAME = "bench";
const PgBoss = loaded.PgBoss ?? loaded.default ?? loaded; // since its version 11 it has no default

exports.openPeer = async (url, clients, payload) => {
  const boss = new PgBoss({ connectionString: url, max: clients });
  boss.on("error", (wrong) => { console.error(String(wrong)); process.exit(1); });
  await boss.start();
  await boss.createQueue(NAME);
  const many = Array.from({ length: TASKS_PER_BATCH }, () => ({ name: NAME, data: payload }));
  const insert = boss.insert.length > 1 ? () => boss.insert(NAME, many) : () => boss.insert(many);

  async function take(most) {
    for (;;) {
      const jobs = await boss.fetch(NAME, { batchSize: most });
      if (jobs?.length) return jobs.map((job) => job.id);
    }
  }

  async function* cycle() {
    await boss.send(NAME, payload);
    yield "create";
    const ids = await take(1);
    yield "claim";
    await boss.complete(NAME, ids);
    yield "complete";
  }

  async function* batch() {
    await insert();
    yield `create ${TASKS_PER_BATCH}`;
    const ids = await take(TASKS_PER_BATCH);
    yield `claim ${TASKS_PER_BATCH}`;
    await boss.complete(NAME, ids);
    yield `complete ${TASKS_PER_BATCH}`;
  }

  return { modes: { cycle, batch } };
};
