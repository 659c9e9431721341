// The text filter: `type:ocr status:queued owner:ada age:>1h summary:"monthly report"`.
//
// A filter is text that people copy to each other.  Each view names the words that it knows.  Nothing is left out in
// silence: an unknown word is an error that names the known ones.

import {readLength} from "./time.js";

const SAID_ALREADY = "the filter says this already; put words that belong together into quotes";
const WORD = /([a-z_]+(?:\.[\w.-]+)?):(?:"((?:[^"\\]|\\.)*)"|(\S*))|"((?:[^"\\]|\\.)*)"|(\S+)/gi;

/** Read a filter into `{values, problems}`; `words` maps each word to `(text) => request fields`, which may throw. */
export function readFilter(text, words) {
  const values = {};
  const problems = [];
  for (const [whole, name, quoted, plain, loose, bare] of text.matchAll(WORD)) {
    const [stem, member] = splitWord(name);
    const word = member && `${stem}.` in words ? `${stem}.` : name?.toLowerCase() ?? "";
    const value = unquote(quoted ?? loose) ?? plain ?? bare ?? "";
    if (!(word in words)) {
      const known = Object.keys(words).filter(Boolean).map((prefix) => `${prefix}:`).join(" ");
      problems.push(`${whole} is unknown here; these are known: ${known}`);
    } else if (!value) problems.push(`${whole} needs a value`);
    else {
      try {
        const fields = words[word](value, member);
        if (Object.keys(fields).some((field) => field in values)) throw new Error(SAID_ALREADY);
        Object.assign(values, fields);
      } catch (wrong) {
        problems.push(`${whole}: ${wrong.message}`);
      }
    }
  }
  return {values, problems};
}

// A word may name a member: `payload.order.id:7` is the word `payload.` with the member `order.id`.
function splitWord(name = "") {
  const at = name.indexOf(".");
  return at < 0 ? [name.toLowerCase()] : [name.slice(0, at).toLowerCase(), name.slice(at + 1)];
}

function unquote(text) {
  return text?.replace(/\\(.)/g, "$1");
}

/** Write one word of a filter, quoted where it must be. */
export function writeWord(word, value) {
  const text = String(value);
  return /[\s"]/.test(text) || !text ? `${word}:"${text.replace(/["\\]/g, "\\$&")}"` : `${word}:${text}`;
}

/** Return a filter with one of its words replaced, or left out if the value is null. */
export function withWord(text, word, value) {
  const rest = [...text.matchAll(WORD)].filter(([, name]) => name?.toLowerCase() !== word).map(([whole]) => whole);
  return [...rest, ...(value === null ? [] : [writeWord(word, value)])].join(" ");
}

/** Whether a type is the one that a filter names, as `ocr.scan` or as `ocr*`. */
export function isType(type, text) {
  return text.endsWith("*") ? Boolean(type?.startsWith(text.slice(0, -1))) : type === text;
}

const KINDS = ["agent", "worker", "service", "system", "human", "asyncgate"];

/** Read a principal: `ada`, or `human:ada` with its kind. */
export function readWho(text) {
  const [kind, ...rest] = text.split(":");
  return rest.length && KINDS.includes(kind) ? {kind, id: rest.join(":")} : {id: text};
}

/** Read `>1h` or `<2d` into `{over, seconds}`. */
export function readAge(text) {
  const seconds = readLength(text.slice(1));
  if (!"<>".includes(text[0]) || seconds === null) {
    throw new Error("say >1h for what is older, or <30min for what is newer");
  }
  return {over: text[0] === ">", seconds};
}

/** Read `>2026-11-01` or `<2026-11-01T08:00` into `{after, moment}`; UTC, unless it names a zone. */
export function readMoment(text) {
  const spelled = text.slice(1);
  const moment = new Date(/T/.test(spelled) && !/(Z|[+-]\d\d:?\d\d)$/i.test(spelled) ? `${spelled}Z` : spelled);
  if (!"<>".includes(text[0]) || Number.isNaN(moment.getTime())) {
    throw new Error("say >2026-11-01 or <2026-11-01T08:00 (UTC)");
  }
  return {after: text[0] === ">", moment: moment.toISOString()};
}
