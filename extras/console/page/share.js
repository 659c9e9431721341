// What people take with them: a call as curl, as a command, as Python; a table as CSV or JSON; an id.

import {addressOf, describeCall, namesInPath} from "./api.js";
import {note} from "./dialogs.js";
import {h} from "./dom.js";
import {Exact, writeJson} from "./exact.js";

/** Copy text; over plain http a browser has no clipboard, so a hidden field and the old command do it. */
export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "off-screen";
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (!done) return note("The browser does not let this page copy", "bad");
  }
  note(what);
}

function quoteShell(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Return a call as a curl command; the credential stays in a variable. */
export function asCurl(operation, ask) {
  const {method, path, query, body} = describeCall(operation, ask);
  const parts = ["curl", ...(method === "GET" ? [] : ["-X", method]), quoteShell(addressOf(path + query).href),
    "-H", '"Authorization: Bearer $ASYNCGATE_API_KEY"'];
  if (body) parts.push("-H", quoteShell("content-type: application/json"), "-d", quoteShell(writeJson(body)));
  return parts.join(" ");
}

/** Return a call as a command of `asyncgate`: what the path names comes first, the rest are options. */
export function asCommand(operation, ask = {}) {
  const first = namesInPath(operation);
  const given = Object.entries(ask).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const options = given.filter(([name]) => !first.includes(name)).map(([name, value]) => writeOption(name, value));
  const url = addressOf("").href.replace(/\/$/, "");
  return ["asyncgate", operation.replaceAll("_", "-"), ...first.map((name) => quoteShell(String(ask[name]))),
    ...options, "--url", quoteShell(url)].join(" ");
}

function writeOption(name, value) {
  const option = name.replaceAll("_", "-");
  if (typeof value === "boolean") return value ? `--${option}` : `--no-${option}`;
  const text = typeof value === "object" && !(value instanceof Exact) ? writeJson(value) : String(value);
  return `--${option} ${quoteShell(text)}`;
}

export const FIRST_TASK = {type: "echo", payload: {hello: "world"}};

/** Return a command of this gate, such as `asyncgate worker`. */
export function commandHere(words) {
  return `${words} --url ${quoteShell(addressOf("").href.replace(/\/$/, ""))}`;
}

/** Return the command with which Claude Code connects to this gate. */
export function connectHere() {
  return `claude mcp add --transport http asyncgate ${quoteShell(addressOf("mcp/u?tools=delegate").href)}`;
}

/** Show a command, with a button that copies it. */
export function offerCommand(command) {
  return h("span", {class: "command"}, h("code", null, command),
    h("button", {class: "small", onclick: () => copy(command, "Command copied")}, "Copy"));
}

/** Return a call as Python with the client of this package. */
export function asPython(operation, ask = {}) {
  const given = Object.entries(ask).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const values = given.map(([name, value]) => `${name}=${writePython(value)}`).join(", ");
  return `from asyncgate.clients.http import Http\n\nwith Http("${addressOf("").href.replace(/\/$/, "")}") as gate:\n`
    + `    print(gate.call("${operation}"${values ? `, ${values}` : ""}))\n`;
}

function writePython(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(writePython).join(", ")}]`;
  if (typeof value === "object" && !(value instanceof Exact)) {
    const members = Object.entries(value).map(([name, inner]) => `${JSON.stringify(name)}: ${writePython(inner)}`);
    return `{${members.join(", ")}}`;
  }
  return writeJson(value);
}

/** Offer a call to copy: a button with a menu. */
export function copyMenu(operation, ask, label = "Copy as") {
  const item = (name, write) => h("button", {role: "menuitem",
    onclick: () => copy(write(operation, ask), `Copied as ${name}`)}, name);
  return menu(label, [item("curl", asCurl), item("command", asCommand), item("Python", asPython)]);
}

/** Show a button with a menu; it opens and closes as a disclosure does, and arrows go through its items. */
export function menu(label, items) {
  const chooses = items.some((item) => item.attributes?.role === "menuitem");      // otherwise it only tells something
  return h("details", {class: "menu", onfocusout: (event) => {
    if (!event.currentTarget.contains(event.relatedTarget)) event.currentTarget.open = false;
  }, onkeydown: (event) => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (step) goThrough(event, step);
    if (event.key !== "Escape") return;
    event.stopPropagation();
    event.currentTarget.open = false;
    event.currentTarget.querySelector("summary").focus();
  }, onclick: (event) => {
    if (event.target.closest("button, a")) event.currentTarget.open = false;
  }}, h("summary", {class: "button"}, label),
  h("div", {class: "menu-items", ...(chooses && {role: "menu", "aria-label": label})}, items));
}

function goThrough(event, step) {
  const items = [...event.currentTarget.querySelectorAll("[role=menuitem]")];
  const at = items.indexOf(document.activeElement);
  event.preventDefault();
  event.currentTarget.open = true;
  items[(at < 0 ? step < 0 ? items.length - 1 : 0 : at + step + items.length) % items.length]?.focus();
}

/** Save text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], {type}));
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** Write rows as CSV (RFC 4180); a cell that a spreadsheet would take for a formula begins with an apostrophe. */
export function writeCsv(names, rows) {
  const lines = [names, ...rows.map((row) => names.map((name) => row[name]))];
  return lines.map((line) => `${line.map(writeCell).join(",")}\r\n`).join("");
}

function writeCell(value) {
  const text = value && typeof value === "object" ? writeJson(value) : String(value ?? "");
  const safe = /^[=+\-@\t\r]/.test(text) && !/^-?\d+(\.\d+)?$/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
