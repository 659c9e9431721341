// The console: who you are, where you are, and the view that belongs there.

import {call, callPage, inName, keepActor, needsName, onOtherSession, readActor, Refused, session} from "./api.js";
import {askForm, closeDialogs, note, openDialog} from "./dialogs.js";
import {h, render} from "./dom.js";
import {Keys} from "./keys.js";
import {Live} from "./live.js";
import {go, link, onMove, where} from "./route.js";
import {finishSignIn, showSignIn, signOut} from "./sign_in.js";

// In the order of the navigation.  A view is there if the credential may call one of its operations.
const VIEWS = [
  {name: "inbox", title: "Inbox", letter: "i", needs: ["list_obligations", "list_open_obligations"]},
  {name: "tasks", title: "Tasks", letter: "t", needs: ["list_tasks"]},
  {name: "queues", title: "Queues", letter: "q", needs: ["list_queues"]},
  {name: "traffic", title: "Traffic", letter: "f", needs: ["get_traffic"]},
  {name: "workers", title: "Workers", letter: "w", needs: ["list_workers"]},
  {name: "schedules", title: "Schedules", letter: "s", needs: ["list_schedules"]},
  {name: "limits", title: "Limits", letter: "m", needs: ["list_limits"]},
  {name: "ledger", title: "Ledger", letter: "l", needs: ["list_seals"]},
  {name: "admin", title: "Admin", letter: "a", needs: ["list_keys", "list_audit"]},
  {name: "health", title: "Health", letter: "h", needs: ["examine_gate", "health"]},
  {name: "task", title: "Task", needs: ["get_task"], within: "tasks"},
];
const POLL_MS = 15000;          // between looks that no event calls for
const CALM_MS = 1000;           // between two looks that events call for
const THEME = "asyncgate-theme";
const LIVE_WORDS = {live: "live", lost: "reconnecting", off: "every 15 s"};

const shell = document.getElementById("shell");
const keys = new Keys();
const state = {page: null, live: "off", gone: false, menu: false, selecting: false};
const live = new Live(hearEvents, (is) => {
  const healed = is === "live" && state.live === "lost";
  state.live = is;
  drawShell();
  if (healed) state.page?.refresh();
});

/** One visit of a view: its parameters, its data, and what it may do. */
class Page {
  constructor(place, view) {
    this.view = view;
    this.module = {};           // what the view is made of, as soon as the gate has sent it
    this.place = place;
    this.local = {};            // what the view remembers between two drawings
    this.data = null;
    this.problem = null;
    this.leaving = new AbortController();
    this.scrolls = new Set();
    this.looked = 0;
    this.looking = null;
    this.again = false;
    this.drawing = false;
  }

  get params() { return this.place.params; }

  get parts() { return this.place.parts.slice(1); }

  /** Call an operation; leaving the view ends the call. */
  call(operation, ask) {
    return call(operation, ask, {signal: this.leaving.signal});
  }

  /** Call an operation that changes something, in the name of whoever acts; then look again. */
  async act(operation, ask) {
    if (needsName(operation) && !session.actor) await chooseActor();
    const reply = await call(operation, inName(operation, ask));
    this.lookAfterChange();
    return reply;
  }

  /** Call an operation that removes what the view shows; nothing is looked at after it, until it is refused. */
  async callLast(operation, ask) {
    await this.looking;
    const reply = this.looking = this.call(operation, ask);
    reply.catch(() => (this.looking = null));
    return reply;
  }

  /** Look again because something was changed here: no event may tell of it, and what the view keeps is old. */
  lookAfterChange() {
    this.module.forget?.(this);
    return this.refresh();
  }

  may(operation) { return session.may(operation); }

  now() { return session.now(); }

  /** Change parameters of the address. */
  go(params, options) {
    go(this.place.parts, {...this.params, ...params}, options);
  }

  /** Look again, now; a second call while one is under way makes it look once more. */
  refresh() {
    if (this.looking) {
      this.again = true;
      return this.looking;
    }
    return this.looking = this.look().finally(() => {
      this.looking = null;
      if (!this.again || this.leaving.signal.aborted) return;
      this.again = false;
      this.refresh();
    });
  }

  async look() {
    this.looked = performance.now();
    try {
      this.module = await readModule(this.view);
      this.data = await this.module.load(this);
      this.problem = null;
    } catch (problem) {
      if (this.leaving.signal.aborted) return;
      this.problem = problem;
      if (!("status" in problem)) console.error(problem);
    }
    this.redraw();
  }

  /** Draw again before the next frame. */
  redraw() {
    if (this.drawing || state.page !== this) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      if (state.page === this) drawPage(this);
    });
  }

  onScroll(run) { this.scrolls.add(run); }

  leave() {
    this.leaving.abort();
    closeDialogs();     // else they would be taken for questions about what is shown then
  }
}

