// The timeline of a task: a drawing, one lane for each attempt, and beside it the list that says the same in words.

import {h} from "../dom.js";
import {writeJson} from "../exact.js";
import {badge, say, shortId, taskLink, who} from "../parts.js";
import {sayClock, sayLength, when} from "../time.js";
import {sayHold} from "../say.js";
import {makeScale, momentsOf} from "./task_story.js";

const narrow = matchMedia("(max-width: 56rem)");
const LANE = 40;        // the height of a lane, in pixels
const BAR = {top: 20, height: 12};
const LEAST_TOLD_MS = 1000;     // a shorter wait that has passed is not told
const FIRST_LANES = 3;  // of many lanes, these first ones and the last ones are drawn
const LAST_LANES = 10;
const SIGNS = {completed: "✓", succeeded: "✓", failed: "✕", expired: "!", released: "↩", parked: "⏸", canceled: "⊘",
  going: ""};
const ENDINGS = {completed: "completed", failed: "failed", expired: "lease lost", released: "given back",
  parked: "parked", canceled: "canceled"};
const TONES = {completed: "succeeded", expired: "warning", going: "running", released: "quiet", parked: "quiet"};

/** Show the timeline of a story. */
export function showTimeline(story, task, page) {
  const now = page.now();
  const lanes = chooseLanes(story, page);
  const hidden = story.attempts.length - lanes.length;
  const drawn = {...story, attempts: lanes, waits: story.waits.filter((wait) => isDrawn(wait, story, lanes))};
  drawn.scale = makeScale(momentsOf(drawn, now));
  return [
    drawTimeline(drawn, lanes, story, now),
    h("ul", {class: "legend", "aria-label": "What the drawing means"}, listKeys(story, lanes, drawn)
      .map(([kind, text, , sign]) => h("li", {key: kind}, h("i", {class: `key ${kind}`, "aria-hidden": "true"}, sign),
        text))),
    hidden > 0 && h("p", {class: "quiet"}, `${hidden} attempts in the middle are not drawn. `,
      h("button", {class: "chip", onclick: () => {
        page.local.everyLane = true;
        page.redraw();
      }}, `Show all ${story.attempts.length}`)),
    h("ol", {class: "story"}, listStory(story, lanes, task, now))];
}

function listKeys({end}, attempts, {waits, scale}) {
  const some = (list, fits) => list.some(fits);
  return [["wait", "waits", true], ["rest", "back-off or delay", some(waits, (wait) => wait.resting)],
    ["hold", "on hold", some(waits, (wait) => wait.holds.length)],
    ["granted", "leased, not started", some(attempts, (attempt) => attempt.started || !attempt.until)],
    ["going", "running", some(attempts, (attempt) => attempt.started && !attempt.until)],
    ["left", "what is left of the lease", some(attempts, (attempt) => attempt.expires)],
    ["beat", "last sign of life", some(attempts, (attempt) => attempt.beat)],
    ...Object.entries(ENDINGS).map(([kind, text]) => [kind, text, some(attempts, (attempt) => attempt.until
      && attempt.ending === kind), SIGNS[kind]]),
    ["now", "now", !end],
    ["break", "a long time, drawn short", scale.breaks.length > 0]].filter(([, , shown]) => shown);
}

function chooseLanes(story, page) {
  const all = story.attempts;
  if (page.local.everyLane || all.length <= FIRST_LANES + LAST_LANES + 1) return all;
  return [...all.slice(0, FIRST_LANES), ...all.slice(-LAST_LANES)];
}

function drawTimeline(shown, lanes, story, now) {
  const {scale} = shown;
  const waiting = shown.waits.find((wait) => wait.until === null || !lanes.length);
  const rows = lanes.length + (waiting ? 1 : 0);
  const height = rows * LANE + 22;
  const last = Math.max(story.end ?? now, ...lanes.map((lane) => lane.expires ?? 0), waiting?.resting ?? 0);
  return h("svg", {class: "timeline", height, role: "img", "aria-label": sayDrawing(story, now)},
    h("text", {x: "0", y: 11, class: "axis"}, sayClock(story.begin, now)),
    h("text", {x: "100%", y: 11, class: "axis", "text-anchor": "end"}, sayClock(last, now)),
    scale.breaks.map(({from, until, gap}) => drawBreak((scale.at(from) + scale.at(until)) / 2, height, gap)),
    !story.end && line(scale.at(now), scale.at(now), 16, height, "now"),
    lanes.map((attempt, row) => drawLane(attempt, shown.waits.find((wait) => wait.until === attempt.from), scale,
      18 + row * LANE, now)),
    waiting && drawLastWait(waiting, scale, 18 + lanes.length * LANE, now));
}

