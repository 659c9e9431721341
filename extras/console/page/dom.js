// A view is a function of its data.  `h` describes elements, `render` brings the document in line with the description.
//
// Security: text becomes text nodes, and attributes are set one by one.  Nothing here, and nothing in the console,
// parses HTML; the policy of the page (Trusted Types) would refuse it.

const SVG = "http://www.w3.org/2000/svg";
const TEXT = Symbol("text");

/** Describe an element: `h("a", {href, onclick, key}, "text", [more])`; null and false are left out as children. */
export function h(tag, attributes, ...children) {
  return {tag, attributes: attributes ?? {}, key: attributes?.key, children: flatten(children), node: null};
}

/** Describe an element whose content is the business of `fill(node)`, which is called once. */
export function raw(tag, attributes, fill) {
  return {...h(tag, attributes), fill};
}

function flatten(children, into = []) {
  for (const child of children) {
    if (Array.isArray(child)) flatten(child, into);
    else if (child === null || child === undefined || child === false) continue;
    else if (child.tag) into.push(child);
    else {      // a value that a view has no words for: a page that shows its JSON is better than an empty one
      const text = typeof child === "object" ? JSON.stringify(child) : String(child);
      into.push({tag: TEXT, text, children: [], node: null});
    }
  }
  return into;
}

/** Bring the children of an element in line with their descriptions; focus, scroll and selection stay. */
export function render(parent, ...children) {
  const wanted = flatten(children);
  patchChildren(parent, parent.described ?? [], wanted);
  parent.described = wanted;
}

function make(wanted, svg) {
  if (wanted.tag === TEXT) return wanted.node = document.createTextNode(wanted.text);
  const inside = svg || wanted.tag === "svg";
  const node = inside ? document.createElementNS(SVG, wanted.tag) : document.createElement(wanted.tag);
  wanted.node = node;
  patchAttributes(node, {}, wanted.attributes);
  if (wanted.fill) wanted.fill(node);
  for (const child of wanted.children) node.append(make(child, inside && wanted.tag !== "foreignObject"));
  wanted.attributes.ready?.(node);
  return node;
}

function patch(known, wanted) {
  const node = wanted.node = known.node;
  if (wanted.tag === TEXT) {
    if (known.text !== wanted.text) node.data = wanted.text;
    return;
  }
  patchAttributes(node, known.attributes, wanted.attributes);
  if (!wanted.fill) patchChildren(node, known.children, wanted.children);
}

function patchChildren(parent, known, wanted) {
  const byKey = new Map(known.filter((node) => node.key !== undefined).map((node) => [node.key, node]));
  const others = known.filter((node) => node.key === undefined);
  const svg = parent.namespaceURI === SVG && parent.tagName !== "foreignObject";
  const kept = new Set();
  const nodes = wanted.map((node) => {
    const isLike = (other) => !kept.has(other) && other.tag === node.tag;
    const match = node.key !== undefined ? byKey.get(node.key) : others.find(isLike);
    if (!match || match.tag !== node.tag || kept.has(match)) return make(node, svg);
    kept.add(match);
    patch(match, node);
    return node.node;
  });
  for (const node of known) if (!kept.has(node)) remove(node.node);
  nodes.forEach((node, at) => {
    if (parent.childNodes[at] !== node) parent.insertBefore(node, parent.childNodes[at] ?? null);
  });
}

// Who has ended a row's task by keyboard goes on with the row that comes next, and not at the top of the page.
function remove(node) {
  const next = node.dataset?.row === "" && node.contains(document.activeElement)
    && (node.nextElementSibling ?? node.previousElementSibling);
  node.remove();
  if (next) next.querySelector("a, button")?.focus({preventScroll: true});
}

function patchAttributes(node, known, wanted) {
  for (const name of Object.keys(known)) if (!(name in wanted)) setAttribute(node, name, null, known[name]);
  for (const [name, value] of Object.entries(wanted)) {
    if (known[name] !== value) setAttribute(node, name, value, known[name]);
  }
}

function setAttribute(node, name, value, before) {
  if (name === "key" || name === "ready") return;
  if (name.startsWith("on")) {
    const event = name.slice(2);
    if (before) node.removeEventListener(event, before);
    if (value) node.addEventListener(event, value);
  } else if (name === "value" || name === "checked" || name === "indeterminate") {
    if (node[name] !== value) node[name] = value ?? "";
  } else if (name === "style") setStyle(node, value ?? {}, before ?? {});
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}

// A style is an object of properties: the policy refuses style attributes.
function setStyle({style}, wanted, before) {
  for (const name of Object.keys(before)) if (!(name in wanted)) style.removeProperty(name);
  for (const [name, value] of Object.entries(wanted)) style.setProperty(name, value);
}
