// Answering what a task has asked: cards of the questions, and a form made of the schema of a question.

import {askForm, note, openDialog} from "./dialogs.js";
import {h} from "./dom.js";
import {badge, say, section, taskLink, who} from "./parts.js";
import {when} from "./time.js";
import {sayAnswer} from "./words.js";

const SHOWN = 20;
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
  return (value?.inputs ?? []).filter(({state}) => state === "open").map((one) => ({...one, task_id: id}));
}

/** Return the buttons that answer what a row of what is owed asks. */
export function answerOwed(page, row, {known, act}) {
  const question = readOpen(page, row.task_id, known).find((one) => one.request_receipt_id === row.receipt_id);
  return question ? answerButtons(question, act) : null;
}

function showQuestion(page, row, act, reads) {
  const {key, message, asked_by: by, to, asked_at: at, expires_at: until, task_id: id} = row;
  return h("li", {key: row.request_receipt_id},
    h("p", {class: "case-head"}, h("strong", null, say(message))),
    h("p", {class: "quiet"}, who(by), " asks ", who(to), ", ", when(at, page.now()),
      until && [", until ", when(until, page.now())], reads(id) && [" · ", taskLink(id)], " · ", say(key)),
    h("div", {class: "actions"}, answerButtons(row, act)));
}

/** Return the buttons that answer a question; `act` carries the answer out. */
export function answerButtons(row, act) {
  const button = (title, action, run, kind) => h("button", {key: action, class: `${kind} small`,
    "aria-label": `${title}: ${row.message}`, onclick: run}, title);
  return [button("Accept", "accept", () => askToAccept(row, act), "first"),
    button("Decline", "decline", () => askToDecline(row, act), "danger")];
}

function askToAccept(row, act) {
  const {message, schema} = row;
  const fields = listFields(schema);
  return askForm("Accept", {says: message, fields, button: "Accept it",
    run: (values) => answer(row, act, "accept", readContent(schema, fields, values))});
}

function askToDecline(row, act) {
  return askForm("Decline", {says: row.message, button: "Decline it", danger: true,
    fields: [{name: "reason", label: "Why", hint: "Its worker is told; may be empty"}],
    run: ({reason}) => answer(row, act, "decline", reason.trim() || null)});
}

async function answer(row, act, action, content) {
  const {open_inputs: open, receipt_id: receipt} = await act("answer_input",
    {task_id: row.task_id, key: row.key, action, content});
  given.push({...row, action, receipt});
  note(open ? `Answered; ${open} more to answer` : "Answered: the task goes on");
}

// A member of a schema that no field fits is typed as JSON.
function listFields(schema) {
  if (!schema) return [{name: "content", label: "Comment", rows: 2, hint: "Its worker gets it; may be empty"}];
  const required = new Set(schema.required ?? []);
  if (schema.type !== "object") return [{name: "content", label: "Answer, as JSON", rows: 3, required: true}];
  return Object.entries(schema.properties ?? {}).map(([name, rule]) => ({
    name, label: rule.title ?? name, hint: rule.description, required: required.has(name) && rule.type !== "boolean",
    value: rule.default ?? firstChoice(rule, required.has(name)), ...inputOf(rule, required.has(name))}));
}

function choicesOf(rule) {
  return rule.enum ?? rule.oneOf?.map((choice) => choice.const);
}

function firstChoice(rule, isRequired) {
  return rule.type === "boolean" ? false : choicesOf(rule) && isRequired ? choicesOf(rule)[0] : "";
}

function inputOf(rule, isRequired) {
  if (rule.type === "boolean") return {type: "checkbox"};
  if (choicesOf(rule)) return {options: isRequired ? choicesOf(rule) : ["", ...choicesOf(rule)]};
  if (rule.type === "number" || rule.type === "integer") return {type: "number"};
  if (rule.type === "string") return rule.format === "date" || rule.format === "email" ? {type: rule.format} : {};
  return {rows: 3, hint: rule.description ?? "as JSON"};
}

function readContent(schema, fields, values) {
  if (!schema) return values.content.trim() || null;
  if (schema.type !== "object") return JSON.parse(values.content);
  const given = fields.filter(({name}) => values[name] !== "").map(({name}) => [name, values[name]]);
  return Object.fromEntries(given.map(([name, value]) => [name, readValue(schema.properties[name], value)]));
}

function readValue(rule, value) {
  if (rule.type === "boolean" || rule.type === "string") return value;
  if (choicesOf(rule)) return choicesOf(rule).find((choice) => String(choice) === String(value));
  return rule.type === "number" || rule.type === "integer" ? Number(value) : JSON.parse(value);
}