function isDrawn(wait, story, lanes) {
  return wait.until === null || lanes.some((lane) => lane.from === wait.until) || !story.attempts.length;
}

function sayDrawing(story, now) {
  const ends = story.attempts.map((attempt) => `${attempt.number} ${attempt.ending}`).slice(-LAST_LANES).join(", ");
  return `Timeline over ${sayLength(((story.end ?? now) - story.begin) / 1000)}: ${story.attempts.length} attempts`
    + `${ends ? ` (${ends})` : ""}. The list below says the same.`;
}

function percent(share) {
  return `${(Math.min(1, Math.max(0, share)) * 100).toFixed(2)}%`;
}

function line(from, to, top, bottom, kind) {
  return h("line", {x1: percent(from), x2: percent(to), y1: top, y2: bottom, class: kind});
}

function bar(from, to, top, kind, title) {
  return h("rect", {x: percent(from), width: percent(Math.max(0.003, to - from)), y: top + BAR.top, height: BAR.height,
    rx: 2, class: kind},
    title && h("title", null, title));
}

function drawBreak(place, height, gap) {
  const fits = !narrow.matches && place > 0.1 && place < 0.88;
  return [line(place, place, 18, height, "break"),
    fits && h("text", {x: percent(place), y: 11, class: "axis", "text-anchor": "middle"},
      `⋯ ${sayLength(gap / 1000)} ⋯`)];
}

function drawWait(wait, scale, top, until) {
  const middle = top + BAR.top + BAR.height / 2;
  const [from, to] = [scale.at(wait.from), scale.at(until)];
  return [line(from, to, middle, middle, "wait"),
    wait.resting && line(from, scale.at(wait.resting), middle, middle, "rest"),
    wait.holds.map((hold) => line(scale.at(hold.from), scale.at(hold.until ?? until), middle, middle, "hold"))];
}

function drawLane(attempt, wait, scale, top, now) {
  const until = attempt.until ?? now;
  const [from, to] = [scale.at(attempt.from), scale.at(until)];
  const begun = attempt.started ? scale.at(attempt.started) : to;
  const label = `${attempt.number} · ${attempt.worker.id} · ${sayEnd(attempt, now)}`;
  const right = from > 0.55 && !narrow.matches;
  const place = narrow.matches ? 0 : right ? Math.max(to, from) : from;
  return h("g", {key: attempt.lease},
    wait && wait.from !== wait.until && drawWait(wait, scale, top, wait.until),
    attempt.expires && bar(to, scale.at(attempt.expires), top, "left",
      `the lease ends ${sayClock(attempt.expires, now)}`),
    (attempt.started || !attempt.until) && bar(from, begun, top, "granted", "leased, not started"),
    (attempt.started || attempt.until) && bar(attempt.started ? begun : from, to, top, attempt.ending, label),
    attempt.beat && line(scale.at(attempt.beat), scale.at(attempt.beat), top + BAR.top - 3,
      top + BAR.top + BAR.height + 3, "beat"),
    attempt.until && h("text", {x: percent(to), y: top + BAR.top + 10, dx: to > 0.97 ? -12 : 4,
      class: `sign ${to > 0.97 ? "inside" : attempt.ending}`},
      SIGNS[attempt.ending] ?? "•"),
    h("text", {x: percent(place), y: top + 14, class: "lane", "text-anchor": right ? "end" : "start"}, label));
}

function drawLastWait(wait, scale, top, now) {
  const until = wait.until ?? Math.max(now, wait.resting ?? 0);
  const held = wait.holds.some((hold) => !hold.until);
  const right = scale.at(wait.from) > 0.55 && !narrow.matches;
  return h("g", {key: "waiting"}, drawWait(wait, scale, top, until), h("text", {
    x: percent(narrow.matches ? 0 : right ? 1 : scale.at(wait.from)), y: top + 14, class: "lane",
    "text-anchor": right ? "end" : "start",
  }, wait.until !== null ? "ended while it waited" : held ? "on hold"
    : wait.resting > now ? "not before its time" : "waits"));
}

function sayState({ending, started}) {
  return ending !== "going" ? ending : started ? "running" : "leased";
}

function sayEnd(attempt, now) {
  const length = sayLength(((attempt.until ?? now) - attempt.from) / 1000);
  return attempt.until ? `${attempt.ending} after ${length}`
    : `${attempt.started ? "running" : "leased"} for ${length}`;
}

