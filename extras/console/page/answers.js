// Answering what a task has asked: cards of the questions, and a form made of the schema of a question.

import {askForm, note, openDialog} from "./dialogs.js";
import {h} from "./dom.js";
import {badge, say, section, taskLink, who} from "./parts.js";
import {when} from "./time.js";
import {sayAnswer} from "./words.js";

const SHOWN = 20;
const COMMENT_FIELD = {name: "content", label: "Comment", rows: 2, hint: "Its worker gets it; may be empty"};
const JSON_FIELD = {name: "content", label: "Answer, as JSON", rows: 3, required: true};
const given = [];       // answers since the page was loaded

/** Show a card for each question of these tasks, with the buttons that answer it; `act` carries the answer out. */
export function showQuestions(page, ids, {known, act, mine, reads}) {
  const questions = ids.flatMap((id) => readOpen(page, id, known))
    .filter(({to}) => page.may("list_obligations") || (mine && to.kind === mine.kind && to.id === mine.id));
  if (!questions.length && !given.length) return null;
  const title = ["Answered", "A question waits"][questions.length] ?? "Questions wait";
  return h("div", {key: "questions"}, section(title, {},
    h("ol", {class: "cases"}, questions.slice(0, SHOWN).map((row) => showQuestion(page, row, act, reads)),
      given.slice(-SHOWN).reverse().map((row) => showGiven(page, row)))));
}

// What was answered just now stays in sight, with the way to its proof.
function showGiven(page, {message, action, receipt}) {
  return h("li", {key: receipt},
    h("p", {class: "case-head"}, badge(sayAnswer(action), action === "accept" ? "ok" : "failed"), say(message)),
    h("div", {class: "actions"},
      h("button", {class: "small", onclick: () => showProof(page, receipt).catch(fail)}, "Show its receipt")));
}

// Whoever is asked may not read the task of somebody else, but the receipt of its own answer.
async function showProof(page, receipt_id) {
  const [receipt, {showFacts}] = await Promise.all([page.call("get_receipt", {receipt_id}), import("./receipt.js")]);
  return openDialog(receipt.receipt_type, () => h("div", {class: "stack"}, showFacts(receipt, page.now())));
}

function fail(problem) {
  if (problem.name !== "AbortError") note(problem.message, "bad");
}

function readOpen(page, id, known) {
  const {value} = known(page, `inputs ${id}`, () => page.call("list_inputs", {task_id: id}));
  return (value?.inputs ?? []).filter(({state}) => state === "open").map((question) => ({...question, task_id: id}));
}

/** Return the buttons that answer what a row of what is owed asks. */
export function answerOwed(page, row, {known, act}) {
  const question = readOpen(page, row.task_id, known).find((input) => input.request_receipt_id === row.receipt_id);
  return question ? answerButtons(question, act) : null;
}

function showQuestion(page, row, act, reads) {
  const {key, message, asked_by: by, to, asked_at: at, expires_at: until, task_id: id} = row;
  return h("li", {key: row.request_receipt_id},
    h("p", {class: "case-head"}, h("strong", null, say(message))),
    h("p", {class: "quiet"}, who(by), " asks ", who(to), ", ", when(at, page.now()),
      until && [", expires ", when(until, page.now())], reads(id) && [" · ", taskLink(id)], " · ", say(key)),
    h("div", {class: "actions"}, answerButtons(row, act)));
}

/** Return the buttons that answer a question; `act` carries the answer out. */
export function answerButtons(row, act) {
  const button = (title, action, run, kind) => h("button", {key: action, class: `${kind} small`,
    "aria-label": `${title}: ${row.message}`, onclick: run}, title);
  return [button("Accept", "accept", () => askToAccept(row, act), "first"),
    button("Decline", "decline", () => askToDecline(row, act), "danger")];
}

async function askToAccept(row, act) {
  const {message, schema} = row;
  const form = schema?.type === "object" ? await import("./schema_form.js") : null;
  const fields = form ? form.listFields(schema) : [schema ? JSON_FIELD : COMMENT_FIELD];
  const read = (values) => form ? form.readContent(schema, values)
    : schema ? JSON.parse(values.content) : values.content.trim() || null;
  return askForm("Accept", {says: message, fields, button: "Accept it",
    run: (values) => answer(row, act, "accept", read(values))});
}

function askToDecline(row, act) {
  return askForm("Decline", {says: row.message, button: "Decline it", danger: true,
    fields: [{name: "reason", label: "Why", hint: "Its worker is told; may be empty"}],
    run: ({reason}) => answer(row, act, "decline", reason.trim() || null)});
}

async function answer(row, act, action, content) {
  const {open_inputs: open, receipt_id: receipt, status} = await act("answer_input",
    {task_id: row.task_id, key: row.key, action, content});
  given.push({...row, action, receipt});
  note(open ? `Answered; ${open} more to answer` : `Answered: the task is ${status}`);
}
