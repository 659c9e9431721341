// A form made of a JSON schema: its fields, and the content that is made of what was typed into them.

import {readJson, writeJson} from "./exact.js";

const DEEPEST = 5;      // references that lead to references

/** Return the fields of a form for an object; a member that no field fits is typed as JSON. */
export function listFields(schema) {
  const required = new Set(schema.required ?? []);
  return Object.keys(schema.properties ?? {}).map((name) => {
    const rule = ruleOf(schema, name);
    const isRequired = required.has(name);
    return {name, label: rule.title ?? name, hint: rule.description, required: isRequired && rule.type !== "boolean",
      value: firstValue(rule, isRequired), ...inputOf(rule, isRequired)};
  });
}

/** Return the content for the values of such a form; what is empty is left out. */
export function readContent(schema, values) {
  const given = Object.keys(schema.properties ?? {}).filter((name) => (values[name] ?? "") !== "");
  return Object.fromEntries(given.map((name) => [name, readValue(ruleOf(schema, name), values[name], name)]));
}

// Pydantic writes a member that may be null as one of two, and a class of its own as a reference.
function ruleOf(schema, name) {
  return simplify(schema.properties[name], schema, 0);
}

function simplify(rule, root, depth) {
  const {$ref: reference, anyOf, ...rest} = rule === true || !rule ? {} : rule;
  const target = reference?.startsWith("#/$defs/") && root.$defs?.[reference.slice("#/$defs/".length)];
  const choices = anyOf?.filter(({type}) => type !== "null");
  const next = target || (choices?.length === 1 && choices[0]);
  if (next && depth < DEEPEST) return simplify({...next, ...rest}, root, depth + 1);
  const kinds = Array.isArray(rest.type) ? rest.type.filter((kind) => kind !== "null") : [];
  return kinds.length === 1 ? {...rest, type: kinds[0]} : rest;
}

function choicesOf(rule) {
  const named = rule.oneOf?.every((choice) => "const" in choice) && rule.oneOf.map((choice) => choice.const);
  return rule.enum ?? (named || null);
}

function firstValue(rule, isRequired) {
  const first = choicesOf(rule) && isRequired ? choicesOf(rule)[0] : "";
  const value = rule.default ?? (rule.type === "boolean" ? false : first);
  return typeof value === "object" ? writeJson(value) : value;
}

function inputOf(rule, isRequired) {
  if (rule.type === "boolean") return {type: "checkbox"};
  if (choicesOf(rule)) return {options: isRequired ? choicesOf(rule) : ["", ...choicesOf(rule)]};
  if (rule.type === "integer") return {type: "number"};
  if (rule.type === "number") return {type: "number", step: "any"};
  if (rule.type === "string") return rule.format === "date" || rule.format === "email" ? {type: rule.format} : {};
  return {rows: 3, hint: rule.description ?? "as JSON"};
}

function readValue(rule, value, name) {
  if (rule.type === "boolean" || rule.type === "string") return value;
  if (choicesOf(rule)) return choicesOf(rule).find((choice) => String(choice) === String(value));
  if (rule.type === "number" || rule.type === "integer") return Number(value);
  try {
    return readJson(value);
  } catch {
    throw new Error(`${name} is not JSON; a text stands in double quotes`);
  }
}
