// The server of that page: it has the key, shows tasks, and hands out tickets.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { Gate } from "asyncgate";

const gate = new Gate({ agentId: "ada", patienceSeconds: 0.5 }), script = readFileSync("page.js");
const json = (answer, value) => answer.setHeader("content-type", "application/json").end(JSON.stringify(value));

createServer(async (request, answer) => {
  const [, kind, task_id, what] = new URL(request.url, "http://page").pathname.split("/");
  try {
    if (kind === "page.js") answer.setHeader("content-type", "text/javascript").end(script);
    else if (kind !== "tasks") answer.setHeader("content-type", "text/html").end('<!doctype html><link rel="icon" href="data:,"><div id="root"></div><script src="page.js"></script>');
    else json(answer, what === "ticket" ? await gate.makeTicket({ task_id }) : await gate.getTask({ task_id }));
  } catch (error) {
    answer.writeHead(502).end(error.message);
  }
}).listen(Number(process.argv[2]), "127.0.0.1", () => console.log("ready"));
