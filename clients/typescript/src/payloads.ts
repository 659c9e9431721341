/** Large payloads and results in a store of the clients: the gate has their address, their length and their SHA-256. */
import { NotInStore, PayloadDamaged } from "./errors.js";
import { DIGEST } from "./folder.js";
import { writeJson } from "./http.js";

export { FolderStore } from "./folder.js";
export { NotInStore, PayloadDamaged };

/** Where the content is: it keeps bytes under names. */
export interface Store {
  /** Keep content under a name, anew if it is there; gives its URI. */
  put(name: string, content: Uint8Array): Promise<string>;
  /** What a URI names, if it has at most so many bytes; throws NotInStore, also for a URI of another place, and PayloadDamaged. */
  get(uri: string, most: number): Promise<Uint8Array>;
}

/** Where a value is, its SHA-256 and its length. */
export interface Pointer { readonly uri: string; readonly sha256: string; readonly bytes: number }

/** What is needed of the class S3 of `@aws-sdk/client-s3`. */
export interface S3Client {
  putObject(ask: { Bucket: string; Key: string; Body: Uint8Array; ChecksumAlgorithm: "SHA256"; ContentType: string }): Promise<unknown>;
  getObject(ask: { Bucket: string; Key: string }): Promise<{ ContentLength?: number | undefined; Body?: { transformToByteArray(): Promise<Uint8Array> } | undefined }>;
}

/** A bucket of any service that speaks S3, as Python's S3Store: `new S3Store(new S3({}), "our-bucket", "tasks/")`. */
export class S3Store implements Store {
  constructor(readonly client: S3Client, readonly bucket: string, readonly prefix = "") {}

  /** Keep content; S3 itself checks that it has arrived whole. */
  async put(name: string, content: Uint8Array): Promise<string> {
    await this.client.putObject({ Bucket: this.bucket, Key: this.prefix + name, Body: content, ChecksumAlgorithm: "SHA256", ContentType: "application/json" });
    return this.#name(name);
  }

  /** What a URI names; one of another bucket or prefix is refused. */
  async get(uri: string, most: number): Promise<Uint8Array> {
    const name = uri.slice(-64);
    if (!DIGEST.test(name) || uri !== this.#name(name)) throw new NotInStore(`${uri} is not in the store s3://${this.bucket}/${this.prefix}`);
    const { Body: body, ContentLength: bytes = 0 } = await this.client.getObject({ Bucket: this.bucket, Key: this.prefix + name }).catch((error: Error) => {
      throw error.name === "NoSuchKey" ? new NotInStore(`${uri} is gone`) : error;
    });
    if (!body || bytes > most) throw new PayloadDamaged(`${uri} has more than ${most} bytes`);
    return await body.transformToByteArray();
  }

  #name(name: string): string { return `s3://${this.bucket}/${this.prefix.split("/").map(quote).join("/")}${name}`; }
}

type Fields = Readonly<Record<string, unknown>>;

/** What a client or a worker does with large values, as the Python client does: `new Payloads(new FolderStore("/srv/payloads"))`. */
export class Payloads {
  readonly #above: number;
  readonly #most: number;

  /** Values above `aboveBytes` (256 KiB) go to the store; a pointer that promises more than `mostBytes` (1 GiB) is refused. */
  constructor(readonly store: Store, { aboveBytes = 2 ** 18, mostBytes = 2 ** 30 }: { aboveBytes?: number; mostBytes?: number } = {}) {
    this.#above = aboveBytes;
    this.#most = mostBytes;
  }

