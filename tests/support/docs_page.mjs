// The page at /docs in jsdom, with the network of Node: argv is the address of a gate and its token.
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { JSDOM } = require("jsdom");
const [url, token] = process.argv.slice(2);
const page = await JSDOM.fromURL(`${url}/docs`, {
  runScripts: "dangerously",
  beforeParse(window) { window.fetch = (path, more) => fetch(new URL(path, window.location.href), more); },
});
const { document } = page.window;

async function until(holds) {
  const end = Date.now() + 30_000;
  while (!holds()) {
    if (Date.now() > end) throw new Error("it does not come");
    await new Promise(done => setImmediate(done));
  }
}

async function send(id, change) {
  const article = document.getElementById(id);
  change(name => article.querySelector(`.try [aria-label="${name}"]`));
  [...article.querySelectorAll("button")].find(one => one.textContent === "Send").click();
  const answer = article.querySelector('[aria-label="Answer"]');
  await until(() => !answer.hidden);
  const [head, , ...body] = answer.textContent.split("\n");
  return { status: Number(head.split(" ")[0]), body: JSON.parse(body.join("\n")) };
}

await until(() => document.getElementById("create_task"));
const nobody = await send("list_tasks", () => {});
document.getElementById("token").value = token;
const made = await send("create_task", field => { field("Body").value = '{"type": "page", "payload": {"n": 1}, "agent_id": "ada"}'; });
const read = await send("get_task", field => { field("task_id").value = made.body.task_id; });
const names = [...document.querySelectorAll("#create_task .schema > li > code")].map(one => one.textContent);
const fields = [...document.querySelectorAll("#get_task tbody tr td:first-child code")].map(one => one.textContent);
console.log(JSON.stringify({ nobody: nobody.status, made: made.status, payload: read.body.payload, first: names[0], parameter: fields[0],
  clauses: /\b(PH|H)\.\d|[Ss]pec \d/.test(document.body.textContent) }));
page.window.close();
