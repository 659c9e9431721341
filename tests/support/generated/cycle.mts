// The whole cycle with types that openapi-typescript made, which tsc checks, over openapi-fetch.
import createClient from "openapi-fetch";
import type { components, paths } from "./made.js";

const [url, token] = process.argv.slice(2);
const gate = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${token}` } });

function good<T>(answer: { data?: T; error?: unknown }): T {
  if (answer.data === undefined) throw new Error(JSON.stringify(answer.error));
  return answer.data;
}

function same(found: unknown, expected: unknown): void {
  if (JSON.stringify(found) !== JSON.stringify(expected)) throw new Error(`${JSON.stringify(found)}, not ${JSON.stringify(expected)}`);
}

const task: components["schemas"]["CreateTask"] = {
  type: "made", payload: { n: [1, { a: null }] }, agent_id: "ada", requirements: { capabilities: ["gpu"] }, result_delivery: "inline" };
// @ts-expect-error: a task without a payload says null
const incomplete: components["schemas"]["CreateTask"] = { type: "made" };
const made = good(await gate.POST("/v1/tasks", { body: task }));
const [offer] = good(await gate.POST("/v1/leases/claim", { body: { worker_id: "w1", capabilities: ["gpu"], accept_types: ["made"] } })).tasks;
same([offer.task_id, offer.payload], [made.task_id, task.payload]);
const held = { worker_id: "w1", lease_id: offer.lease_id };
const params = { path: { task_id: offer.task_id } };
good(await gate.POST("/v1/tasks/{task_id}/running", { params, body: held }));
good(await gate.POST("/v1/tasks/{task_id}/progress", { params, body: { ...held, progress: { done: 0.5 } } }));
good(await gate.POST("/v1/leases/renew", { body: { ...held, task_id: offer.task_id } }));
good(await gate.POST("/v1/tasks/{task_id}/complete", { params, body: { ...held, result: { count: 12 }, completion_metadata: { pages: 3 }, artifacts: [{ uri: "file:///x" }] } }));
const done = good(await gate.GET("/v1/tasks/{task_id}", { params }));
same([done.status, done.result?.result, done.obligation_open], ["succeeded", { count: 12 }, false]);
const { receipts } = good(await gate.GET("/v1/receipts", { params: { query: { task_id: made.task_id } } }));
same(receipts.some(receipt => receipt.receipt_type === "task.completed"), true);
same(good(await gate.GET("/v1/obligations/open", { params: { query: { agent_id: "ada" } } })).open_obligations, []);
const other = good(await gate.POST("/v1/tasks", { body: { type: "made", payload: "text", agent_id: "ada" } }));
const [again] = good(await gate.POST("/v1/leases/claim", { body: { worker_id: "w1", accept_types: ["made"] } })).tasks;
good(await gate.POST("/v1/tasks/{task_id}/fail", { params: { path: { task_id: again.task_id } }, body: { worker_id: "w1", lease_id: again.lease_id, error: { why: "no" } } }));
same(good(await gate.GET("/v1/tasks/{task_id}", { params: { path: { task_id: other.task_id } } })).result?.error, { why: "no" });
console.log("the cycle is whole");
