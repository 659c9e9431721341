// The process of a queue that npm has, under `asyncgate bench --beside`: it runs a turn for each line of its input.
//
//   node child.cjs version PACKAGE              prints the version of an installed package
//   node child.cjs where FILE                   prints the path of a file of an installed package
//   node child.cjs DRIVER URL CLIENTS PAYLOAD   prints {"modes": [...]}, and one answer for each order
//
// It ends with its input.  Packages are looked for from the current folder, and in NODE_PATH.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const readline = require("node:readline");
const { createRequire } = require("node:module");
const { performance } = require("node:perf_hooks");

const TASKS_PER_BATCH = 100;
const needed = createRequire(path.join(process.cwd(), "from-here.js"));

function versionOf(name) {
  const folders = [...needed.resolve.paths(name)].map((folder) => path.join(folder, name, "package.json"));
  const found = folders.find((file) => fs.existsSync(file));
  return found ? JSON.parse(fs.readFileSync(found, "utf8")).version : undefined;
}

async function runOrder(peer, order) {
  const took = {};
  let left = order.count ?? Infinity;
  await peer.begin?.(order.clients);
  const begun = performance.now();
  const until = order.count == null ? begun + order.seconds * 1000 : Infinity;
  const runClient = async (number) => {
    while (performance.now() < until && left-- > 0) {
      let sent = performance.now();
      for await (const step of peer.modes[order.mode](number)) {
        const now = performance.now();
        (took[step] ??= []).push((now - sent) / 1000);
        sent = now;
      }
    }
  };
  await Promise.all(Array.from({ length: order.clients }, (_, number) => runClient(number)));
  await peer.settle?.();
  const lasted = (performance.now() - begun) / 1000;
  await peer.end?.();
  return { lasted, took };
}

async function main(driver, url, clients, payload) {
  if (driver === "version") {
    const version = versionOf(url);
    return version ? console.log(version) : process.exit(1);
  }
  if (driver === "where") {
    return console.log(needed.resolve(url.replace("{platform}", process.platform).replace("{arch}", process.arch)));
  }
  const answer = (said) => process.stdout.write(`${JSON.stringify(said)}\n`);
  console.log = console.info = console.error; // what a package prints is no answer
  const { openPeer } = require(path.join(__dirname, `${driver}.cjs`));
  const peer = await openPeer(url, Number(clients), JSON.parse(payload));
  answer({ modes: Object.keys(peer.modes) });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    answer(await runOrder(peer, JSON.parse(line)));
  }
  process.exit(0);
}

module.exports = { needed, TASKS_PER_BATCH };

if (require.main === module) {
  main(...process.argv.slice(2)).catch((wrong) => {
    console.error(String(wrong?.stack ?? wrong).split("\n").slice(0, 1).join());
    process.exit(1);
  });
}
