// Signing in: a key, or the gate's own OAuth.  The credential is sent once; what stays is half of a session.

import {callPage, keepActor, session} from "./api.js";
import {note} from "./dialogs.js";
import {h, render} from "./dom.js";

const WAY = "asyncgate-oauth";      // what an OAuth sign-in under way needs to finish, in this tab only

/** Show the page that asks for a credential. */
export function showSignIn(shell, about, problem = "") {
  const local = {problem, busy: false, credential: ""};
  const oauth = about.sign_in?.oauth;
  const submit = async (event) => {
    event.preventDefault();
    local.busy = true;
    draw();
    try {
      await signIn(local.credential.trim());
      location.reload();
    } catch (wrong) {
      Object.assign(local, {problem: wrong.message, busy: false});
      draw();
    }
  };
  const draw = () => render(shell, h("main", {class: "alone", key: "sign-in", id: "main"},
    h("p", {class: "quiet"}, "AsyncGate"), h("h1", null, "Sign in"),
    local.problem && h("p", {class: "problem", role: "alert"}, local.problem),
    oauth && h("button", {class: "first", onclick: () => beginOAuth(oauth)}, "Sign in with your account"),
    oauth && h("p", {class: "quiet"}, "or with a key:"),
    h("form", {class: "stack", onsubmit: submit},
      h("label", {for: "credential"}, "Key"),
      h("input", {id: "credential", type: "password", autocomplete: "off", required: true, autofocus: true,
        spellcheck: "false", oninput: (event) => (local.credential = event.target.value)}),
      h("button", {type: "submit", class: oauth ? "" : "first", disabled: local.busy}, "Sign in"),
      h("p", {class: "quiet"}, "An issued key of yours. ", h("code", null, "asyncgate issue-key"), " makes one."))));
  draw();
}

async function signIn(credential) {
  session.half = null;
  const {session: half} = await callPage("sign-in", {credential});
  session.half = half;
  keepActor(null);        // who shares a credential may be somebody else now
}

/** End the session of this browser, or all sessions of its credential. */
export async function signOut(everywhere) {
  try {
    await callPage("sign-out", {everywhere});
  } catch (problem) {
    if (problem.status !== 401) return note(problem.message, "bad");
  }
  session.half = null;
  location.reload();
}

// The gate's own OAuth, with PKCE (RFC 7636): the page is a public client.

function writeBase64(bytes) {
  return btoa(String.fromCharCode(...new Uint8Array(bytes))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

async function beginOAuth(oauth) {
  const verifier = writeBase64(crypto.getRandomValues(new Uint8Array(32)));
  const state = writeBase64(crypto.getRandomValues(new Uint8Array(16)));
  const challenge = writeBase64(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier)));
  sessionStorage.setItem(WAY, JSON.stringify({verifier, state, hash: location.hash}));
  const ask = {response_type: "code", client_id: oauth.client_id, redirect_uri: oauth.redirect_uri, scope: oauth.scope,
    resource: oauth.resource, state, code_challenge: challenge, code_challenge_method: "S256"};
  location.assign(`${oauth.authorize}?${new URLSearchParams(ask)}`);
}

/** Finish a sign-in whose code is in the address; the code does not stay there. */
export async function finishSignIn() {
  const answer = new URLSearchParams(location.search);
  if (!answer.has("code") && !answer.has("error")) return;
  const way = JSON.parse(sessionStorage.getItem(WAY) ?? "null");
  sessionStorage.removeItem(WAY);
  history.replaceState(null, "", location.pathname + (way?.hash ?? ""));
  if (!way || way.state !== answer.get("state")) return note("This sign-in was not begun here. Sign in again.", "bad");
  if (answer.has("error")) return note(answer.get("error_description") ?? "Nobody signed in.", "bad");
  const {oauth} = (await callPage("about")).sign_in;
  const response = await fetch(oauth.token, {method: "POST", body: new URLSearchParams({
    grant_type: "authorization_code", code: answer.get("code"), code_verifier: way.verifier,
    redirect_uri: oauth.redirect_uri, client_id: oauth.client_id, resource: oauth.resource})});
  const token = await response.json();
  if (!response.ok) return note(token.error_description ?? "The sign-in has failed. Sign in again.", "bad");
  await signIn(token.access_token);
}
