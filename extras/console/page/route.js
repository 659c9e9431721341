// The address says what is shown: `#/tasks?q=status:queued`.  It stands behind the #, so it is in no log, and the page
// works behind any path prefix.

const heard = new Set();

/** Return the parts and the parameters of the address. */
export function where() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return {parts: path.split("/").filter(Boolean).map(decode), params: Object.fromEntries(new URLSearchParams(query))};
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;        // a stray %: shown as it is
  }
}

/** Return the address of a place: `link(["tasks", id], {q})`; empty parameters are left out. */
export function link(parts, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

/** Go to a place; `replace` leaves no step in the history, as for each letter of a filter. */
export function go(parts, params, {replace = false} = {}) {
  const address = link(parts, params);
  if (address === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", address);
  for (const hear of heard) hear();
}

/** Call `hear` when the address changes. */
export function onMove(hear) {
  heard.add(hear);
  addEventListener("hashchange", hear);
  addEventListener("popstate", hear);
}
