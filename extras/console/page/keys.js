// The keys of the console.  A key in a text field belongs to the field.

import {h} from "./dom.js";

const FIELDS = "input, textarea, select, [contenteditable]";

/** Collects keys and calls what they are for; `g` waits for a second letter. */
export class Keys {
  constructor() {
    this.keys = new Map();      // "/" or "g t": [what it does in words, run]
    this.begun = "";
    addEventListener("keydown", (event) => this.press(event));
  }

  /** Give a key its meaning. */
  on(key, says, run) {
    this.keys.set(key, [says, run]);
  }

  press(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.(FIELDS) || document.querySelector("dialog[open]")) return;
    const key = this.begun ? `${this.begun} ${event.key}` : event.key;
    this.begun = "";
    if (event.key === "g" && key === "g") {
      this.begun = "g";
      return;
    }
    const entry = this.keys.get(key);
    if (!entry) return;
    event.preventDefault();
    entry[1]();
  }

  /** Describe the keys for the help. */
  describe() {
    const spell = (key) => key.split(" ").map((stroke) => h("kbd", null, stroke === "Escape" ? "Esc" : stroke));
    return h("dl", {class: "keys"}, [...this.keys].map(([key, [says]]) => [
      h("dt", null, spell(key)), h("dd", null, says)]));
  }
}
