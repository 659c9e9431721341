// What happened over time: throughput, failures and waits, of everything or by type, over an hour or a day.

import {chart, sparkline} from "../charts.js";
import {h} from "../dom.js";
import {say, section, tile} from "../parts.js";
import {link} from "../route.js";
import {copyMenu} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayClock, sayLength} from "../time.js";

const SPANS = {hour: {title: "Last hour", step: "a minute"}, day: {title: "Last day", step: "5 minutes"}};
const TILES = [["ended", "ended"], ["started", "leases granted"], ["failed", "attempts failed"],
  ["expired", "leases expired"]];
const spanOf = ({params: {span}}) => span in SPANS ? span : "hour";

/** Read what the view shows. */
export function load(page) {
  return page.call("get_traffic", askOf(page));
}

function askOf(page) {
  return {span: spanOf(page), type: page.params.type};
}

/** Each change would draw a day anew: the look every 15 seconds is enough. */
export const concerns = () => false;

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const addUp = ({failed, expired}) => failed.map((number, at) => number + expired[at]);
const isThere = (number) => number !== null;

function sayMean({begun, waited_seconds: waits}) {
  const count = sum(begun);
  return count ? sayLength(sum(begun.map((number, at) => number * waits[at])) / count) : "–";
}

/** Show it. */
export function show(report, page) {
  const {type} = page.params;
  const rows = Object.entries(report.by_type).map(([name, series]) => ({type: name, ...series, lost: addUp(series)}));
  return [
    h("div", {class: "head"}, h("h1", null, "Traffic", type && [": ", say(type)]), h("div", {class: "actions"},
      exportMenu("traffic", [{name: "type"}, ...typeColumns], rows), copyMenu("get_traffic", askOf(page)))),
    h("div", {class: "chips", role: "group", "aria-label": "How long"}, Object.entries(SPANS).map(([span, {title}]) =>
      h("button", {class: "chip", key: span, "aria-pressed": String(span === spanOf(page)),
        onclick: () => page.go({span})}, title)),
    type && h("button", {class: "chip", key: "all", onclick: () => page.go({type: undefined})}, "All types")),
    h("div", {class: "tiles"}, TILES.map(([name, words]) => tile(sum(report.total[name]), words)),
      tile(sayMean(report.total), "mean wait")),
    showCharts(report, page), !type && showTypes(report, rows, page)];
}

function showCharts({begins_at: begins, step_seconds: seconds, total}, page) {
  const {title, step} = SPANS[spanOf(page)];
  const times = total.ended.map((_, at) => Date.parse(begins) + 1000 * seconds * at);
  const timed = (numbers) => numbers.map((number, at) => [times[at], number]);
  const draw = (numbers, label, key) => chart(timed(numbers), `${label} in ${step}`,
    {key, usual: sum(numbers) / numbers.length, mean: "mean"});
  const waits = timed(total.waited_seconds).filter(([, wait]) => isThere(wait));
  const names = ["ended", "started", "failed", "expired", "waited_seconds"];
  const columns = [{name: "time", title: "From", show: ({time}) => sayClock(time, page.now())},
    ...names.map((name) => ({name, title: NAMES[name], number: true,
      show: ({at}) => name === "waited_seconds" ? sayWait(total[name][at]) : total[name][at]}))];
  return section(title, {},
    h("div", {class: "charts"}, draw(total.ended, "Ended", "ended"), draw(addUp(total), "Failed or expired", "lost"),
      waits.length > 0 && chart(waits, "Mean wait for the first lease", {key: "waits", write: sayLength})),
    h("p", {class: "quiet"}, `From ${sayClock(begins, page.now())} until now, in steps of ${seconds / 60} min; the `
      + "last one is not over yet. The dashed line is the mean. What other processes see comes within half a minute."),
    h("details", {key: "numbers", ontoggle: ({currentTarget: {open}}) => {
      if (page.local.numbers === open) return;
      page.local.numbers = open;
      page.redraw();
    }}, h("summary", null, "All numbers"), page.local.numbers && table(page, {name: "numbers", columns,
      caption: h("span", {class: "off-screen"}, "All numbers"), key: ({at}) => at,
      rows: times.map((time, at) => ({time, at})).reverse()})));
}

const NAMES = {ended: "Ended", started: "Leases", failed: "Failed", expired: "Expired", waited_seconds: "Mean wait"};
const sayWait = (seconds) => isThere(seconds) ? sayLength(seconds) : "–";

const countColumn = (name, title) => ({name, title, number: true, value: (row) => sum(row[name]),
  show: (row) => sum(row[name])});
const drawColumn = (name, title) => ({name: `${name}_chart`, title, wide: true, value: () => null,
  show: (row) => drawSmall(row[name], `${title} of ${row.type}`)});
const typeColumns = [countColumn("ended", "Ended"), drawColumn("ended", "Throughput"),
  countColumn("lost", "Failed or expired"), drawColumn("lost", "Failures"),
  {name: "waited", title: "Mean wait", number: true, value: sayMean, show: sayMean},
  drawColumn("waited_seconds", "Waits")];

function drawSmall(numbers, label) {
  const known = numbers.filter(isThere);
  return known.some(Boolean) && sparkline(known, `${label}, from 0 to ${Math.max(...known)}`);
}

function showTypes({types_left: left}, rows, page) {
  const columns = [{name: "type", title: "Type", grow: true, show: ({type}) => type ? say(type) : "others"},
    ...typeColumns];
  return section("By type", {}, table(page, {name: "types", columns, rows, key: ({type}) => type,
    caption: h("span", {class: "off-screen"}, "By type"), empty: "Nothing has happened in this time.",
    open: ({type}) => type ? link(["traffic"], {span: spanOf(page), type}) : null}),
  left > 0 && h("p", {class: "quiet"}, `These are the busiest; ${left} more types are in the sum only.`));
}
