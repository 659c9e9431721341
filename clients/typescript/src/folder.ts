/** A folder that all machines mount, as a store of large values; Python's FolderStore reads it, too. */
import { mkdir, open, rename, rm } from "node:fs/promises";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { NotInStore, PayloadDamaged } from "./errors.js";

export const DIGEST = /^[0-9a-f]{64}$/;

/** A store that is a folder. */
export class FolderStore {
  readonly folder: string;

  constructor(folder: string) { this.folder = resolve(folder); }

  /** Keep content: whole or not at all, also if this process or the machine stops. */
  async put(name: string, content: Uint8Array): Promise<string> {
    const path = this.#place(name);
    await mkdir(dirname(path), { recursive: true });
    await replaceFile(path, content, `${path}.${crypto.randomUUID()}.new`);
    return pathToFileURL(path).href;
  }

  /** What a URI names; one that leads out of the folder is refused. */
  async get(uri: string, most: number): Promise<Uint8Array> {
    const path = readPath(uri);
    if (!DIGEST.test(basename(path)) || path !== this.#place(basename(path))) throw new NotInStore(`${uri} is not in the store ${this.folder}`);
    const file = await open(path).catch((error: NodeJS.ErrnoException) => {
      throw error.code === "ENOENT" ? new NotInStore(`${uri} is gone`) : error;
    });
    try {
      if ((await file.stat()).size > most) throw new PayloadDamaged(`${uri} has more than ${most} bytes`);
      return await file.readFile();
    } finally {
      await file.close();
    }
  }

  #place(name: string): string { return join(this.folder, name.slice(0, 2), name); }
}

/** Write a file, first under another name. */
export async function replaceFile(path: string, content: string | Uint8Array, fresh: string, mode?: number): Promise<void> {
  try {
    const file = await open(fresh, "w", mode);
    try {
      await file.writeFile(content);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(fresh, path);
  } finally {
    await rm(fresh, { force: true });
  }
  // What was renamed in a folder outlives a power cut only so, where the system can.
  const folder = await open(dirname(path)).catch(() => undefined);
  await folder?.sync().catch(() => undefined);
  await folder?.close();
}

function readPath(uri: string): string {
  try { return fileURLToPath(uri); } catch { return ""; }
}
