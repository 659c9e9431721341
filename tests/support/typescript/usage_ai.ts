// A tool among those of the AI SDK, whose own types need the DOM and are not for every strictness.
import { generateText } from "ai";
import { z } from "zod";
import { Gate } from "asyncgate";
import { aiTool } from "asyncgate/ai";

const scan = aiTool(new Gate(), "ocr.scan", { description: "reads a page", inputSchema: z.object({ page: z.number() }), timeoutSeconds: 60 });
void scan.execute({ page: 1 }, { toolCallId: "c" });
// @ts-expect-error: a page is a number
void scan.execute({ page: "1" }, { toolCallId: "c" });
export const told = generateText({ model: "a/b", prompt: "scan page 3", tools: { scan } });
