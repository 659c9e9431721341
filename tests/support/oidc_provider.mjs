// An OpenID provider that others wrote (npm oidc-provider), strict, for one client; the arguments are its callback.
import { createRequire } from "node:module";
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";

const { resolve } = createRequire(`${process.cwd()}/`);
const { Provider } = await import(pathToFileURL(resolve("oidc-provider")));
const server = createServer((request, response) => provider.callback()(request, response));
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const issuer = `http://127.0.0.1:${server.address().port}`;
const provider = new Provider(issuer, {
  clients: [{ client_id: "gate", client_secret: "s e/c:ret", redirect_uris: [process.argv[2]], grant_types: ["authorization_code"] }],
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["name"] },
  pkce: { required: () => true },
  findAccount: (context, id) => ({
    accountId: id,
    claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: true, name: "Ada Lovelace" }),
  }),
});
console.log(issuer);