// The list.

function listStory(story, lanes, task, now) {
  const items = [h("li", {key: "begin"}, h("p", null, h("strong", null, "Created"), " ", when(task.created_at, now),
    " by ", who(task.created_by)))];
  let told = 0;
  for (const attempt of lanes) {
    if (attempt.number > told + 1) items.push(h("li", {key: `left ${told}`, class: "quiet"},
      `Attempts ${told + 1} to ${attempt.number - 1} are not listed.`));
    const wait = story.waits.find((other) => other.until === attempt.from);
    if (wait && wait.until - wait.from >= LEAST_TOLD_MS) items.push(listWait(wait, now));
    items.push(listAttempt(attempt, story, now));
    told = attempt.number;
  }
  const last = story.waits.find((wait) => wait.until === null) ?? (story.attempts.length ? null : story.waits[0]);
  if (last) items.push(listWait(last, now));
  const others = story.notes.filter((note) => note.attempt === null);
  items.push(others.map((note) => h("li", {key: note.key}, listNote(note, now))));
  if (story.end) items.push(h("li", {key: "end"}, h("p", null, h("strong", null, "Ended"), " ", badge(task.status),
    " ", when(task.result.completed_at, now),
    `, ${sayLength((story.end - story.begin) / 1000)} after its creation`)));
  return items;
}

function listWait(wait, now) {
  const length = sayLength(((wait.until ?? now) - wait.from) / 1000);
  const after = {creation: "", failed: " after a failure", expired: " after a lost lease",
    released: " after the lease was given back", parked: ", parked by its worker"}[wait.after] ?? "";
  const rest = wait.resting && (wait.resting > now ? `; it is offered in ${sayLength((wait.resting - now) / 1000)}`
    : wait.after === "failed" ? `, the first ${sayLength((wait.resting - wait.from) / 1000)} of it as back-off` : "");
  return h("li", {key: `wait ${wait.from}`, class: "wait"},
    h("p", null, wait.until === null ? "Has waited " : "Waited ", length, after, rest,
    wait.holds.map((hold) => [", on hold for ", sayLength(((hold.until ?? wait.until ?? now) - hold.from) / 1000),
      " (", sayHold(hold.held), ")"])));
}

function listAttempt(attempt, story, now) {
  const {worker, from, started, until, expires, beat, renewals, error} = attempt;
  const moment = (time) => when(new Date(time).toISOString(), now);
  const parts = [
    ["leased ", moment(from)],
    started && ["started ", sayLength((started - from) / 1000), " later"],
    until && ["ended after ", sayLength((until - from) / 1000)],
    beat && ["last sign of life ", moment(beat)],
    expires && ["lease ends ", moment(expires)],
    renewals !== null && `${renewals} renewals`,
    attempt.fence !== null && `fence ${attempt.fence}`,
    ["lease ", shortId(attempt.lease)]].filter(Boolean);
  return h("li", {key: attempt.lease, class: attempt.ending},
    h("p", null, h("strong", null, `Attempt ${attempt.number}`), " ",
      badge(sayState(attempt), TONES[attempt.ending]), " ", who(worker),
      worker.instance_id && h("span", {class: "quiet"}, " at ", say(worker.instance_id))),
    h("p", {class: "quiet dotted"}, parts.map((part) => h("span", null, part))),
    error !== null && h("p", {class: "error"}, say(sayError(error))),
    story.notes.filter((note) => note.attempt === attempt.number && note.receipt?.receipt_id !== attempt.end)
      .map((note) => listNote(note, now)));
}

/** Say an error in one line. */
export function sayError(error) {
  const text = typeof error === "string" ? error : error?.message ?? writeJson(error);
  return String(text).slice(0, 500);
}

function listNote({key, at, type, receipt, payload}, now) {
  const to = receipt && receipt.to.kind !== "asyncgate" && [" to ", who(receipt.to)];
  return h("p", {key, class: "quiet"}, h("span", {class: "code"}, type), to, " ",
    when(new Date(at).toISOString(), now), sayDetail(receipt?.body, payload));
}

function sayDetail(body, payload) {
  const code = body?.kind ?? body?.escalation_reason;
  const reason = code ? String(code).replaceAll("_", " ")
    : body?.reason ?? (payload?.held ? sayHold(payload.held) : null);
  if (payload?.rerun_as) return [": as task ", taskLink(payload.rerun_as)];
  return reason && [": ", say(reason)];
}
