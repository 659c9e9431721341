// Charts of numbers over time, for the views of queues.

import {h} from "./dom.js";
import {sayNumber} from "./say.js";

/** Draw a small chart of values; the numbers are in its text. */
export function sparkline(values, label) {
  const most = Math.max(1, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const y = (value) => (23 - 22 * value / most).toFixed(1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${y(value)}`).join(" ");
  return h("svg", {class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img",
    "aria-label": label}, h("polyline", {points, fill: "none"}));
}

/** Show a chart of `[[time in ms, number], …]`, with its axis in words; `usual` is a number to compare with, a mean.
 *
 * `write` says a number.
 */
export function chart(samples, label, {key, usual = null, mean = "mean of the hour", write = sayNumber} = {}) {
  const numbers = samples.map(([, number]) => number);
  const last = numbers.at(-1);
  const most = Math.max(1, ...numbers, Math.ceil(usual ?? 0));
  const [from, to] = [samples[0][0], samples.at(-1)[0]];
  const x = (time) => to === from ? 100 : 100 * (time - from) / (to - from);
  const y = (number) => 47 - 44 * number / most;
  const points = samples.map(([time, number]) => `${x(time).toFixed(1)},${y(number).toFixed(1)}`);
  if (samples.length < 2) points.unshift(`0,${y(numbers[0])}`);
  const says = `${label}: now ${write(last)}, at most ${write(Math.max(...numbers))}, `
    + `at least ${write(Math.min(...numbers))}`;
  const usually = usual === null ? "" : `; ${mean} ${usual < 10 ? usual.toFixed(1) : Math.round(usual)}`;
  return h("figure", {class: "chart", key}, h("figcaption", null, label, h("strong", null, write(last))),
    h("svg", {viewBox: "0 0 100 50", preserveAspectRatio: "none", role: "img", "aria-label": says},
      usual === null ? null : h("line", {x1: 0, x2: 100, y1: y(usual), y2: y(usual)}),
      h("polyline", {points: points.join(" "), fill: "none"})),
    h("p", {class: "quiet"}, `0 to ${write(most)}${usually}`));
}
