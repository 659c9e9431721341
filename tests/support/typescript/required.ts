// A user of CommonJS.
import { Gate, Worker } from "asyncgate";
import { startGate } from "asyncgate/testing";

const gate: Gate = new Gate();
export const worker = new Worker().task<number>("double", n => 2 * n);
export const made: Promise<string> = gate.submit("double", 2).then(handle => handle.taskId);
export const started: Promise<string> = startGate().then(test => test.url);
