// Times and lengths of time, as people say them.

import {h} from "./dom.js";

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const SECONDS = {s: 1, sec: 1, m: 60, min: 60, h: 3600, d: 86400, w: 604800};
const CLOCK = {hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false};
const clock = new Intl.DateTimeFormat(undefined, CLOCK);
const full = new Intl.DateTimeFormat(undefined, {dateStyle: "medium", timeStyle: "long"});
const day = new Intl.DateTimeFormat(undefined, {day: "numeric", month: "short"});

/** Say a length of time in at most two units: 41 s, 3 min 5 s, 2 d 4 h. */
export function sayLength(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  const first = UNITS.findIndex(([, length]) => whole >= length);
  if (first < 0) return "0 s";
  const [unit, length] = UNITS[first];
  const count = Math.floor(whole / length);
  const next = UNITS[first + 1];
  const rest = next ? Math.floor((whole % length) / next[1]) : 0;
  return rest && count < 10 ? `${count} ${unit} ${rest} ${next[0]}` : `${count} ${unit}`;
}

// What is past is said in one unit, from two of it on: lists are read at a glance, and the title has the whole time.
function sayAge(seconds) {
  const unit = UNITS.find(([, length]) => seconds >= 2 * length);
  return unit ? `${Math.round(seconds / unit[1])} ${unit[0]}` : sayLength(seconds);
}

/** Read a length of time such as 90s, 5m, 1h or 2d; return its seconds, or null. */
export function readLength(text) {
  const match = /^(\d+(?:\.\d+)?)\s*([a-z]+)$/.exec(text.trim().toLowerCase());
  return match && match[2] in SECONDS ? Number(match[1]) * SECONDS[match[2]] : null;
}

/** Return the seconds since a time that the gate has sent, by the gate's clock. */
export function secondsSince(moment, now) {
  return (now - Date.parse(moment)) / 1000;
}

/** Say when something was or will be: "3 min ago", "in 2 h". */
export function sayWhen(moment, now) {
  const seconds = secondsSince(moment, now);
  return Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${sayAge(seconds)} ago` : `in ${sayLength(-seconds)}`;
}

/** Say the time of day, with the day if it is another one. */
export function sayClock(moment, now) {
  const time = new Date(moment);
  const today = new Date(now).toDateString() === time.toDateString();
  return today ? clock.format(time) : `${day.format(time)} ${clock.format(time)}`;
}

/** Show a time: how long ago, and the whole time for whoever points at it. */
export function when(moment, now) {
  if (!moment) return h("span", {class: "quiet"}, "–");
  return h("time", {datetime: moment, title: `${full.format(new Date(moment))}\n${moment}`}, sayWhen(moment, now));
}
