// People who may sign in, and the sessions of clients that act for them.

import {callAll} from "../api.js";
import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {badge, say, sayThereAreMore, who} from "../parts.js";
import {asCommand, connectHere, copyMenu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {when} from "../time.js";

const TONES = {active: "ok", invited: "note", disabled: "error"};

/** Read the people. */
export function load(page) {
  return callAll(page, "list_users", "users", {tenant: page.params.tenant});
}

function columnsOf(page) {
  return [
    {name: "email", title: "Person", grow: true, show: (user) => say(user.name || user.email || user.principal_id)},
    {name: "principal_id", title: "Acts as", show: (user) => who({kind: user.principal_kind, id: user.principal_id})},
    {name: "role", title: "Role", show: (user) => user.role},
    {name: "state", title: "State", show: (user) => badge(user.state, TONES[user.state])},
    {name: "issuer", title: "From", wide: true, show: (user) => say(user.issuer || "a link or an invitation")},
    {name: "last_seen_at", title: "Last signed in", show: (user) => when(user.last_seen_at, page.now())}];
}

/** Show the people. */
export function show({rows: users, more}, page) {
  const columns = columnsOf(page);
  const actions = {name: "actions", title: "", show: (user) => h("span", {class: "actions"},
    h("button", {onclick: () => disable(page, user)}, user.state === "disabled" ? "Enable" : "Disable"),
    page.may("sign_out_everywhere") && h("button", {onclick: () => signOut(page, user)}, "Sign out"))};
  return [
    h("div", {class: "actions end"},
      page.may("invite_user") && h("button", {class: "first", onclick: () => invite(page)}, "Invite …"),
      exportMenu("people", columns, users, {more}), copyMenu("list_users", {limit: 200})),
    table(page, {name: "people", columns: page.may("change_user") ? [...columns, actions] : columns, rows: users,
      key: (user) => user.user_id, empty: nobody(page)}),
    more && sayThereAreMore(users, "people")];
}

function nobody(page) {
  const words = "Nobody has signed in, and nobody is invited. Keys need no person.";
  const ask = {email: "ada@example.com", role: "agent", tenant: page.params.tenant};
  return page.may("invite_user") ? [words, " ", offerCommand(asCommand("invite_user", ask))] : words;
}

function invite(page) {
  return askForm("Invite a person", {
    says: "Whoever proves this e-mail address to one of the identity providers is let in.",
    fields: [{name: "email", label: "E-mail address", type: "email", required: true},
      {name: "role", label: "Role", value: "agent", options: ["agent", "worker", "admin"]}], button: "Invite",
    run: async ({email, role}) => {
      await page.act("invite_user", {email, role, ...(page.params.tenant && {tenant: page.params.tenant})});
      note(`${email} is invited`);
    }});
}

function disable(page, user) {
  const on = user.state === "disabled";
  return askForm(`${on ? "Enable" : "Disable"} ${user.email || user.principal_id}`, {
    says: on ? "The person may sign in again." : "The person cannot sign in, and all sessions end.", danger: !on,
    fields: [{name: "reason", label: "Why", hint: "It is audited"}], button: on ? "Enable" : "Disable",
    run: ({reason}) => page.act("change_user", {user_id: user.user_id, disabled: !on, reason})});
}

function signOut(page, user) {
  return askForm(`Sign out ${user.email || user.principal_id} everywhere`, {
    says: "All sessions of clients that act for this person end.", button: "Sign out", danger: true,
    run: async () => {
      const {sessions_ended: ended} = await page.act("sign_out_everywhere", {user_id: user.user_id});
      note(`${ended} ${ended === 1 ? "session" : "sessions"} ended`);
    }});
}

/** Read the sessions. */
export function loadSessions(page) {
  return callAll(page, "list_sessions", "sessions");
}

/** Show the sessions, of one tenant if the address names it: the gate lists an operator those of all. */
export function showSessions({rows, more}, page) {
  const {tenant} = page.params;
  const sessions = tenant ? rows.filter((session) => session.tenant === tenant) : rows;
  const now = page.now();
  const columns = [
    {name: "client_name", title: "Client", grow: true, show: (row) => say(row.client_name ?? row.client_id)},
    {name: "principal_id", title: "Acts as", show: (row) => who({kind: row.principal_kind, id: row.principal_id})},
    {name: "begun_at", title: "Begun", wide: true, show: (row) => when(row.begun_at, now)},
    {name: "last_used_at", title: "Last used", show: (row) => when(row.last_used_at, now)},
    {name: "place", title: "Network", wide: true, show: (row) => row.place ?? "–"},
    {name: "ends_at", title: "Ends", show: (row) => row.ended_at ? badge("ended", "warning") : when(row.ends_at, now)}];
  const actions = {name: "actions", title: "",
    show: (row) => !row.ended_at && h("button", {class: "danger", onclick: () => end(page, row)}, "End")};
  return [
    h("div", {class: "actions end"},
      exportMenu("sessions", columns, sessions, {more}), copyMenu("list_sessions", {limit: 200})),
    table(page, {name: "sessions", columns: page.may("end_session") ? [...columns, actions] : columns, rows: sessions,
      key: (row) => row.session_id, empty: ["No client has a session. One begins when a person connects a client: ",
        offerCommand(connectHere())]}),
    more && sayThereAreMore(rows, "sessions")];
}

async function end(page, session) {
  try {
    await page.act("end_session", {session_id: session.session_id});
    note("The session has ended");
  } catch (problem) {
    note(problem.message, "bad");
  }
}
