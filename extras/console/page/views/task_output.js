// The output of a task as it comes: a stream that goes on behind what is known, and the end of a long text.

import {OPERATIONS, Refused, send} from "../api.js";
import {readJson, writeJson} from "../exact.js";
import {h} from "../dom.js";
import {readEvents, RETRIES, waitBefore} from "../live.js";
import {badge, section} from "../parts.js";
import {sayHold, sayNumber} from "../say.js";

const MOST_LETTERS = 100000;    // that the page keeps; of more, the last ones
const NEAR_PX = 40;             // so near to its end, the text stays there while more comes

/** Follows the output of one task while its page is looked at. */
export class TaskOutput {
  constructor(page, task_id) {
    Object.assign(this, {page, place: null, parts: [], letters: 0, dropped: 0, chunks: 0, ended: false, node: null});
    this.path = OPERATIONS.read_output.split(" ")[1].replace("{task_id}", encodeURIComponent(task_id));
    const turn = () => document.hidden ? this.stopping?.abort() : this.follow();
    document.addEventListener("visibilitychange", turn, {signal: page.leaving.signal});
    turn();
  }

  /** Follow until the task has ended, the page is hidden or left, or the gate refuses. */
  async follow() {
    if (this.ended || this.page.leaving.signal.aborted) return;
    const stopping = this.stopping = new AbortController();
    const signal = AbortSignal.any([stopping.signal, this.page.leaving.signal]);
    for (let attempt = 0; !this.ended && !signal.aborted; attempt += 1) {
      try {
        await this.listen(signal);
        attempt = 0;
      } catch (problem) {
        if (problem instanceof Refused && RETRIES.never.includes(problem.status)) return;
      }
      if (!this.ended && !signal.aborted) await waitBefore(attempt);
    }
  }

  async listen(signal) {
    const headers = {accept: "text/event-stream", ...(this.place && {"last-event-id": this.place})};
    const response = await send(this.path, {signal, headers});
    if (response.status === 204) this.ended = true;     // there is nothing behind what is known
    else if (!response.ok) throw new Refused(response.status, {});
    else await readEvents(response, (event) => this.take(event));
  }

  take({type, data, id}) {
    if (type === "end") this.ended = true;
    else {
      this.place = id;
      const entry = readJson(data);
      if ("chunk" in entry) this.addChunk(entry);
      else this.add({state: entry.held ? sayHold(entry.held) : entry.status, text: ""});
    }
    if (this.chunks && getSelection().isCollapsed) this.draw();
  }

  /** Texts follow each other as they came; anything else stands on a line of its own. */
  addChunk({chunk, stream}) {
    this.chunks += 1;
    const last = this.parts.at(-1);
    if (typeof chunk !== "string") this.add({json: true, text: writeJson(chunk)});
    else if (stream === "log") this.add({json: true, text: chunk.trimEnd()});
    else if (!last || last.json || last.state) this.add({text: chunk});
    else {
      last.text += chunk;
      this.letters += chunk.length;
    }
    this.trim();
  }

  add(part) {
    this.parts.push({...part, key: this.parts.length + this.dropped});
    this.letters += part.text.length;
  }

  trim() {
    while (this.letters > MOST_LETTERS) {
      const [first] = this.parts;
      const over = Math.min(this.letters - MOST_LETTERS, first.text.length);
      first.text = first.text.slice(over);
      this.letters -= over;
      this.cut = true;
      if (first.text || this.parts.length === 1) return;
      this.parts.shift();
      this.dropped += 1;
    }
  }

  draw() {
    const node = this.node;
    this.follows = !node || node.scrollHeight - node.scrollTop - node.clientHeight < NEAR_PX;
    this.page.redraw();
    if (this.follows) requestAnimationFrame(() => requestAnimationFrame(() => this.toEnd()));
  }

  toEnd() {
    if (this.node) this.node.scrollTop = this.node.scrollHeight;
  }

  /** Show what has come; nothing of a task that gives none. */
  show() {
    if (!this.chunks) return null;
    return section("Output", {id: "output", actions: h("span", {class: "quiet"}, this.sayState())},
      this.cut && h("p", {class: "quiet"}, `Only the last ${sayNumber(MOST_LETTERS)} letters are kept here.`),
      h("pre", {class: "output", tabindex: "0", role: "region", "aria-label": "What the task gives",
        ready: (node) => (this.node = node)}, this.parts.map((part) => part.state
        ? h("span", {key: part.key, class: "output-state"}, badge(part.state))
        : h("bdi", {key: part.key, class: part.json ? "output-json" : null}, part.text))));
  }

  sayState() {
    const chunks = `${sayNumber(this.chunks)} chunk${this.chunks === 1 ? "" : "s"}`;
    return this.ended ? chunks : `${chunks}, live`;
  }
}
