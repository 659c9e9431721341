// A model that says what it is told to say; what it is asked and what its tools do is noted in a file, where the first process dies.
import { appendFileSync, readFileSync } from "node:fs";
import { MockLanguageModelV4 } from "ai/test";

const { NOTES, DIES_AT } = process.env, usage = { inputTokens: { total: 1, noCache: 1 }, outputTokens: { total: 1, text: 1 } };

export function note(what) {
  appendFileSync(NOTES, `${what}\n`);
  if (what === DIES_AT && readFileSync(NOTES, "utf8").split("\n").filter(line => line === what).length === 1) process.kill(process.pid, "SIGKILL");
}

export function openai() {
  return new MockLanguageModelV4({ doGenerate: async ({ prompt }) => {
    const told = prompt.filter(({ role }) => role === "tool").map(({ content }) => content[0].output.value);
    note(`model${told.length}`);
    const content = told.length ? [{ type: "text", text: `it is ${told[0]}` }]
      : [{ type: "tool-call", toolCallId: "call_1", toolName: "deploy", input: '{"version": "v7"}' }];
    const reason = told.length ? "stop" : "tool-calls";
    return { content, finishReason: { unified: reason, raw: reason }, usage, warnings: [], response: { timestamp: new Date() } };
  } });
}
