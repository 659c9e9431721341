// A user of CommonJS.
import { Gate, Worker } from "asyncgate";

const gate: Gate = new Gate();
export const worker = new Worker().task<number>("double", n => 2 * n);
export const made: Promise<string> = gate.submit("double", 2).then(handle => handle.taskId);
