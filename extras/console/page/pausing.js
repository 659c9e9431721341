// Pausing, draining and resuming: of a lane, a type, a worker, or everything in the tenant.

import {askForm, note, openDialog} from "./dialogs.js";
import {h} from "./dom.js";
import {badge, say, section, who} from "./parts.js";
import {readLength, when} from "./time.js";

/** Return what a pause is about, as the operations ask for it. */
export function targetOf(pause) {
  if (pause.worker) return {worker: pause.worker};
  if (pause.whole_tenant) return {whole_tenant: true};
  return {type: pause.type, ...(pause.capabilities && {capabilities: pause.capabilities})};
}

/** Say what a pause is about. */
export function nameTarget({type, capabilities, worker}) {
  if (worker) return ["worker ", say(worker)];
  if (!type) return ["everything in this tenant"];
  const lane = capabilities && (capabilities.length
    ? [" that requires exactly ", say(capabilities.join(", "))] : " that requires nothing");
  return ["type ", say(type), lane];
}

/** Show what is paused, each with its way out. */
export function showPauses(pauses, page) {
  return pauses.length > 0 && section("Paused", {},
    h("ul", {class: "plain stack"}, pauses.map((pause) => showPause(pause, page))));
}

function showPause(pause, page) {
  const target = targetOf(pause);
  const {since, until, reason, paused_by: by, leases_left: left} = pause;
  return h("li", {class: "head", key: JSON.stringify(target)},
    h("p", {class: "spring"}, badge("paused"), " ", h("strong", null, nameTarget(target)),
      ", since ", when(since, page.now()), until && [", ends ", when(until, page.now())],
      ", by ", who(by), reason && [": ", say(reason)],
      left > 0 && h("span", {class: "quiet"}, `; ${count(left, "lease")} left`)),
    h("div", {class: "actions"},
      page.may("drain_work") && left > 0 && h("button", {onclick: () => watchDrain(page, target)}, "Drain"),
      page.may("resume_work") && h("button", {onclick: () => resume(page, target)}, "Resume")));
}

/** Offer to pause, drain or resume one thing; `pauses` are all that hold. */
export function pauseButtons(page, target, pauses) {
  const paused = pauses.some((pause) => JSON.stringify(targetOf(pause)) === JSON.stringify(target));
  return [
    !paused && page.may("pause_work") && h("button", {onclick: () => askPause(page, target)}, "Pause …"),
    !paused && page.may("drain_work") && h("button", {onclick: () => askPause(page, target, {drain: true})}, "Drain …"),
    paused && page.may("resume_work") && h("button", {class: "first", onclick: () => resume(page, target)}, "Resume")];
}

/** Offer to end a pause. */
export function resumeButton(page, pause, name) {
  return page.may("resume_work") && h("button", {class: "small", "aria-label": `Resume: ${name}`,
    onclick: () => resume(page, targetOf(pause))}, "Resume");
}

async function resume(page, target) {
  try {
    const {resumed, pauses_left: left} = await page.act("resume_work", target);
    const rest = left ? `; ${count(left, "other pause")} ${left === 1 ? "is" : "are"} still in force` : "";
    note(resumed ? `Resumed${rest}` : "It was no longer paused");
  } catch (problem) {
    note(problem.message, "bad");
  }
}

const TYPE = "a task type";
const WORKER = "a worker";
const WHOLE = "everything in this tenant";

function readTarget(what, name) {
  if (what === WHOLE) return {whole_tenant: true};
  return what === WORKER ? {worker: name} : {type: name};
}

/** Ask for a pause; without a target it is asked for, too.  A drain goes on to wait for the leases. */
export async function askPause(page, target = null, {drain = false} = {}) {
  const verb = drain ? "Drain" : "Pause";
  const effect = target?.worker ? "It gets no new leases. Those that it has go on"
    : "Workers get no new leases of it. Those that they have go on";
  const answer = await askForm(target ? [`${verb} `, nameTarget(target)] : `${verb} work`, {
    says: `${effect}${drain ? ", and this page shows when none is left" : ""}.`,
    fields: [
      ...(target ? [] : [
        {name: "what", label: "What", value: TYPE, options: [TYPE, WORKER, WHOLE]},
        {name: "name", label: "Its name", required: true, when: ({what}) => what !== WHOLE}]),
      {name: "until", label: "Until", hint: "Such as 30m, 2h, or 2026-12-24T08:00Z. Empty: until somebody resumes it."},
      {name: "reason", label: "Why", hint: "Workers are told, and it is audited."}],
    button: verb, danger: true,
    run: async ({what, name, until, reason}) => {
      const meant = target ?? readTarget(what, name.trim());
      const ask = {...meant, reason, until: readUntil(until, page.now())};
      const pause = await page.act(drain ? "drain_work" : "pause_work", ask);
      return {meant, pause};
    }});
  if (!answer) return;
  if (drain) return watchDrain(page, answer.done.meant);
  const left = answer.done.pause.leases_left;
  note(`Paused${left ? `; ${count(left, "lease")} left` : ""}`);
}

/** Read when a pause ends: a length of time from now, or a time; raises Error. */
export function readUntil(text, now) {
  if (!text.trim()) return undefined;
  const seconds = readLength(text);
  const isDate = /^\d{4}-\d\d-\d\d/.test(text.trim());        // a browser takes 45 for the year 2045
  const moment = seconds === null ? Date.parse(isDate ? text : "") : now + seconds * 1000;
  if (Number.isNaN(moment)) throw new Error(`${text} is not a time: write 30m, 2h, or 2026-12-24T08:00Z`);
  return new Date(moment).toISOString();
}

const DRAIN_SECONDS = 5;        // so long one call waits, and after it a closed dialog ends the waiting

/** Wait until no lease of what is paused is left; the pause stays, however the dialog ends. */
function watchDrain(page, target) {
  const seen = {left: null, problem: null, open: true};
  const watch = async (draw) => {
    while (seen.open && seen.left !== 0) {
      const pause = await page.call("drain_work", {...target, wait_seconds: seen.left === null ? 0 : DRAIN_SECONDS});
      seen.left = pause.leases_left;
      draw();
    }
  };
  return openDialog("Draining", (close, draw) => {
    if (!seen.begun) {
      seen.begun = true;
      watch(draw).catch((problem) => {
        seen.problem = problem.message;
        draw();
      });
    }
    return h("div", {class: "stack"}, h("p", null, "Paused: ", nameTarget(target), "."),
      h("p", {role: "status"}, h("strong", null, sayLeft(seen.left))),
      seen.problem && h("p", {class: "problem", role: "alert"}, seen.problem),
      h("p", {class: "quiet"}, "The pause stays until it is resumed, also if you close this."),
      h("div", {class: "actions end"},
        page.may("resume_work") && h("button", {onclick: () => resume(page, target).then(() => close())}, "Resume"),
        h("button", {class: "first", onclick: () => close()}, seen.left === 0 ? "Done" : "Stop waiting")));
  }).then(() => {
    seen.open = false;
    page.lookAfterChange();
  });
}

function sayLeft(left) {
  if (left === null) return "Counting the leases …";
  if (left === 0) return "No lease is left.";
  return `${count(left, "lease")} left. Waiting for ${left === 1 ? "it" : "them"} to end …`;
}

function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
