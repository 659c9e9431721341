"""`asyncgate new`: a first worker and a first agent, as files to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

WORKER_PY = '''\
"""A worker: it counts words, one a second, and goes on behind its checkpoint if it is killed."""

import time

from asyncgate.clients import Job, Worker

worker = Worker(worker_id="counter-1")      # of the gate at ASYNCGATE_URL, with ASYNCGATE_API_KEY


@worker.task("words.count")
def count(text: str, job: Job) -> dict[str, int]:
    done = job.checkpoint or 0              # what an earlier run has saved
    for word in text.split()[done:]:
        time.sleep(1)                       # slow work
        done += 1
        job.save(done)                      # raises Lost if the task was canceled
        print(word, done, flush=True)
    return {"words": done}


worker.run()
'''
AGENT_PY = '''\
"""An agent: it hands over work and waits for the result. Run it again: the same key is the same task."""

from asyncgate.clients import SyncGate

gate = SyncGate(agent_id="ada")
print(gate.submit("words.count", "to be or not to be", key="hamlet-1").result())
'''
WORKER_JS = '''\
// A worker: it counts words, one a second, and goes on behind its checkpoint if it is killed.
import { setTimeout as pause } from "node:timers/promises";
import { Worker } from "asyncgate";

const worker = new Worker({ workerId: "counter-1" });      // of the gate at ASYNCGATE_URL, with ASYNCGATE_API_KEY

worker.task("words.count", async (text, job) => {
  let done = job.checkpoint ?? 0;                           // what an earlier run has saved
  for (const word of text.split(" ").slice(done)) {
    await pause(1000, undefined, { signal: job.signal });   // slow work, which ends when the task is canceled
    await job.save(++done);
    console.log(word, done);
  }
  return { words: done };
});

await worker.run();
'''
AGENT_JS = '''\
// An agent: it hands over work and waits for the result. Run it again: the same key is the same task.
import { Gate } from "asyncgate";

const gate = new Gate({ agentId: "ada" });
const handle = await gate.submit("words.count", "to be or not to be", { key: "hamlet-1" });
console.log(await handle.result());
'''
PACKAGE_JSON = '{ "private": true, "type": "module" }\n'
# The files of each language, and how its programs are run.
TEMPLATES = {
    "python": ({"worker.py": WORKER_PY, "agent.py": AGENT_PY}, "python3 worker.py", "python3 agent.py"),
    "typescript": ({"worker.mjs": WORKER_JS, "agent.mjs": AGENT_JS, "package.json": PACKAGE_JSON},
                   "node worker.mjs", "node agent.mjs"),
}
PACKING = """\
The npm package is not published yet.
Make it once, in a checkout of AsyncGate, which is CHECKOUT below:

  python3 -m asyncgate.commands.declare
  (cd clients/typescript && npm install && npm pack)

"""
NEXT = """\
{folder} has a worker and an agent.  {packing}Next, in three terminals:

  asyncgate dev
  cd {place} && {first}asyncgate worker --watch -- {worker}
  cd {place} && {agent}

Kill the worker in the middle, or change its file: it goes on behind its last word.
"""


def make_files(name: str, language: str, version: str) -> str:
    """Write the files into a folder; return what to do next.  Replaces no file."""
    folder = Path(name)
    files, worker, agent = TEMPLATES[language]
    if there := [file for file in files if (folder / file).exists()]:
        raise click.ClickException(f"{folder} has {', '.join(there)} already: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    packed = language == "typescript"
    first = f"npm install CHECKOUT/clients/typescript/asyncgate-{version}.tgz && " * packed
    return NEXT.format(folder=folder, place=shlex.quote(str(folder)), worker=worker, agent=agent, first=first,
                       packing=PACKING * packed)
