// Tables: columns that fit the width, rows by keyboard, selection, and export.  Long lists draw only what is in sight.

import {h} from "./dom.js";
import {download, menu, writeCsv} from "./share.js";
import {writeJson} from "./exact.js";
import {sayNumber} from "./say.js";

const SPARE_ROWS = 12;          // above and below what is in sight
const FEW_ROWS = 60;            // so few rows are all drawn, without a window

/** Describe a table.
 *
 * `columns`: [{name, title, show(row), value(row), wide, number, grow, whole}]; `wide` columns are left out on narrow
 * screens, `widest` ones on those of most laptops, too; `whole` ones are never cut.
 * `rows`: the data; `key(row)`: its identity; `open(row)`: the address that a row leads to, if it leads anywhere.
 * `selected`: a Set of keys, if rows can be selected; `more()`: called near the end; `empty`: what to say without rows.
 */
export function table(page, {name, caption, columns, rows, key, open, selected, more, empty = "Nothing here", mark}) {
  const local = page.local[`table ${name}`] ??= {from: 0, to: FEW_ROWS, height: 0};
  if (!rows.length) return h("p", {class: "empty"}, empty);
  const windowed = rows.length > FEW_ROWS;
  const [from, to] = windowed ? [Math.min(local.from, rows.length), Math.min(local.to, rows.length)] : [0, rows.length];
  const scroll = () => {
    const node = local.node;
    if (!node?.isConnected) return;
    const height = local.height = node.querySelector("tbody tr[data-row]")?.offsetHeight || local.height || 44;
    const top = Math.max(0, -node.getBoundingClientRect().top);
    const first = Math.max(0, Math.floor(top / height) - SPARE_ROWS);
    const last = Math.ceil((top + innerHeight) / height) + SPARE_ROWS;
    if (more && last >= rows.length - SPARE_ROWS) more();
    if (windowed && (Math.abs(first - local.from) > SPARE_ROWS / 2 || Math.abs(last - local.to) > SPARE_ROWS / 2)) {
      Object.assign(local, {from: first, to: last});
      page.redraw();
    }
  };
  page.onScroll(scroll);
  const gap = (count, side) => count > 0 && h("tr", {key: side, "aria-hidden": "true"},
    h("td", {class: "gap", colspan: columns.length + (selected ? 1 : 0),
      style: {height: `${count * (local.height || 44)}px`}}));
  const box = (label, checked, change) => h("input", {type: "checkbox", "aria-label": label, checked, onchange: () => {
    change();
    page.redraw();
  }});
  const all = selected && rows.length > 0 && rows.every((row) => selected.has(key(row)));
  const pickAll = () => rows.forEach((row) => all ? selected.delete(key(row)) : selected.add(key(row)));
  const pick = (id) => selected.has(id) ? selected.delete(id) : selected.add(id);
  return h("table", {class: "rows", "aria-rowcount": rows.length + 1, onkeydown: moveByKey,
    ready: (node) => (local.node = node)},
    caption && h("caption", null, caption),
    h("thead", null, h("tr", null,
      selected && h("th", {class: "pick", scope: "col"}, box("Select all rows shown", all, pickAll)),
      columns.map((column) => h("th", {scope: "col", class: classOf(column)},
        column.title || h("span", {class: "off-screen"}, "Actions"))))),
    h("tbody", null, gap(from, "before"),
      rows.slice(from, to).map((row, at) => h("tr",
        {key: key(row), "data-row": "", "aria-rowindex": from + at + 2, class: mark?.(row)},
        selected && h("td", {class: "pick"}, box(`Select ${key(row)}`, selected.has(key(row)), () => pick(key(row)))),
        columns.map((column, index) => h("td", {class: classOf(column), "data-title": column.title},
          showLinked(index === 0 ? open?.(row) : null, showCell(column, row)))))),
      gap(rows.length - to, "after")));
}

function showLinked(address, cell) {
  return address ? h("a", {href: address, class: "row-link"}, cell) : cell;
}

function showCell(column, row) {
  return column.number ? sayNumber(column.show(row)) : column.show(row);
}

function classOf({wide, widest, number, grow, whole}) {
  const names = [whole && "whole", wide && "wide-only", widest && "widest-only", number && "number", grow && "grow"];
  return names.filter(Boolean).join(" ") || null;
}

function moveByKey(event) {
  const step = {j: 1, ArrowDown: 1, k: -1, ArrowUp: -1}[event.key];
  if (!step || !event.target.classList.contains("row-link")) return;
  const links = [...event.currentTarget.querySelectorAll(".row-link")];
  links[links.indexOf(event.target) + step]?.focus();
  event.preventDefault();
}

/** Offer the rows of a table as a file; `more` says that there are rows that the page has not read. */
export function exportMenu(name, columns, rows, {more = false} = {}) {
  const some = more ? `: only the ${rows.length} rows read so far` : "";
  const value = (column, row) => column.value ? column.value(row) : row[column.name];
  const cells = (row) => Object.fromEntries(columns.map((column) => [column.name, value(column, row)]));
  const item = (ending, type, write) => h("button", {role: "menuitem",
    onclick: () => download(`${name}.${ending}`, type, write())}, ending.toUpperCase() + some);
  return menu("Export", [
    item("csv", "text/csv", () => writeCsv(columns.map((column) => column.name), rows.map(cells))),
    item("json", "application/json", () => writeJson(rows, 2))]);
}
