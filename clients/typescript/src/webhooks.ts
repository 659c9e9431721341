/** Webhooks of a gate: verify that a request is one, and answer it. Runs wherever there is Web Crypto. */
import { AsyncGateError } from "./errors.js";
import type { ReceiptRecord } from "./operations.js";

/** What a webhook tells: a receipt, or what was used. */
export interface WebhookEvent<Data = ReceiptRecord> {
  /** The same at each attempt: keep those that you have seen, and do nothing for one that comes again. */
  readonly id: string;
  readonly type: string;
  readonly timestamp: string;
  readonly data: Data;
}

/** The request is not one of the gate, or is too old. */
export class WebhookRejected extends AsyncGateError { constructor(message: string) { super("webhook_rejected", message); } }

type GivenHeaders = Headers | Readonly<Record<string, string | readonly string[] | undefined>>;

/** Verify a request by its raw body and headers, and return its event; throws WebhookRejected. */
export async function verifyWebhook<Data = ReceiptRecord>(
  body: string | Uint8Array, headers: GivenHeaders, secret: string | readonly string[], options: { toleranceSeconds?: number } = {}): Promise<WebhookEvent<Data>> {
  const secrets = [secret].flat().map(each => String(each ?? "").replace(/^whsec_/, ""));
  if (!secrets.length || secrets.includes("")) throw new TypeError("the secret of the webhook is missing: give what the gate told when the webhook was made (whsec_…); is its variable of the environment set?");
  const [id, timestamp, signatures] = ["webhook-id", "webhook-timestamp", "webhook-signature"].map(name => readHeader(headers, name));
  if (!id || !timestamp || !signatures) throw new WebhookRejected("webhook-id, webhook-timestamp or webhook-signature is missing");
  const age = Math.abs(Date.now() / 1000 - Number(timestamp));
  if (!(age <= (options.toleranceSeconds ?? 300))) throw new WebhookRejected("webhook-timestamp is too far from now: an old request was sent again, or a clock is wrong");
  const text = typeof body === "string" ? body : new TextDecoder().decode(body);
  const signed = new TextEncoder().encode(`${id}.${timestamp}.${text}`);
  const given = signatures.split(" ").filter(each => each.startsWith("v1,")).map(each => decodeBase64(each.slice(3)));
  for (const each of secrets) {
    const key = await crypto.subtle.importKey("raw", decodeBase64(each), { name: "HMAC", hash: "SHA-256" }, false, ["verify"]);
    for (const signature of given) if (await crypto.subtle.verify("HMAC", key, signature, signed)) return { ...JSON.parse(text) as Omit<WebhookEvent<Data>, "id">, id };
  }
  throw new WebhookRejected("no signature fits: the secret is another one, or the body was changed on its way");
}

/**
 * Make a handler of requests: for a route of Next.js, Hono, Bun, Deno or a worker at the edge. It answers 204 when `handle` has ended,
 * and 400 if the request is not one of the gate. If `handle` throws, the answer is 500, and the gate sends the event again.
 */
export function webhookHandler<Data = ReceiptRecord>(secret: string | readonly string[], handle: (event: WebhookEvent<Data>) => unknown): (request: Request) => Promise<Response> {
  return async request => {
    let event: WebhookEvent<Data>;
    try {
      event = await verifyWebhook<Data>(await request.text(), request.headers, secret);
    } catch (error) {
      if (error instanceof WebhookRejected) return new Response(error.message, { status: 400 });
      throw error;
    }
    try {
      await handle(event);
      return new Response(null, { status: 204 });
    } catch (error) {
      console.error(`webhook ${event.id}:`, error);
      return new Response("the receiver failed; send it again", { status: 500 });
    }
  };
}

function readHeader(headers: GivenHeaders, name: string): string | undefined {
  if (headers instanceof Headers) return headers.get(name) ?? undefined;
  const value = Object.entries(headers).find(([key]) => key.toLowerCase() === name)?.[1];
  return typeof value === "string" ? value : value?.[0];
}

function decodeBase64(text: string): Uint8Array<ArrayBuffer> {
  try { return Uint8Array.from(atob(text), char => char.charCodeAt(0)); } catch { throw new WebhookRejected("the secret or a signature is not base64"); }
}
