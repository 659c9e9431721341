/** What a worker needs of Node: the folder of its instance and of the ends that it could not deliver, and what its functions log. */
import { open, mkdir, readFile, readdir, rename, rm, stat, utimes } from "node:fs/promises";
import { homedir, hostname } from "node:os";
import { createHash } from "node:crypto";
import { AsyncLocalStorage } from "node:async_hooks";
import { basename, dirname, join } from "node:path";
import { format } from "node:util";
import type { KeptConsole, LogLevel } from "./job.js";
import { replaceFile } from "./folder.js";
import { MemoryPlace, type Letter } from "./letters.js";

const TOUCH_SECONDS = 20;
const SILENT_SECONDS = 60;      // after which a place of another host counts as left

/** The folder of one gate's workers; each gate has its own, because letters are for one gate. */
export function defaultFolder(url: string): string {
  return join(process.env["XDG_STATE_HOME"] || join(homedir(), ".local", "state"), "asyncgate", fileName(url), "node");
}

/** The name of this process for people. */
export function nameProcess(): string { return `${hostname().slice(0, 200)}:${process.pid}`; }

/** Take the first place of a worker that no other process has. */
export async function takePlace(folder: string, workerId: string): Promise<DiskPlace> {
  try {
    await mkdir(folder, { recursive: true, mode: 0o700 });
    for (let number = 1; ; number++) {
      const place = await DiskPlace.take(join(folder, `${fileName(workerId)}.${number}`));
      if (place) return place;
    }
  } catch (cause) {
    throw new Error(`the worker's state cannot be kept in ${folder} (${String(cause)}): name another folder as its option \`state\`, or keep nothing by \`state: null\``, { cause });
  }
}

/** The state of one worker process. */
export class DiskPlace extends MemoryPlace {
  readonly #path: string;
  #last: Promise<unknown> = Promise.resolve();
  readonly #touching: NodeJS.Timeout;

  private constructor(path: string, instanceId: string) {
    super(instanceId);
    this.#path = path;
    this.#touching = setInterval(() => { const moment = new Date(); utimes(`${path}.lock`, moment, moment).catch(() => undefined); }, TOUCH_SECONDS * 1000).unref();
  }

  /** Take a place, unless another process has it. */
  static async take(path: string): Promise<DiskPlace | undefined> {
    if (!await lock(`${path}.lock`)) return undefined;
    let instanceId = await readFile(path, "utf8").catch(() => "");
    if (!/^[0-9a-f]{32}$/.test(instanceId)) await replaceFile(path, instanceId = crypto.randomUUID().replaceAll("-", ""), `${path}.new`, 0o600);
    return new DiskPlace(path, instanceId);
  }