// A gate that is away cannot send a view that was not looked at before: the next look asks for it again, at another
// address, for a browser may remember that the first one failed.
const failures = new Map();

function readModule({name}) {
  const again = failures.get(name) ?? 0;
  return import(`./views/${name}.js${again ? `?again=${again}` : ""}`).catch(() => {
    failures.set(name, again + 1);
    throw new Refused(0, {message: "the gate did not send this view; if that stays so, load the page again"});
  });
}

function maySee({needs}) {
  return needs.some((name) => session.may(name));
}

function open() {
  if (!session.you) return null;      // the page asks for a credential
  const place = where();
  const view = VIEWS.find((candidate) => candidate.name === place.parts[0] && maySee(candidate));
  if (!view) {
    const first = VIEWS.find(maySee);
    return first ? go([first.name], {}, {replace: true}) : drawNothing();
  }
  const before = state.page;
  if (before?.view === view && before.parts.join() === place.parts.slice(1).join()) {
    before.place = place;
    drawShell();
    before.module.moved?.(before);
    return before.refresh();
  }
  before?.leave();
  state.menu = false;
  state.page = new Page(place, view);
  drawShell();
  scrollTo(0, 0);
  if (before) document.getElementById("main")?.focus({preventScroll: true});
  return state.page.refresh();
}

function isBusyReading() {
  return document.hidden || isSelecting();
}

function isSelecting() {
  const selection = getSelection();
  return selection !== null && !selection.isCollapsed && selection.toString().trim() !== "";
}

/** Say that the page waits while text is selected, since drawing again would end the selection; then go on. */
function noteSelection() {
  if (state.selecting === isSelecting()) return;
  state.selecting = !state.selecting;
  drawShell();
  catchUp();
}

function catchUp() {
  const page = state.page;
  if (!page || isBusyReading()) return;
  if (state.missed || performance.now() - page.looked >= POLL_MS) {
    state.missed = false;
    page.refresh();
  } else page.redraw();       // ages grow
}

function hearEvents(events) {
  const page = state.page;
  if (!page || state.due || !events.some((event) => page.module.concerns?.(event, page) ?? true)) return;
  const wait = Math.max(0, CALM_MS - (performance.now() - page.looked));
  state.due = setTimeout(() => {
    state.due = null;
    if (state.page === page && !isBusyReading()) page.refresh();
    else state.missed = true;
  }, wait);
}

function lookNowAndThen() {
  setInterval(catchUp, 1000);
  document.addEventListener("selectionchange", noteSelection);
  document.addEventListener("visibilitychange", () => document.hidden || state.page?.refresh());
  addEventListener("scroll", () => state.page?.scrolls.forEach((run) => run()), {passive: true});
  addEventListener("resize", () => state.page?.scrolls.forEach((run) => run()));
}

// What is drawn.

function drawShell() {
  if (!session.you) return;
  const place = state.page?.view;
  document.title = place ? `${state.page.module.title?.(state.page) ?? place.title} · AsyncGate` : "AsyncGate";
  render(shell, showTop(), showViews(place),
    h("main", {id: "main", tabindex: "-1", key: `main ${state.page?.place.parts.join("/")}`}));
}

function showTop() {
  const {tenant_id: tenant} = session.you;
  const toggleMenu = () => {
    state.menu = !state.menu;
    drawShell();
  };
  return h("header", {class: "top", key: "top"},
    h("button", {class: "icon menu-button", "aria-label": "Views", "aria-expanded": String(state.menu),
      onclick: toggleMenu}, "☰"),
    h("a", {class: "brand", href: link([])}, "AsyncGate"),
    h("span", {class: "tenant", title: `tenant ${tenant}`}, tenant.slice(-8)),
    h("span", {class: "spring"}),
    showLiveState(),
    h("button", {class: "you", onclick: showYou}, whoAmI()));
}

function showLiveState() {
  const [kind, words] = state.gone ? ["lost", "gate not reachable"]
    : state.selecting ? ["paused", "paused while you select"] : [state.live, LIVE_WORDS[state.live]];
  return h("span", {class: `live ${kind}`, role: "status"}, words);
}

function showViews(place) {
  return h("nav", {class: state.menu ? "views open" : "views", "aria-label": "Views", key: "views"},
    VIEWS.filter((view) => view.letter && maySee(view)).map((view) => h("a", {
      href: link([view.name]), "aria-current": view === place || view.name === place?.within ? "page" : null,
    }, view.title, h("kbd", {"aria-hidden": "true"}, `g ${view.letter}`))));
}

