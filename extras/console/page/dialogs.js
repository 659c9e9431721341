// Questions, forms and notes.  A question says what will happen, to what, and what cannot be undone.

import {h, render} from "./dom.js";

// What gets the focus when a dialog opens: not the cross that closes it.
const FIRST = ".dialog-body :is(input, select, textarea), .dialog-body button";

let lastDialog = 0;

/** Open a dialog; `show(close)` describes its content; return what it was closed with. */
export function openDialog(title, show, {wide = false} = {}) {
  return new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    const id = `dialog-title-${++lastDialog}`;      // dialogs stand on dialogs, and each has a name of its own
    dialog.className = wide ? "wide" : "";
    let answer = null;
    const close = (value = null) => {
      answer = value;
      dialog.close();
    };
    const draw = () => render(dialog,
      h("header", {key: "head"}, h("h2", {id}, title),
        h("button", {class: "icon", "aria-label": "Close", onclick: () => close()}, "✕")),
      h("div", {key: "body", class: "dialog-body"}, show(close, draw)));
    dialog.setAttribute("aria-labelledby", id);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    draw();
    document.body.append(dialog);
    dialog.showModal();
    dialog.querySelector(FIRST)?.focus();
  });
}

/** Close the dialogs of a view that is left; a secret that is shown once stays. */
export function closeDialogs() {
  for (const dialog of document.querySelectorAll("dialog[open]:not(:has(.secret))")) dialog.close();
}

/** Ask for fields and do something with them.
 *
 * `fields`: [{name, label, value, hint, required, type, step, options, suggested, rows, when(values),
 * changed(values, draw)}].
 * `run(values)` does it; if it throws, the error is shown and the form stays.
 */
export async function askForm(title, {says, fields = [], button = title, danger = false, start, run}) {
  const values = Object.fromEntries(fields.map((field) => [field.name, field.value ?? ""]));
  const state = {problem: null, running: null};
  const answer = await openDialog(title, (close, draw) => {
    start?.(values, draw);
    start = null;
    const submit = async (event) => {
      event.preventDefault();
      if (state.running) return;
      state.running = (async () => run(values))();
      draw();
      try {
        close({done: await state.running});
      } catch (problem) {
        Object.assign(state, {problem: problem.message, running: null});
        draw();
      }
    };
    return h("form", {onsubmit: submit, class: "stack"},
      says && (typeof says === "string" ? h("p", null, says) : says),
      fields.filter((field) => field.when?.(values) ?? true).map((field) => showField(field, values, draw)),
      state.problem && h("p", {class: "problem", role: "alert"}, state.problem),
      h("div", {class: "actions end"},
        h("button", {type: "button", onclick: () => close()}, "Back"),
        h("button", {class: danger ? "danger" : "first", type: "submit", disabled: Boolean(state.running)},
          state.running ? "…" : button)));
  });
  return answer ?? await awaitUnseen(state.running);
}

/** Tell what comes of a call whose dialog was closed meanwhile: that has not ended the call. */
async function awaitUnseen(running) {
  try {
    return running && {done: await running};
  } catch (problem) {
    if (problem.name !== "AbortError") note(problem.message, "bad");
    return null;
  }
}

function showField(field, values, draw) {
  const {name, label, hint, required, type = "text", step, options, suggested, rows, changed} = field;
  const id = `field-${name}`;
  const isBox = type === "checkbox";
  const common = {id, name, required, oninput: (event) => {
    values[name] = isBox ? event.target.checked : event.target.value;
    if (options) draw();
  }, ...(changed && {onchange: () => changed(values, draw)}), ...(suggested && {list: `${id}-list`}),
  ...(hint && {"aria-describedby": `${id}-hint`})};
  const input = options
    ? h("select", common, options.map((text) => h("option", {value: text, selected: text === values[name]}, text)))
    : rows ? h("textarea", {...common, rows, value: values[name], spellcheck: "false"})
      : h("input", {...common, type, step, ...(isBox ? {checked: Boolean(values[name])} : {value: values[name]}),
        autocomplete: "off", spellcheck: "false"});
  return h("div", {class: isBox ? "field check" : "field", key: name},
    h("label", {for: id}, label), input,
    suggested && h("datalist", {id: `${id}-list`}, suggested.map((option) => h("option", {value: option}))),
    hint && h("p", {id: `${id}-hint`, class: "quiet"}, hint));
}

const NOTE_MS = 6000;
const notes = [];
let lastNote = 0;

/** Show a short note; `kind` is good or bad.  A screen reader says it. */
export function note(text, kind = "good") {
  const toast = {id: ++lastNote, text, kind};
  notes.push(toast);
  drawNotes();
  setTimeout(() => dropNote(toast), kind === "bad" ? 3 * NOTE_MS : NOTE_MS);
}

function dropNote(toast) {
  const at = notes.indexOf(toast);
  if (at >= 0) notes.splice(at, 1);
  drawNotes();
}

function drawNotes() {
  render(document.getElementById("notes"), notes.map((toast) => h("div", {key: toast.id, class: `note ${toast.kind}`},
    toast.text, h("button", {class: "icon", "aria-label": "Dismiss", onclick: () => dropNote(toast)}, "✕"))));
}
