// A program that has a person sign in at a gate: node oauth_client.mjs LIBRARY URL ISSUER REDIRECT CLIENT
// LIBRARY is "v2" (@modelcontextprotocol/client), "v1" (@modelcontextprotocol/sdk) or "strict" (oauth4webapi).
// CLIENT is a client id, the URL of a metadata document, or "register" for dynamic registration.
// It prints {"open": URL} and reads from its input where the browser came to; then it prints what it found.
import { createInterface } from "node:readline";

const [library, url, issuer, redirect, client] = process.argv.slice(-5);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

async function visit(address) {
  console.log(JSON.stringify({ open: String(address) }));
  return new URL((await lines.next()).value);
}

const metadata = {
  client_name: "a test", redirect_uris: [redirect], token_endpoint_auth_method: "none",
  grant_types: ["authorization_code", "refresh_token"], response_types: ["code"],
};

// What the SDKs ask of a program: a store of its own for what they learn.
class Provider {
  kept = {};
  get redirectUrl() { return redirect; }
  get clientMetadata() { return metadata; }
  get clientMetadataUrl() { return client.startsWith("https:") ? client : undefined; }
  state() { return crypto.randomUUID(); }
  clientInformation() {
    return this.kept.client ?? (/^(register$|https:)/.test(client) ? undefined : { client_id: client });
  }
  saveClientInformation(information) { this.kept.client = information; }
  tokens() { return this.kept.tokens; }
  saveTokens(tokens) { this.kept.tokens = tokens; }
  redirectToAuthorization(address) { this.kept.address = address; }
  saveCodeVerifier(verifier) { this.kept.verifier = verifier; }
  codeVerifier() { return this.kept.verifier; }
}

async function libraries() {
  if (library === "v2") return import("@modelcontextprotocol/client");
  const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
  const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
  return { Client, StreamableHTTPClientTransport };
}

async function useSdk() {
  const { Client, StreamableHTTPClientTransport } = await libraries();
  const provider = new Provider();
  const connect = async () => {
    const options = library === "v2" ? { versionNegotiation: { mode: "auto" } } : {};
    const program = new Client({ name: "a-test", version: "1" }, options);
    const transport = new StreamableHTTPClientTransport(new URL(url), { authProvider: provider });
    await program.connect(transport);
    return program;
  };
  let refused = null;
  try {
    await connect();
  } catch (error) {
    refused = error.name;
  }
  const back = await visit(provider.kept.address);
  const transport = new StreamableHTTPClientTransport(new URL(url), { authProvider: provider });
  await (library === "v2" ? transport.finishAuth(back.searchParams) : transport.finishAuth(back.searchParams.get("code")));
  const program = await connect();
  const who = (await program.callTool({ name: "asyncgate.whoami", arguments: {} })).structuredContent;
  // The access token is lost; the refresh token gives another one.
  const first = provider.kept.tokens.refresh_token;
  provider.kept.tokens = { ...provider.kept.tokens, access_token: "lost" };
  const again = await connect();
  const still = (await again.callTool({ name: "asyncgate.whoami", arguments: {} })).structuredContent;
  return { refused, who, still, rotated: first !== provider.kept.tokens.refresh_token, scope: provider.kept.tokens.scope };
}

async function useStrictly() {
  const oauth = await import("oauth4webapi");
  const plain = { [oauth.allowInsecureRequests]: true };
  const identifier = new URL(issuer);
  const found = await oauth.discoveryRequest(identifier, { algorithm: "oauth2", ...plain });
  const server = await oauth.processDiscoveryResponse(identifier, found);
  const resource = new URL(url);
  const described = await oauth.resourceDiscoveryRequest(resource, plain);
  const { scopes_supported } = await oauth.processResourceDiscoveryResponse(resource, described);
  const program = { client_id: client };
  const verifier = oauth.generateRandomCodeVerifier();
  const state = oauth.generateRandomState();
  const address = new URL(server.authorization_endpoint);
  const asked = {
    response_type: "code", client_id: client, redirect_uri: redirect, state, resource: url,
    code_challenge: await oauth.calculatePKCECodeChallenge(verifier), code_challenge_method: "S256",
    scope: scopes_supported.join(" "),
  };
  for (const [name, value] of Object.entries(asked)) address.searchParams.set(name, value);
  const back = oauth.validateAuthResponse(server, program, await visit(address), state);
  const exchanged = await oauth.authorizationCodeGrantRequest(
    server, program, oauth.None(), back, redirect, verifier, { additionalParameters: { resource: url }, ...plain });
  const tokens = await oauth.processAuthorizationCodeResponse(server, program, exchanged);
  const refreshed = await oauth.processRefreshTokenResponse(server, program, await oauth.refreshTokenGrantRequest(
    server, program, oauth.None(), tokens.refresh_token, plain));
  const asks = (token) => oauth.protectedResourceRequest(
    token, "GET", new URL(`${issuer}/v1/whoami`), new Headers(), undefined, plain);
  const who = await (await asks(refreshed.access_token)).json();
  const ended = await oauth.revocationRequest(server, program, oauth.None(), refreshed.refresh_token, plain);
  await oauth.processRevocationResponse(ended);
  let refused = null;
  try {
    await asks(refreshed.access_token);
  } catch (error) {
    refused = error.cause.map((challenge) => challenge.parameters.error);
  }
  return { who, refused, rotated: tokens.refresh_token !== refreshed.refresh_token, scope: tokens.scope };
}

console.log(JSON.stringify(await (library === "strict" ? useStrictly() : useSdk())));
process.exit(0);
