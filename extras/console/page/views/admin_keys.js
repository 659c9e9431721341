// Keys: who has which, since when, until when; issue, rotate, revoke.  A secret is shown once.

import {session} from "../api.js";
import {askForm, note, openDialog} from "../dialogs.js";
import {h} from "../dom.js";
import {badge, say, shortId, who} from "../parts.js";
import {asCommand, copy, copyMenu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {when} from "../time.js";

const ask = (page) => ({limit: 200, tenant: page.params.tenant});

/** Read the keys. */
export function load(page) {
  return page.call("list_keys", ask(page));
}

function stateOf(key, now) {
  if (key.revoked_at) return ["revoked", "error"];
  if (key.expires_at && Date.parse(key.expires_at) <= now) return ["expired", "warning"];
  if (Date.parse(key.not_before) > now) return ["not yet", "note"];
  return key.rotated_to ? ["rotated", "warning"] : ["active", "ok"];
}

function columnsOf(page) {
  const now = page.now();
  return [
    {name: "name", title: "Name", grow: true, show: (key) => say(key.name)},
    {name: "principal_id", title: "Principal", show: (key) => who({kind: key.principal_kind, id: key.principal_id})},
    {name: "role", title: "Role", show: (key) => key.role},
    {name: "scopes", title: "Scopes", wide: true, show: ({scopes}) => h("span",
      {class: "quiet", title: scopes.join(", ")}, scopes.join(", "))},
    {name: "state", title: "State", value: (key) => stateOf(key, now)[0], show: (key) => badge(...stateOf(key, now))},
    {name: "last_used_at", title: "Last used", show: (key) => when(key.last_used_at, now)},
    {name: "expires_at", title: "Expires", wide: true, show: (key) => when(key.expires_at, now)},
    {name: "key_id", title: "Id", wide: true, show: (key) => shortId(key.key_id)}];
}

/** Show the keys. */
export function show({keys, next_cursor: more}, page) {
  const columns = columnsOf(page);
  const actions = {name: "actions", title: "", show: (key) => !key.revoked_at && h("span", {class: "actions"},
    page.may("rotate_key") && h("button", {onclick: () => rotate(page, key)}, "Rotate"),
    page.may("revoke_key") && h("button", {class: "danger", onclick: () => revoke(page, key)}, "Revoke"))};
  const changes = page.may("rotate_key") || page.may("revoke_key");
  return [
    h("div", {class: "actions end"},
      page.may("issue_key") && h("button", {class: "first", onclick: () => issue(page)}, "Issue a key …"),
      exportMenu("keys", columns, keys, {more: Boolean(more)}), copyMenu("list_keys", ask(page))),
    table(page, {name: "keys", columns: changes ? [...columns, actions] : columns, rows: keys,
      key: (key) => key.key_id, empty: ["There is no issued key. ",
        offerCommand(asCommand("issue_key", {name: "mine", principal_kind: "worker", principal_id: "my-worker"}))]}),
    more && h("p", {class: "quiet"}, "These are the first 200: ",
      h("code", null, "asyncgate list-keys"), " shows all.")];
}

const inTenant = (page) => page.params.tenant ? {tenant: page.params.tenant} : {};
const names = (text) => text.split(/[\s,]+/).filter(Boolean);

async function issue(page) {
  const answer = await askForm("Issue a key", {
    fields: [
      {name: "name", label: "Name", required: true, hint: "what it is for"},
      {name: "principal_kind", label: "Whose: kind", value: "agent", options: ["agent", "worker", "human", "service"]},
      {name: "principal_id", label: "Whose: id", required: true, hint: "such as ada"},
      {name: "role", label: "Role", value: "agent", options: ["agent", "worker", "admin"]},
      {name: "scopes", label: "Scopes", hint: "Empty: those of the role"},
      {name: "expires_at", label: "Expires", type: "datetime-local", hint: "Empty: as the settings say"}],
    button: "Issue",
    run: ({scopes, expires_at: until, ...rest}) => page.act("issue_key", {...rest, ...inTenant(page),
      ...(names(scopes).length && {scopes: names(scopes)}),
      ...(until && {expires_at: new Date(until).toISOString()})})});
  if (answer) showSecret(answer.done.api_key, answer.done.key.name);
}

async function rotate(page, key) {
  const answer = await askForm(`Rotate ${key.name}`, {
    says: "A new secret is made. The old one goes on for a while, so that nothing breaks meanwhile.",
    fields: [{name: "hours", label: "Hours that the old one goes on", type: "number", value: "24", required: true}],
    button: "Rotate",
    run: ({hours}) => page.act("rotate_key", {
      key_id: key.key_id, overlap_seconds: Number(hours) * 3600, ...inTenant(page)})});
  if (answer) showSecret(answer.done.api_key, key.name);
}

function revoke(page, key) {
  return askForm(`Revoke ${key.name}`, {
    says: key.key_id === session.you.key_id
      ? "This is the key that you are signed in with. Whoever uses it is refused at once, you too."
      : "Whoever uses it is refused at once. This cannot be undone.",
    fields: [{name: "reason", label: "Why", hint: "It is audited"}], button: "Revoke", danger: true,
    run: async ({reason}) => {
      await page.act("revoke_key", {key_id: key.key_id, reason, ...inTenant(page)});
      note("Revoked");
    }});
}

function showSecret(secret, name) {
  openDialog("The secret, once", (close) => h("div", {class: "stack"},
    h("p", null, "Nobody can show the secret of ", h("strong", null, say(name)), " again. ",
      "Keep it where secrets are kept."),
    h("pre", {class: "code secret"}, secret),
    h("div", {class: "actions end"},
      h("button", {class: "first", onclick: () => copy(secret, "Secret copied")}, "Copy"),
      h("button", {onclick: () => close()}, "Done"))));
}
