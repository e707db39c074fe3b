// A table of any length: only the rows that are seen exist, and their data comes page by page.

import { h, put } from "./dom.js";

const ROW_PX = 32;
const PAGE = 200;
const SPARE = 8;

/**
 * A virtual table. `columns` are {name, label, width, cell(row), numeric, minor, sort};
 * `fetchRows(offset, limit)` gives {total, rows}; `link(row)` the address that a row opens.
 */
export async function virtualTable({ columns, fetchRows, link, sort, onSort, empty }) {
  const pages = new Map();
  const first = await fetchRows(0, PAGE);
  pages.set(0, first.rows);
  const total = first.total;
  const widths = columns.map((column) => column.width).join(" ");
  const kept = columns.filter((column) => !column.minor).map((column) => column.narrow ?? column.width);
  let marked = -1;
  let drawn = "";

  const head = h("div", { class: "vrow vhead", role: "row" }, columns.map((column) => {
    const isSorted = column.sort && sort?.replace("-", "") === column.sort;
    const arrow = isSorted ? (sort.startsWith("-") ? " ↓" : " ↑") : "";
    const turn = () => onSort(isSorted && sort.startsWith("-") ? column.sort : `-${column.sort}`);
    return h("div", {
      class: cellClass(column), role: "columnheader",
      "aria-sort": isSorted ? (sort.startsWith("-") ? "descending" : "ascending") : null,
    }, column.sort && onSort
      ? h("button", { type: "button", class: "sort", title: "Sort", onclick: turn }, `${column.label}${arrow}`)
      : column.label);
  }));
  const body = h("div", { class: "vbody", role: "rowgroup" });
  const box = h("div", {
    class: "vtable", role: "table", tabindex: "0", "aria-rowcount": total, "data-virtual": true,
    vars: { "--columns": widths, "--columns-narrow": kept.join(" "), "--row": `${ROW_PX}px` },
  }, head, body);
  body.style.height = `${total * ROW_PX}px`;
  if (!total) return h("p", { class: "muted empty" }, empty ?? "Nothing is here.");

  function rowAt(at) {
    const page = pages.get(Math.floor(at / PAGE));
    return Array.isArray(page) ? page[at % PAGE] : undefined;
  }

  async function load(number) {
    if (pages.has(number)) return;
    pages.set(number, "loading");
    try {
      pages.set(number, (await fetchRows(number * PAGE, PAGE)).rows);
      drawn = "";
      draw();
    } catch {
      pages.delete(number);
    }
  }

  function draw() {
    const top = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - SPARE);
    const num = Math.ceil((box.clientHeight || 600) / ROW_PX) + 2 * SPARE;
    const end = Math.min(total, top + num);
    const state = `${top} ${end} ${marked}`;
    if (state === drawn) return;
    drawn = state;
    for (let page = Math.floor(top / PAGE); page * PAGE < end; page += 1) load(page);
    const rows = [];
    for (let at = top; at < end; at += 1) rows.push(drawRow(at, rowAt(at)));
    put(body, rows);
  }

  function drawRow(at, row) {
    const name = `vrow${at === marked ? " marked" : ""}${row?.error_type ? " failed" : ""}`;
    const attributes = { class: name, role: "row", "aria-rowindex": at + 2, vars: { top: `${at * ROW_PX}px` } };
    if (!row) return h("div", attributes, h("div", { class: "cell muted", role: "cell" }, "…"));
    const address = link(row);
    return h("div", {
      ...attributes, "data-row": true,
      onclick: (event) => {
        if (!event.target.closest("a, button, input") && !String(getSelection())) location.hash = address;
      },
    }, columns.map((column, index) => h("div", { class: cellClass(column), role: "cell" },
      index === 0 ? h("a", { href: address }, column.cell(row)) : column.cell(row))));
  }

  function cellClass(column) {
    return ["cell", column.numeric && "number", column.minor && "minor"].filter(Boolean).join(" ");
  }

  box.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  box.addEventListener("move", (event) => {
    marked = Math.max(0, Math.min(total - 1, marked + event.detail));
    const above = marked * ROW_PX;
    const height = box.clientHeight - ROW_PX;
    if (above < box.scrollTop) box.scrollTop = above;
    else if (above + ROW_PX > box.scrollTop + height) box.scrollTop = above + ROW_PX - height;
    draw();
  });
  new ResizeObserver(() => {
    drawn = "";
    draw();
  }).observe(box);
  draw();
  return box;
}