  /** Put a value into the store if it is large. */
  async put(value: unknown): Promise<Pointer | undefined> {
    const content = new TextEncoder().encode(writeJson(value));
    if (content.length <= this.#above) return undefined;
    const sha256 = await digest(content);
    return { uri: await this.store.put(sha256, content), sha256, bytes: content.length };
  }

  /** The value that a pointer names; throws NotInStore, or PayloadDamaged if it is another one now. */
  async get({ uri, sha256, bytes }: Pointer): Promise<unknown> {
    if (bytes > this.#most) throw new PayloadDamaged(`${uri} has ${bytes} bytes, and mostBytes is ${this.#most}`);
    const content = await this.store.get(uri, bytes);
    if (content.length !== bytes || await digest(content) !== sha256)
      throw new PayloadDamaged(`${uri} is not what was stored: its SHA-256 or its length differs`);
    return JSON.parse(new TextDecoder().decode(content)) as unknown;
  }

  /** The fields of a call with pointers in place of large values. */
  async stow(operation: string, fields: Fields): Promise<Fields> {
    const { tasks } = fields, stow = operation.startsWith("complete") ? this.#stowResult : this.#stowPayload;
    if (["create_task", "run_task", "complete"].includes(operation)) return await stow.call(this, fields);
    if (!["create_tasks", "complete_tasks"].includes(operation) || !Array.isArray(tasks)) return fields;
    return { ...fields, tasks: await Promise.all(tasks.map(task => stow.call(this, task as Fields))) };
  }

  async #stowPayload(fields: Fields): Promise<Fields> {
    const pointer = fields["payload_pointer"] == null ? await this.put(fields["payload"]) : undefined;
    return pointer ? { ...fields, payload: null, payload_pointer: writePointer(pointer) } : fields;
  }

  async #stowResult(fields: Fields): Promise<Fields> {
    const pointer = await this.put(fields["result"]);
    if (!pointer) return fields;
    const others = listArtifacts(fields["artifacts"]).filter(other => (other as { type?: unknown } | null)?.type !== "inline");
    return { ...fields, result: null, artifacts: [...others, { type: "result", ...pointer }] };
  }

  /** The payload of an offered task, from the store if it is there. */
  async fetchPayload({ payload, payload_pointer: text }: { payload?: unknown; payload_pointer?: string | null }): Promise<unknown> {
    const pointer = payload == null ? readPointer(text ?? "") : undefined;
    return pointer ? await this.get(pointer) : payload;
  }

  /** The result of a task, from the store if it is there. */
  async fetchResult({ result, artifacts }: { result?: unknown; artifacts?: unknown }): Promise<unknown> {
    const pointer = result == null ? listArtifacts(artifacts).map(readArtifact).findLast(read => read) : undefined;    // behind those of the worker
    return pointer ? await this.get(pointer) : result;
  }
}

function writePointer({ uri, sha256, bytes }: Pointer): string { return `${uri}#sha256=${sha256}&bytes=${bytes}`; }

function readPointer(text: string): Pointer | undefined {
  const [, uri, sha256, bytes] = /^([^#]+)#sha256=([0-9a-f]{64})&bytes=([0-9]{1,15})$/.exec(text) ?? [];
  return uri && sha256 ? { uri, sha256, bytes: Number(bytes) } : undefined;
}

// Where the result is; undefined for an artifact that is not such a pointer.
function readArtifact(artifact: unknown): Pointer | undefined {
  const { type, uri, sha256, bytes } = Object(artifact) as Record<string, unknown>;
  const known = type === "result" && typeof uri === "string" && typeof sha256 === "string" && typeof bytes === "number";
  return known ? readPointer(writePointer({ uri, sha256, bytes })) : undefined;
}

// As Python quotes, so that both say the same of the same place.
function quote(text: string): string {
  return encodeURIComponent(text).replace(/[!'()*]/g, char => `%${char.charCodeAt(0).toString(16).toUpperCase()}`);
}

// Artifacts come as a list, as { pointers: […] }, as one object, or not at all.
function listArtifacts(artifacts: unknown): unknown[] {
  if (Array.isArray(artifacts)) return artifacts as unknown[];
  if (typeof artifacts !== "object" || artifacts === null) return [];
  const inner = "pointers" in artifacts ? artifacts.pointers : artifacts;
  return Array.isArray(inner) ? inner as unknown[] : [inner];
}

async function digest(content: Uint8Array): Promise<string> {
  const hash = await crypto.subtle.digest("SHA-256", content as Uint8Array<ArrayBuffer>);
  return [...new Uint8Array(hash)].map(byte => byte.toString(16).padStart(2, "0")).join("");
}