  override async letters(): Promise<Letter[]> { return [...await this.#read(), ...await super.letters()]; }

  override async keep(letter: Letter): Promise<string> {
    try {
      await this.#change(letters => [...letters, letter]);
      return `${this.#path}.letters`;
    } catch (error) {       // a full disk, say
      return `${await super.keep(letter)} (${String(error)})`;
    }
  }

  override async forget(letter: Letter): Promise<void> {
    const text = JSON.stringify(letter);
    if (this.unwritten.includes(letter)) return await super.forget(letter);
    await this.#change(letters => letters.filter(other => JSON.stringify(other) !== text));
  }

  // A worker's other places that hold letters and no process.
  override async *abandoned(): AsyncGenerator<MemoryPlace> {
    const stem = basename(this.#path).replace(/\.\d+$/, "");
    for (const name of await readdir(dirname(this.#path))) {
      const path = join(dirname(this.#path), name.replace(/\.letters$/, ""));
      if (!name.endsWith(".letters") || path === this.#path || basename(path).replace(/\.\d+$/, "") !== stem) continue;
      const place = await DiskPlace.take(path);
      if (!place) continue;
      try { yield place; } finally { await place.close(); }
    }
  }

  override async close(): Promise<void> {
    clearInterval(this.#touching);
    await rm(`${this.#path}.lock`, { force: true });
  }

  async #read(): Promise<Letter[]> {
    const text = await readFile(`${this.#path}.letters`, "utf8").catch(() => "");
    return text.split("\n").flatMap(line => { try { return line ? [JSON.parse(line) as Letter] : []; } catch { return []; } });
  }

  // One change after the other: several tasks may end at once.
  async #change(edit: (letters: Letter[]) => Letter[]): Promise<void> {
    const path = `${this.#path}.letters`, change = this.#last.then(async () => {
      const letters = edit(await this.#read());
      await (letters.length ? replaceFile(path, letters.map(letter => JSON.stringify(letter) + "\n").join(""), `${path}.new`, 0o600) : rm(path, { force: true }));
    });
    this.#last = change.catch(() => undefined);
    await change;
  }
}

function fileName(text: string): string {
  const name = encodeURIComponent(text);
  return name.length <= 150 ? name : `${name.slice(0, 60)}-${createHash("sha256").update(text).digest("hex").slice(0, 32)}`;
}

interface Holder { host: string; pid: number; began: string }

// Node has no file locks that the system ends, so a lock names its process, and one whose process is gone is taken over.
async function lock(path: string): Promise<boolean> {
  const mine: Holder = { host: hostname(), pid: process.pid, began: await readStart(process.pid) };
  for (let tries = 0; tries < 3; tries++) {
    try {
      const file = await open(path, "wx", 0o600);
      await file.writeFile(JSON.stringify(mine));
      await file.close();
      return true;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
    }
    const text = await readFile(path, "utf8").catch(() => "");
    if (await isHeld(path, text)) return false;
    const aside = `${path}.${crypto.randomUUID()}`;
    await rename(path, aside).catch(() => undefined);
    if (await readFile(aside, "utf8").catch(() => text) !== text) await rename(aside, path);     // another process was faster
    await rm(aside, { force: true });
  }
  return false;
}

async function isHeld(path: string, text: string): Promise<boolean> {
  let holder: Holder | undefined;
  try { holder = JSON.parse(text) as Holder; } catch { /* it is being written, or its writer was killed */ }
  const age = await stat(path).then(file => (Date.now() - file.mtimeMs) / 1000, () => Infinity);
  if (!holder || holder.host !== hostname()) return age < (holder ? SILENT_SECONDS : 2);
  try {
    process.kill(holder.pid, 0);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ESRCH") return false;
  }
  return holder.began === await readStart(holder.pid);
}

// When a process began, where the system tells: its number may be another one's by now.
async function readStart(pid: number): Promise<string> {
  const text = await readFile(`/proc/${pid}/stat`, "utf8").catch(() => "");
  const [state, ...fields] = text.slice(text.lastIndexOf(")") + 2).split(" ");
  return state === "Z" ? "ended" : fields[18] ?? "";
}

const METHODS = [["debug", 0], ["log", 1], ["info", 1], ["warn", 2], ["error", 3]] as const;
const LEVELS: readonly LogLevel[] = ["debug", "info", "warn", "error"];

/** Give what functions say by console, also later and in what they await, to whoever runs them; it is shown all the same. */
export function keepConsole(least: LogLevel): KeptConsole {
  const running = new AsyncLocalStorage<(line: string) => void>();
  const kept = METHODS.filter(([, level]) => level >= LEVELS.indexOf(least)).map(([name, level]) => {
    const shown = console[name], both = (...values: unknown[]): void => {
      shown.apply(console, values);
      running.getStore()?.(`${LEVELS[level] ?? ""}: ${format(...values)}`);
    };
    console[name] = both;
    return { name, shown, both };
  });
  return { run: (keep, work) => running.run(keep, work), end: () => { for (const { name, shown, both } of kept) if (console[name] === both) console[name] = shown; } };
}
