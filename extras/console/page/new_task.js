// A new task: its payload in a form made of what its type has declared, or as JSON.

import {askForm, note} from "./dialogs.js";
import {readPayload, writeJson} from "./exact.js";
import {go} from "./route.js";
import {listFields, readContent} from "./schema_form.js";

const MOST_NAMED = 8;
const EXAMPLE_LETTERS = 4000;    // a longer payload is none that somebody edits by hand
const MEMBER = "payload.";       // before the name of a member, which may be called as another field is

/** Ask for a task and create it; where nothing declares its type, the newest task shows what a payload looks like. */
export async function askForTask(page, type = "", known = []) {
  const served = await findServed(page);
  const kinds = served.length ? `Workers ask for ${served.slice(0, MOST_NAMED).join(", ")}`
    : "What kind of work it is: a worker must accept it";
  const state = {schema: null};
  const isForm = ({as_json: asJson}) => state.schema !== null && !asJson;
  const chosen = {name: "type", label: "Type", value: type, required: true,
    suggested: [...new Set([...served, ...known])], hint: kinds, changed: choose};
  const rest = [
    {name: "as_json", label: "Write the payload as JSON", type: "checkbox", value: false, changed: writeOut,
      when: () => state.schema !== null},
    {name: "payload", label: "Payload (JSON)", value: "{}", rows: 8, when: (values) => !isForm(values),
      hint: "What the worker needs; for a type that is known, it begins with the payload of its newest task"},
    {name: "task_summary", label: "Summary", hint: "One line for people; may be empty"}];
  const fields = [chosen, ...rest];

  async function choose(values, draw) {
    const name = values.type.trim();
    const [declared, newest] = await Promise.all([findDeclared(page, name), findNewest(page, name)]);
    if (values.type.trim() !== name) return;
    state.schema = declared?.payload_schema?.properties ? declared.payload_schema : null;
    chosen.hint = declared?.description || kinds;
    const members = state.schema ? listFields(state.schema) : [];
    fields.splice(0, fields.length, chosen,
      ...members.map((field) => ({...field, name: MEMBER + field.name, when: isForm})), ...rest);
    for (const {name: member, value} of members) values[MEMBER + member] ??= value;
    if (newest && values.payload === state.example) values.payload = state.example = newest;
    draw();
  }

  function readMembers(values) {
    const names = Object.keys(state.schema.properties);
    return readContent(state.schema, Object.fromEntries(names.map((name) => [name, values[MEMBER + name]])));
  }

  // Who goes on in JSON begins with what stands in the form.
  function writeOut(values, draw) {
    if (values.as_json) {
      try {
        values.payload = writeJson(readMembers(values), 2);
      } catch { /* what cannot be read yet stays in the form */ }
    }
    draw();
  }

  const answer = await askForm("New task", {button: "Create it", fields,
    start: (values, draw) => {
      state.example = values.payload;
      if (values.type) choose(values, draw);
    },
    run: (values) => page.act("create_task", {type: values.type.trim(),
      payload: isForm(values) ? readMembers(values) : readPayload(values.payload),
      ...(values.task_summary.trim() && {task_summary: values.task_summary.trim()})})});
  if (!answer) return;
  note("Created");
  go(["task", answer.done.task_id], {});
}

async function listTypes(page, type) {
  return page.may("list_types") ? (await page.call("list_types", {type}).catch(() => ({types: []}))).types : [];
}

async function findServed(page) {
  return [...new Set((await listTypes(page)).map(({type}) => type).filter(Boolean))];
}

async function findDeclared(page, type) {
  return (await listTypes(page, type)).find((row) => row.payload_schema);
}

async function findNewest(page, type) {
  if (!page.may("list_tasks")) return null;
  const {tasks: [newest]} = await page.call("list_tasks", {type, limit: 1});
  const text = newest && writeJson(newest.payload, 2);
  return text && text.length <= EXAMPLE_LETTERS ? text : null;
}
