// What happens, as it happens: one stream for the page.  A hidden page does not listen; a lost gate is tried again.

import {readJson} from "./exact.js";
import {Refused, send, session} from "./api.js";

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 10000;
const SILENCE_MS = 20000;           // the gate says something every five seconds

/** After which refusals a stream is not tried again. */
export const RETRIES = {never: [400, 401, 403, 404]};

/** Wait before a stream that was lost is tried again: longer each time, and not all pages at once. */
export function waitBefore(attempt) {
  const pause = Math.min(FIRST_RETRY_MS * 2 ** attempt, LONGEST_RETRY_MS);
  return new Promise((resolve) => setTimeout(resolve, pause * (0.5 + Math.random() / 2)));
}

/** Read the events of a stream until it ends; a silent one is given up. */
export async function readEvents(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const timer = setTimeout(() => reader.cancel(), SILENCE_MS);
    const {value, done} = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    events.map(readEvent).filter(({data}) => data).forEach(take);
  }
}

function readEvent(text) {
  const event = {type: "message", data: "", id: null};
  for (const line of text.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue;
    const name = line.slice(0, at);
    const value = line.slice(at + 1).replace(/^ /, "");
    if (name === "event") event.type = value;
    else if (name === "data") event.data += value;
    else if (name === "id") event.id = value;
  }
  return event;
}

/** Follows the stream of receipts and changes; calls `hear(events)` at most once a frame. */
export class Live {
  constructor(hear, tell) {
    this.hear = hear;       // called with the events that have come
    this.tell = tell;       // called with the state: live, lost, off
    this.place = null;
    this.waiting = [];
    this.stopping = null;
    document.addEventListener("visibilitychange", () => document.hidden ? this.stop() : this.start());
  }

  /** Listen until the page is hidden. */
  start() {
    if (this.stopping || document.hidden || !session.may("list_receipts")) return;
    this.stopping = new AbortController();
    this.run(this.stopping);
  }

  /** Stop listening. */
  stop() {
    this.stopping?.abort();
    this.stopping = null;
  }

  async run({signal}) {
    for (let attempt = 0; !signal.aborted; attempt += 1) {
      try {
        await this.listen(signal, () => (attempt = 0));
      } catch (problem) {
        if (signal.aborted) return;
        if (problem instanceof Refused && RETRIES.never.includes(problem.status)) return this.tell("off");
      }
      this.tell("lost");
      await waitBefore(attempt);
    }
  }

  async listen(signal, begun) {
    const since = new Date(session.now() - 5000).toISOString();
    const response = await send(`/v1/receipts/stream${this.place ? "" : `?created_after=${since}`}`, {signal,
      headers: {accept: "text/event-stream", ...(this.place && {"last-event-id": this.place})}});
    if (!response.ok) throw new Refused(response.status, {});
    begun();
    this.tell("live");
    await readEvents(response, (event) => this.take(event));
  }

  take(event) {
    if (event.id) this.place = event.id;
    if (!this.waiting.length) requestAnimationFrame(() => this.deliver());
    this.waiting.push(event);
  }

  deliver() {
    const events = this.waiting;
    this.waiting = [];
    this.hear(events.map(({type, data}) => ({type, get about() { return this.read ??= readJson(data); }})));
  }
}