function drawPage(page) {
  const main = document.getElementById("main");
  page.scrolls.clear();
  render(main,
    page.problem && h("div", {class: "problem banner", role: "alert", key: "problem"}, page.problem.message, " ",
      h("button", {onclick: () => page.refresh()}, "Try again")),
    page.problem && !page.data && h("h1", {key: "title"}, page.view.title),
    page.data ? h("div", {key: "view", class: `view ${page.view.name}`}, page.module.show(page.data, page))
      : !page.problem && h("p", {key: "wait", class: "empty"}, "Loading …"));
  document.title = `${page.module.title?.(page) ?? page.view.title} · AsyncGate`;
}

function drawNothing() {
  state.page?.leave();
  state.page = null;
  drawShell();
  render(document.getElementById("main"),
    h("p", {class: "empty"}, "This credential may not see any of the gate's work."));
}

function whoAmI() {
  const {bound, principal_id: id, role} = session.you;
  return h("bdi", null, bound ? id : session.actor ? session.actor.id : role);
}

// Who acts.

async function chooseActor() {
  const answer = await askForm("In whose name?", {
    says: "Others may share this credential. Receipts of what you do will name you as you enter here.", button: "Go on",
    fields: [
      {name: "kind", label: "Kind", value: session.actor?.kind ?? "human", options: ["human", "agent", "service"]},
      {name: "id", label: "Id", value: session.actor?.id ?? "", required: true, hint: "such as grace"}],
    run: ({kind, id}) => ({kind, id: id.trim()})});
  if (!answer) throw new Error("nothing was done: nobody was named");
  keepActor(answer.done);
  drawShell();
}

function showYou() {
  const {tenant_id: tenant, role, scopes, key_id: key, bound} = session.you;
  const facts = () => Object.entries({
    Principal: whoAmI(), Role: role, Scopes: scopes.join(", "), Tenant: tenant, Key: key}).filter(([, value]) => value);
  openDialog("You", (close) => h("div", {class: "stack"},
    h("dl", {class: "facts"}, facts().map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
    h("div", {class: "actions"},
      !bound && h("button", {onclick: () => chooseActor().then(() => close(), () => {})}, "Act as …"),
      h("button", {onclick: changeTheme}, "Light or dark"),
      session.half && h("button", {onclick: () => signOut(false)}, "Sign out"),
      session.half && h("button", {class: "danger", onclick: () => signOut(true)}, "Sign out everywhere"))));
}

function changeTheme() {
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = document.documentElement.dataset.theme ?? preferred;
  applyTheme(theme === "dark" ? "light" : "dark");
}

function applyTheme(theme) {
  if (!theme) return;
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
}

/** Show a refusal that nothing else shows, such as that of a button without a dialog. */
function tellRefusal(event) {
  if (!("status" in Object(event.reason))) return;
  event.preventDefault();
  if (event.reason.status !== 401) note(event.reason.message, "bad");
}

/** Lead past the navigation: an address of #main would be taken for a place. */
function bindSkip() {
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main")?.focus();
  });
}

function bindKeys() {
  for (const view of VIEWS.filter((candidate) => candidate.letter && maySee(candidate))) {
    keys.on(`g ${view.letter}`, `Go to ${view.title}`, () => go([view.name], {}));
  }
  keys.on("/", "Filter", () => document.querySelector("#main input[type=search]")?.focus());
  keys.on("r", "Refresh", () => state.page?.refresh());
  keys.on("j", "To the rows; then j and k go down and up", () => document.querySelector("#main .row-link")?.focus());
  keys.on("d", "Light or dark", changeTheme);
  keys.on("?", "These keys", () => openDialog("Keys", () => keys.describe()));
}

// Signing in, and staying.

async function begin() {
  applyTheme(localStorage.getItem(THEME));
  session.onAnswer = (problem) => {
    if (state.gone === Boolean(problem)) return;
    state.gone = Boolean(problem);
    if (session.you) drawShell();
  };
  session.actor = readActor();
  onOtherSession(() => location.reload());
  const askToSignIn = async (problem) => {
    showSignIn(shell, await callPage("about"), session.half ? problem.message : "");
  };
  await finishSignIn();
  if (!session.half) {        // a call that cannot succeed would be a line in the audit log
    const about = await callPage("about");
    if (!about.open) return showSignIn(shell, about);
  }
  try {
    session.you = await call("whoami");
  } catch (problem) {
    if (problem.status !== 401) throw problem;
    return askToSignIn(problem);
  }
  session.onLost = (problem) => {
    if (!session.you) return;       // it is asked for already, and says itself what is wrong
    live.stop();
    state.page?.leave();
    state.page = session.you = null;
    askToSignIn(problem);
  };
  bindKeys();
  bindSkip();
  addEventListener("unhandledrejection", tellRefusal);
  onMove(open);
  live.start();
  lookNowAndThen();
  await open();
}

begin().catch((problem) => {
  render(shell, h("main", {class: "alone"}, h("h1", null, "The gate does not answer"), h("p", null, problem.message),
    h("button", {class: "first", onclick: () => location.reload()}, "Try again")));
  note(problem.message, "bad");
});
